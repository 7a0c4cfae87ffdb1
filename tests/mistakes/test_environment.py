"""Variables of the environment, and the scripts that start processes."""

import os
import subprocess
import sys

import pytest

from tests.forks import ROOT
from tests.mistakes.said import assert_mistake, content

HERE, OURS = "localhost:61999", ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID")


def ours(*values, **more):
    """JAXSCALE_COORDINATOR, JAXSCALE_NUM_PROCESSES, JAXSCALE_PROCESS_ID; None: not set."""
    named = zip(OURS, values, strict=True)
    return {f"JAXSCALE_{name}": value for name, value in named if value is not None} | more


def slurm(**changes):
    step = {"JOB_ID": "4242", "STEP_ID": "0", "STEP_NUM_TASKS": "2", "STEP_NODELIST": "localhost"}
    step |= {"PROCID": "1", "LOCALID": "1", "NODEID": "0"}
    return {f"SLURM_{name}": value for name, value in (step | changes).items()}


def mpi(**changes):
    process = {"SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"} | changes
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in process.items()}


HOST_PORT, COUNT = "write host:port", "must be a whole number, 0 or more"
SET = ("is not set", "on every process")
FROM_0 = ("they count from 0",)
ENVIRONMENTS = {
    "a coordinator alone": (ours(HERE, None, None), ("JAXSCALE_NUM_PROCESSES", *SET)),
    "a number alone": (ours(None, "2", None), ("JAXSCALE_PROCESS_ID", *SET)),
    "a process alone": (ours(None, None, "0"), ("JAXSCALE_NUM_PROCESSES", *SET)),
    "no process": (ours(HERE, "2", None), ("JAXSCALE_PROCESS_ID", *SET)),
    "no coordinator": (ours(None, "2", "0"), ("JAXSCALE_COORDINATOR", *SET)),
    "no port": (ours("localhost", "2", "1"), ("JAXSCALE_COORDINATOR='localhost'", HOST_PORT)),
    "port 0": (ours("localhost:0", "2", "1"), ("'localhost:0'", HOST_PORT)),
    "port 99999": (ours("localhost:99999", "2", "1"), ("'localhost:99999'", HOST_PORT)),
    "a port in words": (ours("localhost:http", "2", "1"), ("'localhost:http'", HOST_PORT)),
    "no host": (ours(":9999", "2", "1"), ("':9999'", HOST_PORT)),
    "an address of the web": (ours("http://x:1", "2", "1"), ("is not known here", "name the host")),
    "an unknown host": (ours("x.invalid:1", "2", "1"), ("'x.invalid' is not known here", "name")),
    "a number in words": (ours(HERE, "two", "1"), ("JAXSCALE_NUM_PROCESSES='two'", COUNT)),
    "no processes": (ours(HERE, "0", "0"), ("JAXSCALE_NUM_PROCESSES=0", "1 or more")),
    "fewer than none": (ours(HERE, "-1", "0"), ("JAXSCALE_NUM_PROCESSES='-1'", COUNT)),
    "one too many": (ours(HERE, "2", "2"), ("JAXSCALE_PROCESS_ID=2 must be below", *FROM_0)),
    "a negative process": (ours(HERE, "2", "-1"), ("JAXSCALE_PROCESS_ID='-1'", COUNT)),
    "patience in words": (
        ours(HERE, "2", "1", JAXSCALE_JOIN_SECONDS="long"),
        ("JAXSCALE_JOIN_SECONDS='long'", COUNT),
    ),
    "no patience": (
        ours(HERE, "2", "1", JAXSCALE_JOIN_SECONDS="0"),
        ("JAXSCALE_JOIN_SECONDS=0", "1 or more"),
    ),
    "a heartbeat in words": (
        ours(HERE, "2", "1", JAXSCALE_HEARTBEAT_SECONDS="x"),
        ("JAXSCALE_HEARTBEAT_SECONDS='x'", COUNT),
    ),
    "JAX's own, alone": ({"JAX_COORDINATOR_ADDRESS": HERE}, ("JAX_NUM_PROCESSES", *SET)),
    "JAX's own, too high": (
        {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "1"},
        ("JAX_PROCESS_ID=1 must be below JAX_NUM_PROCESSES=1", *FROM_0),
    ),
    "SLURM without a task": (slurm(PROCID=""), ("SLURM_PROCID=''", COUNT)),
    "SLURM with a task too many": (slurm(PROCID="2"), (*FROM_0, "as SLURM has it")),
    "SLURM with a job in words": (slurm(JOB_ID="a"), ("SLURM_JOB_ID='a'", COUNT)),
    "SLURM with a step in words": (slurm(STEP_ID="a"), ("SLURM_STEP_ID='a'", COUNT)),
    "SLURM with restarts in words": (slurm(RESTART_COUNT="a"), ("SLURM_RESTART_COUNT='a'", COUNT)),
    "SLURM with tasks in words": (slurm(STEP_NUM_TASKS="a"), ("SLURM_STEP_NUM_TASKS='a'", COUNT)),
    "SLURM without nodes": (slurm(STEP_NODELIST=""), ("JAXSCALE_COORDINATOR", *SET)),
    "SLURM on an unknown node": (
        slurm(STEP_NODELIST="x.invalid"),
        ("'x.invalid'", "name the host"),
    ),
    "SLURM, and a port in words": (
        slurm() | {"JAXSCALE_COORDINATOR_PORT": "http"},
        ("JAXSCALE_COORDINATOR_PORT='http'", COUNT),
    ),
    "SLURM, and a port too high": (
        slurm() | {"JAXSCALE_COORDINATOR_PORT": "99999"},
        ("JAXSCALE_COORDINATOR_PORT=99999", "write a port from 1 to 65535"),
    ),
    "mpirun with a size in words": (mpi(SIZE="a"), ("OMPI_COMM_WORLD_SIZE='a'", COUNT)),
    "mpirun without a rank": (mpi(RANK=""), ("OMPI_COMM_WORLD_RANK=''", COUNT)),
    "mpirun with a rank too high": (mpi(RANK="5"), (*FROM_0, "as Open MPI has it")),
    "mpirun on several hosts": (mpi(LOCAL_SIZE="1"), ("JAXSCALE_COORDINATOR", *SET)),
    "a pod with an index in words": (
        {"JOB_COMPLETION_INDEX": "a", "JAXSCALE_NUM_PROCESSES": "2"},
        ("JOB_COMPLETION_INDEX='a'", COUNT),
    ),
    "a pod without a coordinator": (
        {"JOB_COMPLETION_INDEX": "1", "JAXSCALE_NUM_PROCESSES": "2"},
        ("JAXSCALE_COORDINATOR", *SET),
    ),
    "XLA's flag in words": (
        {"XLA_FLAGS": "--xla_backend_optimization_level=high"},
        ("XLA_FLAGS: 'high' is not a value of --xla_backend_optimization_level", "correct it"),
    ),
    "XLA's flag that is maybe": (
        {"XLA_FLAGS": "--xla_cpu_enable_fast_math=maybe"},
        ("XLA_FLAGS: 'maybe' is not a value", "correct it"),
    ),
    "XLA's flag without dashes": (
        {"XLA_FLAGS": "xla_cpu_max_isa=AVX"},
        ("XLA_FLAGS='xla_cpu_max_isa=AVX'", "write --name=value"),
    ),
    "XLA's flag with one dash": (
        {"XLA_FLAGS": "-xla_cpu_max_isa=AVX"},
        ("XLA_FLAGS='-xla_cpu_max_isa=AVX'", "write --name=value"),
    ),
    "XLA's second flag with one dash": (
        {"XLA_FLAGS": "--xla_cpu_max_isa=AVX -xla_a=1"},
        ("XLA_FLAGS: '-xla_a=1' begins with one dash", "write two"),
    ),
    "no file of XLA's flags": ({"XLA_FLAGS": "flags.txt"}, ("'flags.txt'", "name of a file")),
}
# What the environment of an allocation adds, and words -> what scripts/train.slurm says.
ALLOCATION = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_SUBMIT_DIR": str(ROOT)}
JOBS = {
    "no sbatch": ({"SLURM_JOB_ID": ""}, "configs/tiny.py", "start it with sbatch"),
    "no config": ({}, "", "name a config: sbatch scripts/train.slurm configs/"),
    "another folder": (
        {"SLURM_SUBMIT_DIR": "/tmp"},
        "configs/tiny.py",
        "call sbatch in the folder",
    ),
    "a folder of another node": ({"SLURM_SUBMIT_DIR": "/no"}, "configs/tiny.py", "/no is not on"),
    "processes in words": (
        {"JAXSCALE_PROCESSES": "all"},
        "WORKDIR",
        "JAXSCALE_PROCESSES=all: write",
    ),
    "no processes": (
        {"JAXSCALE_PROCESSES": "0"},
        "WORKDIR",
        "JAXSCALE_PROCESSES=0: write gpu, host",
    ),
    "few cores": ({"JAXSCALE_PROCESSES": "4"}, "WORKDIR", "4 processes on 1 cores of a node: ask"),
    "failures in words": (
        {"JAXSCALE_MAX_FAILURES": "many"},
        "WORKDIR",
        "JAXSCALE_MAX_FAILURES=many: write a whole number",
    ),
    "no such python": ({"JAXSCALE_PYTHON": "/no"}, "WORKDIR", "there is no /no: make it with"),
    "no workdir": ({}, "configs/tiny.py --workdir=/dev/null/x", "/dev/null/x cannot be written"),
}
# Words -> what scripts/launch_local.py says.
LAUNCHES = {
    "": "the following arguments are required: -n, command",
    "-n two -- x": "argument -n: invalid int value: 'two'",
    "-n 2": "the following arguments are required: command",
    "-n 2 --cpu-devices=0 -- x": "-n and --cpu-devices are 1 or more",
    "-n 2 scripts/train.py --config=x": "--config=x: write -- in front of the command",
    "-n 2 -- nowhere.py": "nowhere.py: no such file; name a script",
    "-n 2 -- nowhere": "nowhere cannot be started: No such file",
}
# Scripts that JAX_PLATFORMS=abc is told by.
PLATFORMS = {
    "generate --workdir=run --prompt=x": (),
    "doctor --quick": (),
}
TABLES = (ENVIRONMENTS, JOBS, LAUNCHES, PLATFORMS)


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_an_environment_that_cannot_be_is_told_before_devices_are_touched(asked, folder, case):
    environment, fragments = ENVIRONMENTS[case]
    answer = asked("train --config=config.py --workdir=unwritten", **environment)
    assert_mistake(answer, *fragments)
    assert content(folder / "unwritten") == {}


def run(*words, folder, **environment):
    """Exit code, and what the process says."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("case", JOBS)
def test_a_job_that_cannot_be_is_told_by_its_script(tmp_path, case):
    environment, words, told = JOBS[case]
    words = words.replace("WORKDIR", f"configs/tiny.py --workdir={tmp_path / 'run'}")
    command = ("bash", str(ROOT / "scripts" / "train.slurm"), *words.split())
    code, said = run(*command, folder=tmp_path, **(ALLOCATION | environment))
    assert code == 2 and f"error: {told}" in said.replace("error: the workdir ", "error: "), said


@pytest.mark.parametrize("words", LAUNCHES)
def test_a_launch_that_cannot_be_is_told(tmp_path, words):
    command = (sys.executable, str(ROOT / "scripts" / "launch_local.py"), *words.split())
    code, said = run(*command, folder=tmp_path)
    assert code == 2 and f"error: {LAUNCHES[words]}" in said and "Traceback" not in said, said


@pytest.mark.parametrize("line", PLATFORMS)
def test_a_platform_that_is_not_here_is_told_by_every_script(folder, line):
    script, *words = line.split()
    command = (sys.executable, str(ROOT / "scripts" / f"{script}.py"), *words)
    code, said = run(*command, folder=folder, JAX_PLATFORMS="abc")
    assert code == 2 and "error: JAX_PLATFORMS='abc' finds no device" in said, said
    assert "Unset it" in said and "Traceback" not in said, said
