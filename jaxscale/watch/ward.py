"""The process beside which a watchdog stands, seen from outside."""

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

# Has Python print the stacks of all its threads, whatever they do: `faulthandler` answers it in C,
# without the lock of the interpreter.
STACKS = signal.SIGRTMIN + 8
STACKS_SECONDS = 2.0
# The letters of /proc/PID/stat that are worth a word.
STATES = {
    "D": "inside the kernel, such as for a disk or a network folder",
    "Z": "ended",
}


class Ward:
    """pid: of the process. stacks: of the file into which it writes its stacks."""

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

    def stacks(self) -> str:
        """Python's stacks of all its threads, the main one last; "" where it does not answer.

        A process that is stopped goes on for it.
        """
        before = os.fstat(self._stacks).st_size
        with contextlib.suppress(OSError):
            os.kill(self.pid, STACKS)
            if self.state() == "T":
                os.kill(self.pid, signal.SIGCONT)
        deadline, size = time.monotonic() + STACKS_SECONDS, before
        while time.monotonic() < deadline:
            time.sleep(0.05)
            grown = os.fstat(self._stacks).st_size
            if grown == size > before:
                break  # nothing came since the last look: it is whole
            size = grown
        return os.pread(self._stacks, size - before, before).decode(errors="replace")

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)


def main_stack(stacks: str) -> str:
    """Of what `Ward.stacks` gave: the frames of the main thread, the innermost first."""
    frames = stacks.rpartition("(most recent call first):\n")[2]
    return "\n".join(line.strip() for line in frames.splitlines() if line.startswith("  "))


def place(stack: str) -> str:
    """`loader.py:120 in read`: the innermost frame of a main stack, "" of none."""
    found = re.match(r'File "(?:.*/)?([^/"]+)", line (\d+) in (\S+)', stack)
    return f"{found[1]}:{found[2]} in {found[3]}" if found else ""


def say(text: str) -> None:
    """On the stderr that this process shares with the one that it watches."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{text}\n".encode(errors="replace"))
