"""What must precede the start is set, and no flag of a user's aborts it."""

import subprocess
import sys
from importlib import metadata

import pytest

from jaxscale.xla import environment as xla_environment
from jaxscale.xla.environment import MEMORY_FRACTION, VARIABLES, set_environment

JAXLIB = f"jaxlib {metadata.version('jaxlib')}"


def test_what_must_precede_the_start_is_set_and_the_user_wins(environment):
    for variable in VARIABLES:
        environment.pop(variable.name, None)
    set_environment()
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == MEMORY_FRACTION
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert environment["NCCL_NVLS_ENABLE"] == "0" and "XLA_FLAGS" not in environment
    environment.update(XLA_PYTHON_CLIENT_MEM_FRACTION="0.5", NCCL_NVLS_ENABLE="1")
    set_environment()
    assert (
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
        and environment["NCCL_NVLS_ENABLE"] == "1"
    )


FLAGS = (
    "--xla_gpu_graph_level=0 --xla_dump_hlo_pass_re='a --xla_b' --xla_gpu_bogus=\"c d\" "
    "--xla_gpu_old='e f' --xla_backend_optimization_level=1 --xla_gpu_enable_async_collectives"
)


def test_flags_that_would_abort_are_named_and_taken_out(environment, caplog):
    def start():
        code = "from jaxlib import xla_client as x; x.CompileOptions()"
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True
        ).returncode

    environment["XLA_FLAGS"] = FLAGS
    assert start() != 0  # what this is about
    set_environment()
    assert environment["XLA_FLAGS"].split() == [
        "--xla_dump_hlo_pass_re='a",
        "--xla_b'",
        "--xla_backend_optimization_level=1",
    ]
    assert start() == 0
    assert [message.split("; ")[0] for message in caplog.messages] == [
        f"XLA_FLAGS: {JAXLIB} has no --{name}=..."
        for name in (
            "xla_gpu_graph_level",
            "xla_gpu_bogus",
            "xla_gpu_old",
            "xla_gpu_enable_async_collectives",
        )
    ]


def test_flags_that_are_known_or_in_a_file_stay_as_they_are(environment, caplog):
    for flags in ("--xla_gpu_autotune_level=2  --xla_dump_hlo_pass_re=.*", "", "/flags.txt"):
        environment["XLA_FLAGS"] = flags
        set_environment()
        assert environment["XLA_FLAGS"] == flags and not caplog.messages


def test_a_flags_value_that_xla_cannot_read_is_a_mistake(environment):
    environment["XLA_FLAGS"] = "--xla_gpu_enable_triton_gemm=perhaps"
    with pytest.raises(
        ValueError, match="XLA_FLAGS: 'perhaps' is not a value of --xla_gpu_enable_triton_gemm"
    ):
        set_environment()


CGROUPS = {
    "0::/user/run\n": ["user/run/memory.max", "user/memory.max", "memory.max"],
    "5:cpu,memory:/job\n4:cpu:/job\n": [
        "memory/job/memory.limit_in_bytes",
        "memory/memory.limit_in_bytes",
    ],
    "": [],
}


@pytest.mark.parametrize("text", CGROUPS)
def test_the_limits_of_a_cgroup_and_of_those_above_are_looked_up(tmp_path, text):
    (tmp_path / "cgroup").write_text(text)
    found = [str(path) for path in xla_environment._cgroup_limits(tmp_path / "cgroup")]
    assert found == [f"/sys/fs/cgroup/{name}" for name in CGROUPS[text]]


def test_the_memory_of_the_host_is_the_least_of_the_limits(tmp_path, monkeypatch):
    files = [tmp_path / name for name in ("above", "none", "missing")]
    files[0].write_text(f"{2**30}\n")
    files[1].write_text("max\n")
    monkeypatch.setattr(xla_environment, "_cgroup_limits", lambda: iter(files))
    assert xla_environment.host_memory_gib() == 1.0
    files[0].write_text(f"{2**62}\n")
    assert 1.0 < xla_environment.host_memory_gib() < 2**20
