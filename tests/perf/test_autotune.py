"""scripts/record_kernels.py adds autotune entries to those recorded, and says where none can be."""

from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxscale.perf import autotune
from tests.perf.scripts import Script

# How ml_collections loads a config file.
pytestmark = pytest.mark.filterwarnings(
    "ignore:the load_module\\(\\) method is deprecated:DeprecationWarning"
)


def entry(key, value):
    return (
        f'entries {{\n  key {{\n    target: "{key}"\n  }}\n  value {{\n    backend: {value}\n  }}\n'
        "}\n"
    )


def keeps_programs() -> bool:
    config: Any = jax.config  # jax has no types for its settings
    return config.jax_enable_compilation_cache


@pytest.fixture(scope="module")
def script():
    return Script("record_kernels")


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, write_small_config):
    return write_small_config(tmp_path_factory.mktemp("config"), batch_size=8)


@pytest.fixture
def record(script, config_file, tmp_path, monkeypatch, capsys):
    """`record(entries, *arguments, gpus=)`: exit code, output and errors of the script.

    The machine has these GPUs, and its compiler writes these entries; `targets` is tmp_path.
    """
    before = keeps_programs()

    def run(entries, *arguments, gpus=("NVIDIA H100 80GB HBM3",)):
        def compile_update(update, plan, **options):
            asked = dict(option.split("=", 1) for option in plan.config.xla_options)
            assert asked.pop("xla_gpu_load_autotune_results_from") == ""
            assert not keeps_programs()
            if entries is not None:
                Path(asked["xla_gpu_dump_autotune_results_to"]).write_text(entries)

        monkeypatch.setattr(autotune.fit, "compile_update", compile_update)
        monkeypatch.setattr(autotune.targets, "FOLDER", tmp_path)
        monkeypatch.setattr(script.module, "gpu_names", lambda: list(gpus))
        code = script.run("--config", config_file, *arguments)
        return code, *capsys.readouterr()

    yield run
    jax.config.update("jax_enable_compilation_cache", before)


def test_what_was_timed_joins_what_is_recorded(record, tmp_path):
    path = tmp_path / f"h100-jaxlib{metadata.version('jaxlib')}.autotune.txtpb"
    code, said, errors = record(entry("b", "TRITON") + entry("d", "CUBLAS"))
    assert code == 0 and "2 autotune entries recorded, 0 kept" in said, errors
    assert path.read_text() == entry("b", "TRITON") + entry("d", "CUBLAS")
    code, said, errors = record(entry("c", "CUDNN") + entry("b", "CUBLASLT"))
    assert code == 0 and "2 autotune entries recorded, 1 kept" in said, errors
    assert path.read_text() == entry("b", "CUBLASLT") + entry("c", "CUDNN") + entry("d", "CUBLAS")


@pytest.mark.parametrize(
    ("arguments", "gpus", "told"),
    [
        ((), (), "XLA times kernels on GPUs only, and there is none here"),
        (
            (),
            ("NVIDIA GeForce RTX 4090",),
            "'NVIDIA GeForce RTX 4090' has no short name such as H200: name the file",
        ),
        (("--output={}/none/a.txtpb",), ("NVIDIA H200",), "there is no folder"),
        (("--output={}/a.txtpb",), (), "there is none here"),
        (("--config.seq_len=0",), ("NVIDIA H200",), "config.seq_len=0"),
    ],
)
def test_mistakes_leave_the_record_as_it_is(record, tmp_path, arguments, gpus, told):
    arguments = [argument.format(tmp_path) for argument in arguments]
    code, _, errors = record(entry("a", "CUBLAS"), *arguments, gpus=gpus)
    assert code == 2 and errors.startswith("\nerror: ") and told in errors, errors
    assert not list(tmp_path.iterdir())


def test_autotuning_that_is_off_leaves_the_record_as_it_is(record, tmp_path):
    code, _, errors = record(None)
    assert code == 2 and "XLA wrote no choices" in errors
    assert not list(tmp_path.iterdir())
