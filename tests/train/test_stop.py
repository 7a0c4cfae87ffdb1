"""A signal ends a run at any moment: before it trains at once, without a traceback."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxscale.launch import EXIT_AGAIN
from jaxscale.train import stop

ROOT = Path(__file__).parents[2]
PATIENCE = 600


def wait_until_caught(process, signum):
    """Until the process has a handler of its own for it."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        status = Path(f"/proc/{process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("SigCgt:"))
        if int(line.split()[1], 16) >> (signum - 1) & 1:
            return
        time.sleep(0.002)


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.4, 0.8, 1.2, 2.0, 3.0])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_first_seconds_ends_the_run_without_a_traceback(
    spawn, sigint_by_default, write_small_config, tmp_path, seconds, signum
):
    config = write_small_config(tmp_path, batch_size=8)
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), f"--config={config}"]
    process = spawn(
        [*command, f"--workdir={tmp_path / 'run'}", "--config.checkpoint.every=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_until_caught(process, signal.SIGTERM)
    time.sleep(seconds)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == (130 if signum == signal.SIGINT else EXIT_AGAIN), output
    assert "Traceback" not in output and "KeyboardInterrupt" not in output, output


def ended(spawn, code, *, signum) -> tuple[int, str]:
    """(exit code, what it printed) of code that gets a signal once it has said that it is ready."""
    process = spawn([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    return process.wait(PATIENCE), process.stdout.read()


# What holds the main thread in C, or swallows what a handler raises.
HOLDS = {
    "in C": """
mutex = ctypes.create_string_buffer(64)  # locked twice, it waits for itself
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
""",
    "that swallows": """
while True:
    try:
        time.sleep(1)
    except BaseException:
        pass
""",
}
HELD = """
import ctypes, time
from jaxscale.train import stop
stop.end_at_once()
{phase}
print("ready", flush=True)
{hold}
"""


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("phase", ["", "stop.end_in_order()"])
def test_no_code_holds_the_end_up(spawn, sigint_by_default, hold, phase):
    code = HELD.format(hold=HOLDS[hold], phase=phase)
    exit_code, _ = ended(spawn, code, signum=signal.SIGTERM)
    assert exit_code == EXIT_AGAIN


SWALLOWED = """
import time
from jaxscale.train import stop
stop.end_at_once()
stop.end_in_order()
try:
    print("ready", flush=True)
    time.sleep(600)
except BaseException:
    pass
with stop.interrupts() as noted:
    time.sleep(stop.ORDERLY_SECONDS + 1)  # its thread has seen that the process trains
    raise SystemExit(noted.code)
"""


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, EXIT_AGAIN)])
def test_a_signal_swallowed_before_training_is_noted_by_training(
    spawn, sigint_by_default, signum, code
):
    exit_code, _ = ended(spawn, SWALLOWED, signum=signum)
    assert exit_code == code


COLLECTED = """
import gc, sys, time
from jax._src import lib
from jaxscale.train import stop
sys.stderr = sys.stdout
stop.end_at_once()
stop.end_in_order()
def _xla_gc_callback(phase, info):
    if phase == "start":
        print("ready", flush=True)
        time.sleep(1)
assert lib._xla_gc_callback.__name__ == _xla_gc_callback.__name__
gc.callbacks.append(_xla_gc_callback)
gc.collect()
gc.callbacks.remove(_xla_gc_callback)
with stop.interrupts() as noted:
    raise SystemExit(noted.code)
"""


def test_a_signal_while_jax_collects_garbage_is_noted_without_a_traceback(spawn, sigint_by_default):
    code, output = ended(spawn, COLLECTED, signum=signal.SIGINT)
    assert code == 130 and "Traceback" not in output, output


RAISED_LATER = """
import time
from jaxscale.train import stop
stop.end_at_once()
stop.end_in_order()
with stop.raising_later():
    try:
        print("ready", flush=True)
        time.sleep(1)
        print("undisturbed", flush=True)
    except BaseException:
        print("swallowed", flush=True)
print("not stopped", flush=True)
"""


# The first by Python, which nobody has told of the code of a user who stops.
@pytest.mark.parametrize(
    "signum, code", [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, EXIT_AGAIN)]
)
def test_code_that_swallows_is_left_undisturbed_and_stopped_behind(
    spawn, sigint_by_default, signum, code
):
    assert ended(spawn, RAISED_LATER, signum=signum) == (code, "undisturbed\n")


ORDERLY = """
import atexit, sys, threading, time
from jaxscale.train import stop
stop.end_at_once()
stop.end_in_order()
try:
    print("ready", flush=True)
    time.sleep(600)
finally:
    print("tidied up", flush=True)
"""


def test_before_training_temporary_files_can_be_removed(spawn):
    assert ended(spawn, ORDERLY, signum=signal.SIGUSR1) == (EXIT_AGAIN, "tidied up\n")


FORKING = """
import os, signal, time
from jaxscale.train import stop
stop.end_at_once()
child = os.fork()
if child == 0:
    time.sleep(600)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
time.sleep(0.5)
"""


def test_a_forked_child_that_is_ended_does_not_end_its_parent():
    done = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (0, f"{-signal.SIGTERM}\n"), done.stderr


def test_a_user_who_stops_a_run_wins_over_a_scheduler_that_does(sigint_by_default):
    with stop.interrupts() as noted:
        assert not noted() and noted.code == 0
        for signum, code in ((signal.SIGTERM, EXIT_AGAIN), (signal.SIGINT, 130)):
            signal.signal(signal.SIGINT, noted.note)  # after the first it would end this process
            threading.Thread(target=os.kill, args=(os.getpid(), signum)).start()
            deadline = time.monotonic() + PATIENCE
            while noted.code != code and time.monotonic() < deadline:
                time.sleep(0.01)
            assert noted() and noted.code == code
