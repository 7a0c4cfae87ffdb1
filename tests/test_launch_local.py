"""scripts/launch_local.py: several processes as one, with one exit code."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "launch_local.py"
PATIENCE = 300
ME = "import os, signal, sys, time; me = int(os.environ['JAXSCALE_PROCESS_ID'])\n"


@pytest.fixture
def start(spawn, sigint_by_default, tmp_path):
    """`start("print(me)", "-n", 2)`: processes of that code; what they print is in order."""

    def start(code, *options):
        (tmp_path / "code.py").write_text(ME + code)
        command = [sys.executable, SCRIPT, *map(str, options), "--", tmp_path / "code.py", "word"]
        return spawn(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    return start


def wait_for_lines(process, num):
    return [process.stdout.readline() for _ in range(num)]


def test_each_process_knows_its_number_and_its_lines_bear_it(start):
    names = "JAXSCALE_COORDINATOR", "JAXSCALE_NUM_PROCESSES", "JAX_PLATFORMS", "JAXSCALE_COMMAND"
    process = start(f"print(sys.argv[1], *(os.environ[name] for name in {names}))", "-n", 3)
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, "")
    lines = sorted(output.splitlines())
    assert [line.split()[:2] for line in lines] == [[f"[{n}]", "word"] for n in range(3)]
    (rest,) = {line.split("word ")[1] for line in lines}
    address, num, platform, *command = rest.split(" ")
    assert address.startswith("127.0.0.1:") and (num, platform) == ("3", "cpu")
    assert " ".join(command).startswith(f"cd {os.getcwd()} && python")
    assert str(SCRIPT) in command


def test_the_first_to_fail_is_named_with_its_code_and_last_lines_and_ends_the_others(start):
    # The others go on for ever, and one does not listen.
    code = """
print("begun", flush=True)
if me == 1:
    time.sleep(0.5)
    print("no more tea", file=sys.stderr)
    sys.exit(7)
if me == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""
    began = time.monotonic()
    process = start(code, "-n", 3)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 7
    told = output[output.index("launch_local: process 1 ended with exit code 7, the first") :]
    assert told.splitlines()[1:] == ["launch_local: [1] begun", "launch_local: [1] no more tea"]
    assert time.monotonic() - began < 60


def test_a_process_that_is_killed_is_named_by_its_signal(start):
    process = start("if me: os.kill(os.getpid(), signal.SIGKILL)", "-n", 2)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 137
    assert "launch_local: process 1 was killed by SIGKILL, the first to fail" in output


def test_one_that_leaves_because_another_vanished_is_not_the_first_to_fail(start):
    # As the kernel may have it: what was killed is gone a little later than who noticed.
    code = """
if me == 0:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(75)
"""
    process = start(code, "-n", 3)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 137
    assert "launch_local: process 0 was killed by SIGKILL, the first to fail" in output


def test_a_process_that_is_stopped_is_named_as_such(start):
    code = "if me == 0: os.kill(os.getpid(), signal.SIGSTOP)\nsys.exit(me)"
    process = start(code, "-n", 2)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "launch_local: ending process 0: it is stopped" in output


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_every_process_once(start, signum):
    code = """
def end(number, frame):
    print("got", number, flush=True)
    time.sleep(0.5)  # another would be heard
    os._exit(75)

signal.signal(int(%d), end)
print("ready", flush=True)
while True:
    time.sleep(1)
"""
    process = start(code % signum, "-n", 2)
    assert sorted(wait_for_lines(process, 2)) == ["[0] ready\n", "[1] ready\n"]
    process.send_signal(signum)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75
    assert sorted(output.splitlines()) == [f"[0] got {signum:d}", f"[1] got {signum:d}"]


def test_the_processes_end_with_a_launcher_that_is_killed(start):
    process = start("print(os.getpid(), flush=True)\ntime.sleep(600)", "-n", 2)
    pids = [int(line.split()[1]) for line in wait_for_lines(process, 2)]
    process.kill()
    deadline = time.monotonic() + PATIENCE
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("launch_local", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_process_has_its_share_of_the_gpus(script, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6,7")
    shares = [environment["CUDA_VISIBLE_DEVICES"] for environment in script.environments_of(2, 1)]
    assert shares == ["2,3", "6,7"]
    with pytest.raises(ValueError, match="-n 3: the 4 GPUs here cannot be divided alike"):
        script.environments_of(3, 1)


def test_a_launcher_around_does_not_count(script, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "elsewhere:1")
    from jaxscale.launch import detect

    for number, environment in enumerate(script.environments_of(4, 1)):
        found = detect(environment)
        assert found is not None
        assert (found.host, found.num_processes, found.process) == ("127.0.0.1", 4, number)


def test_a_mistake_is_told(spawn):
    process = spawn([sys.executable, SCRIPT, "-n", "0", "--", "x"], stderr=subprocess.PIPE)
    assert "-n and --cpu-devices are 1 or more" in process.communicate(timeout=PATIENCE)[1]
    process = spawn([sys.executable, SCRIPT, "-n", "1", "--", "/no"], stderr=subprocess.PIPE)
    assert "error: /no cannot be started: No such file" in process.communicate(timeout=PATIENCE)[1]
