"""Sets up JAX before any test imports it: 8 virtual CPU devices, strict dtype promotion, quick compiling.

Everything goes through the environment, so the processes that tests start get the same. What is already set wins.
"""

import os
import sys

import pytest

assert "jax" not in sys.modules, (
    "a pytest plugin imported jax before tests/conftest.py could set it up"
)

XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Compiling is most of the suite: 24 sharded train steps take 42 s instead of 78 s (2 cores) with these two. They
    # choose how hard LLVM works on each CPU kernel; XLA's own passes, sharding and collectives stay the same.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # XLA takes the last of two equal flags: the caller's come last.
    os.environ["XLA_FLAGS"] = " ".join((*XLA_FLAGS, os.environ.get("XLA_FLAGS", "")))
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
# float32 products are TF32 on a GPU otherwise, three digits short of what float32 tests ask for.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
# Off, although it would save most of the compiling: some of the train steps in tests/train/test_layouts.py, read back from
# the cache, deadlock in their collectives on 8 CPU devices, and XLA aborts the process (jax 0.10.2 and 0.11.2, 10 of 12
# warm runs). Compiled in the process itself they never did.
# TODO: try again when jax >= 0.13.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")


def pytest_report_header():
    import jax

    devices = jax.devices()
    return f"jax {jax.__version__}, {len(devices)} {devices[0].platform} devices"


SMALL_CONFIG = """
from jaxscale.config import Config, DataConfig, Dtype
from jaxscale.models import llama
from jaxscale.optim import adamw
from jaxscale.schedules import cosine

def get_config(arg=""):
    return Config(
        model=llama.Config(vocab_size=257, model_dim=32, num_layers=1, num_heads=4, num_kv_heads=4, mlp_dim=64),
        optim=adamw.Config(), schedule=cosine.Config(warmup_steps=200), steps=10_000, batch_size={batch_size}, seq_len=32,
        dtype=Dtype.FLOAT32,
        data=DataConfig(path="{folder}/*.txt", cache_dir="{folder}/cache", eval_fraction=0.3),
    )
"""


@pytest.fixture(scope="session")
def write_small_config():
    """`write_small_config(folder, batch_size=8)`: the path of a config of a small model on small text, both in the folder."""

    def write(folder, *, batch_size):
        for number in range(8):
            (folder / f"{number}.txt").write_text(
                f"The cat {number} sat on the mat and looked at the moon. " * 12
            )
        (folder / "config.py").write_text(SMALL_CONFIG.format(folder=folder, batch_size=batch_size))
        return folder / "config.py"

    return write
