"""The process beside which a watchdog stands, seen from outside."""

import contextlib
import ctypes
import os
import platform
import re
import signal
import sys
import time
from pathlib import Path

# Has Python print the stack of its main thread, whatever that does: `faulthandler` answers in C,
# without the lock of the interpreter. Of that thread alone, and it is sent to that thread: the
# frames of one that runs are freed while another reads them, which ends the process (SIGSEGV).
STACK = signal.SIGRTMIN + 8
STACK_SECONDS = 2.0
# What `faulthandler` begins with where SIGSEGV, SIGABRT and the like end the process.
CRASH = "Fatal Python error: "
# The number of the system call that signals one thread: glibc has no function for it before 2.30,
# so none on RHEL 8. Machines for which JAX has GPUs.
TGKILL = {"x86_64": 234, "aarch64": 131}
# The letters of /proc/PID/stat that are worth a word.
STATES = {
    "D": "inside the kernel, such as for a disk or a network folder",
    "Z": "ended",
}


class Ward:
    """pid: of the process. stacks: of the file into which it writes its stack, again and again.

    And all of them where it crashes.
    """

    def __init__(self, pid: int, *, stacks: int):
        self.pid, self._stacks = pid, stacks

    def state(self) -> str:
        """The letter of /proc/PID/stat: R, S, D, T, t of a debugger, Z; "" where there is none."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return ""
        # The name before it may hold anything, brackets too.
        return text.rpartition(")")[2].split()[0]

    def stack(self) -> str:
        """The frames of its main thread in Python, the innermost first; "" where none come.

        A process that is stopped goes on for it.
        """
        before = os.fstat(self._stacks).st_size
        self._ask_main_thread()
        if self.state() == "T":
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGCONT)
        deadline, size = time.monotonic() + STACK_SECONDS, before
        while time.monotonic() < deadline:
            time.sleep(0.05)
            grown = os.fstat(self._stacks).st_size
            if grown == size > before:
                break  # nothing came since the last look: it is whole
            size = grown
        lines = os.pread(self._stacks, size - before, before).decode(errors="replace").splitlines()
        return "\n".join(line.strip() for line in lines if line.startswith("  "))

    def crash(self) -> str:
        """`Fatal Python error: Aborted`, and the stacks; "" of one that did not crash."""
        text = os.pread(self._stacks, os.fstat(self._stacks).st_size, 0).decode(errors="replace")
        _, begin, rest = text.partition(CRASH)
        return begin + rest

    def _ask_main_thread(self) -> None:
        if number := TGKILL.get(platform.machine()):
            ctypes.CDLL(None).syscall(number, self.pid, self.pid, STACK)
        else:  # whichever thread takes it; there is a stack if that is one of Python's
            with contextlib.suppress(OSError):
                os.kill(self.pid, STACK)

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)


def place(stack: str) -> str:
    """`loader.py:120 in read`: the innermost frame of a stack, "" of none."""
    found = re.match(r'File "(?:.*/)?([^/"]+)", line (\d+) in (\S+)', stack)
    return f"{found[1]}:{found[2]} in {found[3]}" if found else ""


def say(text: str) -> None:
    """On the stderr that this process shares with the one that it watches."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{text}\n".encode(errors="replace"))
