"""What must precede the start is set, and no flag of a user's aborts it."""

import subprocess
import sys
from importlib import metadata

import pytest

from jaxscale.xla import environment as xla_environment
from jaxscale.xla.environment import (
    MEMORY_FRACTION,
    NEVER,
    VARIABLES,
    leave_ends_to_the_watchdog,
    set_environment,
)

JAXLIB = f"jaxlib {metadata.version('jaxlib')}"


def test_what_must_precede_the_start_is_set_and_the_user_wins(environment):
    for variable in VARIABLES:
        environment.pop(variable.name, None)
    set_environment()
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == MEMORY_FRACTION
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert environment["NCCL_NVLS_ENABLE"] == "0" and "XLA_FLAGS" not in environment
    assert int(environment["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"]) >= 64
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


def test_flags_that_are_known_or_in_a_file_stay_as_they_are(environment, caplog, tmp_path):
    file = tmp_path / "flags.txt"
    file.write_text("--xla_gpu_autotune_level=2")
    for flags in ("--xla_gpu_autotune_level=2  --xla_dump_hlo_pass_re=.*", "", str(file)):
        environment["XLA_FLAGS"] = flags
        set_environment()
        assert environment["XLA_FLAGS"] == flags and not caplog.messages


def test_a_flags_value_that_xla_cannot_read_is_a_mistake(environment):
    environment["XLA_FLAGS"] = "--xla_gpu_enable_triton_gemm=perhaps"
    with pytest.raises(
        ValueError, match="XLA_FLAGS: 'perhaps' is not a value of --xla_gpu_enable_triton_gemm"
    ):
        set_environment()


# What jaxlib makes of XLA_FLAGS: the fields of its DebugOptions that have these numbers.
LIMITS = """
from jaxlib import xla_client
from jaxscale.perf import protobuf
options = xla_client.CompileOptions()
options.executable_build_options.debug_options
message = options.SerializeAsString()
print(*(list(protobuf.fields(message, 3, 3, number))[-1] for number in (417, 328, 392)))
"""


def limits(environment):
    answer = subprocess.run(
        [sys.executable, "-c", LIMITS], env=environment, capture_output=True, text=True, check=True
    )
    return answer.stdout.split()


def test_xla_ends_nothing_before_the_watchdog_and_the_user_wins(environment):
    environment["XLA_FLAGS"] = ""
    assert limits(environment) == ["40", "30", "40"]  # what this is about
    leave_ends_to_the_watchdog()
    leave_ends_to_the_watchdog()  # once is enough
    assert limits(environment) == [NEVER] * 3
    assert environment["XLA_FLAGS"].count("--") == 3
    told = [list(xla_environment.lines(platform)) for platform in ("cpu", "gpu")]
    assert [sum("XLA_FLAGS --xla_" in line for line in lines) for lines in told] == [1, 2]
    assert not any("set by the user" in line for line in told[0])
    users = "--xla_gpu_executable_terminate_timeout=50"
    environment["XLA_FLAGS"] = users
    leave_ends_to_the_watchdog()
    assert limits(environment) == [NEVER, "50", NEVER]
    assert f"environment: XLA_FLAGS={users}, set by the user" in xla_environment.lines("cpu")


def test_a_limit_that_jaxlib_has_not_or_flags_in_a_file_are_left_alone(environment, monkeypatch):
    environment["XLA_FLAGS"] = "/flags.txt"
    leave_ends_to_the_watchdog()
    assert environment["XLA_FLAGS"] == "/flags.txt"
    environment["XLA_FLAGS"] = ""
    monkeypatch.setattr(xla_environment.jaxlib, "known_names", frozenset)
    leave_ends_to_the_watchdog()
    assert environment["XLA_FLAGS"] == ""


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
