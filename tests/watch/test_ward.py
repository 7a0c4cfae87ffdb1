"""What a watchdog sees of a real process, which stays as it was."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxscale.watch.ward import Ward

# Its threads make and free frames without end, but for those of C, of which XLA has many.
BUSY = """
import ctypes, threading
from jaxscale.watch.watched import Watched

watched = Watched(0)
libc = ctypes.CDLL(None)
for _ in range(16):
    libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.pause, None)

def deep(depth):
    return depth and deep(depth - 1) + 1

def work(*depths):
    while True:
        for depth in depths:
            eval("(lambda depth: deep(depth))(depth)", globals(), dict(depth=depth))

for _ in range(6):
    threading.Thread(target=work, args=(3, 40, 400, 7), daemon=True).start()
print(watched._stacks, flush=True)
work(3, 40)
"""


QUIET = """
import threading
from jaxscale.watch.watched import Watched

watched = Watched(0)
print(watched._stacks, flush=True)

def wait():
    threading.Event().wait()

wait()
"""


@pytest.fixture
def busy():
    with started(BUSY) as of_it:
        yield of_it


@contextlib.contextmanager
def started(script):
    """A process that runs it, and its ward."""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        number = process.stdout.readline().strip()
        with open(f"/proc/{process.pid}/fd/{number}", "rb") as stacks:
            yield process, Ward(process.pid, stacks=stacks.fileno())
        process.kill()


def test_a_process_that_is_looked_at_goes_on_also_if_it_was_stopped(busy):
    process, ward = busy
    outermost = set()
    for _ in range(25):
        os.kill(process.pid, signal.SIGSTOP)
        while ward.state() != "T":
            time.sleep(0.001)
        stack = ward.stack().splitlines()
        assert stack and all(frame.startswith("File ") for frame in stack)
        outermost.add(stack[-1].split()[-1])
        assert process.poll() is None
    assert "<module>" in outermost


def test_of_a_process_that_has_ended_nothing_comes(busy):
    process, ward = busy
    process.kill()
    process.wait()
    assert ward.stack() == "" and ward.state() == ""


@pytest.mark.parametrize("signum", [signal.SIGABRT, signal.SIGSEGV])
def test_what_a_process_says_where_it_crashes_is_seen_once_it_has(signum):
    with started(QUIET) as (process, ward):
        assert ward.stack() and ward.crash() == ""
        os.kill(process.pid, signum)
        assert process.wait(60) == -signum
        words, *stacks = ward.crash().splitlines()
    assert words in ("Fatal Python error: Aborted", "Fatal Python error: Segmentation fault")
    assert any(line.endswith(" in wait") for line in stacks)
