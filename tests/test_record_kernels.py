"""scripts/record_kernels.py adds what XLA chose to what is recorded, and says where nothing can be."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "record_kernels.py"

# Runs the script on a machine with these GPUs and a compiler that writes these choices; prints what it was asked for.
HARNESS = """
import importlib.util, json, sys
from pathlib import Path
from absl import app

spec = importlib.util.spec_from_file_location("script", sys.argv[1])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
gpus, choices, targets = json.loads(sys.argv[2])

def compile_plan(plan):
    asked = dict(option.split("=", 1) for option in plan.config.xla_options)
    assert asked.pop("xla_gpu_load_autotune_results_from") == ""
    assert not script.jax.config.jax_enable_compilation_cache
    if choices is not None:
        Path(asked["xla_gpu_dump_autotune_results_to"]).write_text(choices)

script.fit.compile_plan = compile_plan
script.bench.gpu_names = lambda: gpus
script.xla.TARGETS = Path(targets)
sys.argv = sys.argv[:1] + sys.argv[3:]
app.run(script.main, flags_parser=script.parse_own_flags)
"""


def entry(key: str, value: str) -> str:
    return f'entries {{\n  key {{\n    target: "{key}"\n  }}\n  value {{\n    backend: {value}\n  }}\n}}\n'


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, write_small_config):
    return write_small_config(tmp_path_factory.mktemp("config"), batch_size=8)


@pytest.fixture
def record(config_file, tmp_path):
    """`record(choices, *arguments, gpus=)`: exit code, output and errors of the script; `targets` is tmp_path."""

    def run(choices, *arguments, gpus=("NVIDIA H100 80GB HBM3",)):
        machine = json.dumps([list(gpus), choices, str(tmp_path)])
        done = subprocess.run(
            [sys.executable, "-c", HARNESS, SCRIPT, machine, "--config", config_file, *arguments],
            env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


def test_what_was_chosen_joins_what_is_recorded(record, tmp_path):
    path = tmp_path / f"h100-jaxlib{metadata.version('jaxlib')}.autotune.txtpb"
    code, said, errors = record(entry("b", "TRITON") + entry("d", "CUBLAS"))
    assert code == 0 and "2 kernels recorded, 0 kept" in said, errors
    assert path.read_text() == entry("b", "TRITON") + entry("d", "CUBLAS")
    code, said, errors = record(entry("c", "CUDNN") + entry("b", "CUBLASLT"))
    assert code == 0 and "2 kernels recorded, 1 kept" in said, errors
    assert path.read_text() == entry("b", "CUBLASLT") + entry("c", "CUDNN") + entry("d", "CUBLAS")


def test_mistakes_leave_the_record_as_it_is(record, tmp_path):
    for arguments, gpus, told in (
        ((), (), "XLA times kernels on GPUs only, and there is none here"),
        (
            (),
            ("NVIDIA GeForce RTX 4090",),
            "'NVIDIA GeForce RTX 4090' has no short name such as H200: name the file",
        ),
        ((f"--output={tmp_path}/none/a.txtpb",), ("NVIDIA H200",), "there is no folder"),
        ((f"--output={tmp_path}/a.txtpb",), (), "there is none here"),
        (("--config.seq_len=0",), ("NVIDIA H200",), "config.seq_len=0"),
    ):
        code, _, errors = record(entry("a", "CUBLAS"), *arguments, gpus=gpus)
        assert code == 2 and errors.startswith("\nerror: ") and told in errors, errors
    code, _, errors = record(None)
    assert code == 2 and "XLA wrote no choices" in errors
    assert not list(tmp_path.iterdir())
