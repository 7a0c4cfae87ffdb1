"""Sets up JAX before any test imports it: 8 virtual CPU devices, strict promotion, quick compiling.

Everything goes through the environment, so the processes that tests start get the same. What is
already set wins.
"""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.forks import Forks

assert "jax" not in sys.modules, (
    "a pytest plugin imported jax before tests/conftest.py could set it up"
)

XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Compiling is most of the suite: 24 sharded train steps take 42 s instead of 78 s (2 cores)
    # with these two. They choose how hard LLVM works on the code of each fusion; XLA's own passes,
    # sharding and collectives stay the same.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    # And the elder of the CPU back end's two ways to write that code, which does without MLIR: a
    # step of two layers on fsdp=8 takes 1.8 s of a core to compile instead of 5.8 (jax 0.10.2), or
    # 1.9 instead of 4.1 (0.11.2). A jaxlib that has lost it ignores it.
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    # Without fused multiply-add, which takes what a fusion happens to put side by side: the same
    # sum then rounds one way on one device and another on eight (1e-5 of a gradient in bfloat16).
    "--xla_cpu_max_isa=AVX",
    # Each program as one piece of code. In 32 it takes 156 memory maps of the process instead of
    # 63, and with the programs that are kept (`compiled_once.py`) a worker came to 58,000 of the
    # 65,530 that Linux allows; beyond, XLA's compiler crashes. Both take the same time.
    "--xla_cpu_parallel_codegen_split_count=1",
)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # XLA takes the last of two equal flags: the caller's come last.
    os.environ["XLA_FLAGS"] = " ".join((*XLA_FLAGS, os.environ.get("XLA_FLAGS", "")))
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
# float32 products are TF32 on a GPU otherwise, three digits short of what float32 tests ask for.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
# Off, although it would save most of the compiling: some of the train steps of
# tests/train/test_layouts.py, read back from the cache, deadlock in their collectives on 8 CPU
# devices, and XLA aborts the process (jax 0.10.2 and 0.11.2, 10 of 12 warm runs). Compiled in the
# process itself they never did.
# TODO: try again when jax >= 0.13.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")

# With where each operation was written, one frame deep instead of ten: three programs in 8 bits are
# traced, lowered and compiled in 50.8 s of a core instead of 55.5 (jax 0.11.2, mean of four runs),
# flash attention's kernels lowered in 4.9 instead of 5.8.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "1")

# Tracing makes containers by the million and hardly any cycles: looking for those after every 700
# takes an eighth of the time to trace and lower an update.
gc.set_threshold(50_000, 20, 100)


# Files that take over 20 s, longest first. Begun first, they leave no worker alone with a long file
# at the end.
LONGEST = (
    "tests/step/test_layouts.py",
    "tests/parallel/",
    "tests/train/test_run.py",
    "tests/train/test_hosts.py",
    "tests/compile/test_ahead.py",
    "tests/step/",
    "tests/models/test_regions.py",
    "tests/compile/test_fit.py",
    "tests/test_bad_input.py",
    "tests/mistakes/",
    "tests/models/test_protocol.py",
    "tests/inference/",
    "tests/models/",
    "tests/train/",
    "tests/checkpoint/",
    "tests/perf/test_whole_run.py",
    "tests/perf/test_contest.py",
    "tests/test_config.py",
)


def pytest_collection_modifyitems(items):
    def rank(item):
        names = (number for number, name in enumerate(LONGEST) if item.nodeid.startswith(name))
        return next(names, len(LONGEST))

    items.sort(key=rank)


def pytest_report_header():
    import jax

    devices = jax.devices()
    return f"jax {jax.__version__}, {len(devices)} {devices[0].platform} devices"


@pytest.fixture(scope="session", autouse=True)
def _compiled_once():
    from tests.compiled_once import compiled_once

    with compiled_once():
        yield


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    with Forks(tmp_path_factory.mktemp("forks")) as forks:
        yield forks


@pytest.fixture
def spawn():
    """`spawn(command, **options) -> Popen`; when the test ends, so do the process and its pipes."""
    with contextlib.ExitStack() as stack:

        def spawn(command, **options):
            process = stack.enter_context(subprocess.Popen(command, text=True, **options))
            stack.callback(process.kill)
            return process

        yield spawn


@pytest.fixture
def sigint_by_default():
    """SIGINT interrupts, here and in processes that are started here.

    A shell without job control has it ignored in what it starts with `&`, and so in all below.
    """
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


SMALL_CONFIG = """
from jaxscale.config import Config, DataConfig, Dtype
from jaxscale.models import llama
from jaxscale.optim import adamw
from jaxscale.schedules import cosine

def get_config(arg=""):
    return Config(
        model=llama.Config(
            vocab_size=257, model_dim=32, num_layers=1, num_heads=4, num_kv_heads=4, mlp_dim=64
        ),
        optim=adamw.Config(),
        schedule=cosine.Config(warmup_steps=200),
        steps=10_000,
        batch_size={batch_size},
        seq_len=32,
        dtype=Dtype.FLOAT32,
        data=DataConfig(path="{folder}/*.txt", cache_dir="{folder}/cache", eval_fraction=0.3),
    )
"""


@pytest.fixture(scope="session")
def write_small_config():
    """`write_small_config(folder, batch_size=8)`: the path of a small config, beside its text."""

    def write(folder, *, batch_size):
        for number in range(8):
            (folder / f"{number}.txt").write_text(
                f"The cat {number} sat on the mat and looked at the moon. " * 12
            )
        (folder / "config.py").write_text(SMALL_CONFIG.format(folder=folder, batch_size=batch_size))
        return folder / "config.py"

    return write


ONE_OF_TWO = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
index, arguments = int(sys.argv[2]), sys.argv[3:]
"""


@pytest.fixture(scope="session")
def run_two_processes():
    """`run_two_processes(script, *arguments)`: what each of two processes of one run printed.

    Each has two CPU devices, its `index`, and the `arguments` as strings.
    """

    def run(script, *arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = os.environ.get("XLA_FLAGS", "")  # the last of two equal ones counts
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=2",
        }
        code = ONE_OF_TWO + textwrap.dedent(script)
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, *map(str, (port, index, *arguments))],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index in range(2)
        ]
        try:
            outputs = [process.communicate(timeout=600)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
        return outputs

    return run
