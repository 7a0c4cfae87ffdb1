"""The process's own side of its watchdog."""

import contextlib
import faulthandler
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from jaxscale.launch import EXIT_AGAIN
from jaxscale.watch.lines import Line
from jaxscale.watch.ward import STACK
from jaxscale.watch.watchdog import OWN_WORDS_SECONDS

START_SECONDS, CLOSE_SECONDS = 60.0, 2.0
# What process 0 stays for, once it has said why it ends: until the others have left.
LEAD_STAYS_SECONDS = OWN_WORDS_SECONDS + 1.0
# The watchdog ends with its process, and not by what a terminal or a scheduler sends to both.
NOT_FOR_IT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

log = logging.getLogger(__name__)


class Watched:
    """This process, with a watchdog of its own from here on. `close` it before a normal end.

    process: its number. advice: what the user is to do when it has to end.
    """

    def __init__(self, process: int, *, advice: str = ""):
        self._process = process
        self._is_closed = threading.Event()
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        mine, its = socket.socketpair()
        self._line = Line(mine)
        self._stacks = os.memfd_create("stacks")
        faulthandler.register(STACK, file=self._stacks, all_threads=False)
        # The watchdog shows it, and tells the others.
        faulthandler.enable(file=self._stacks, all_threads=True)
        os.register_at_fork(after_in_child=_crash_on_stderr)
        with its:
            self._dog = _start(process, advice, fds=(its.fileno(), self._stacks))
        threading.Thread(target=self._listen, name="watched", daemon=True).start()

    def lead(self, host: str, *, num_processes: int) -> str:
        """For process 0: listens, on that address ("": all), and returns what the others need."""
        self._line.send(["lead", host, num_processes])
        return self._answers.get(timeout=START_SECONDS)

    def follow(self, host: str, invitation: str, *, num_processes: int) -> None:
        """For the others: connects to process 0, with what it returned. Raises OSError."""
        self._line.send(["follow", host, invitation, num_processes])
        if error := self._answers.get(timeout=START_SECONDS):
            raise OSError(error)

    def at(self, step: int | None, phase: str, *, allowed: float, batch: int = 0) -> None:
        """Where it is: updates done, and what it does now; 15 us.

        allowed: seconds until the next call, after which it is stuck; 0: any number. batch: of a
        phase that has several, counted from 1.
        """
        if not self._is_closed.is_set():
            with contextlib.suppress(OSError):
                self._line.send(["at", step, phase, allowed, batch])

    def report(self, said: str) -> None:
        """Tells the others why this process ends now; that of process 0 takes 3 s."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._line.send(["failed", said])
        if self._process == 0:
            time.sleep(LEAD_STAYS_SECONDS)

    def close(self) -> None:
        """Before a normal end: the others need not worry."""
        self._is_closed.set()
        _crash_on_stderr()
        with contextlib.suppress(OSError):
            self._line.send(["bye"])
        try:
            self._dog.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._dog.kill()
            self._dog.wait()

    def _listen(self) -> None:
        while True:
            messages = self._line.receive()
            for kind, text in messages or ():
                if kind in ("invitation", "following"):
                    self._answers.put(text)
                elif kind == "warn":
                    log.warning(text)
                elif kind == "stacks":
                    # No thread goes on meanwhile, as the interpreter's lock is held here.
                    faulthandler.dump_traceback(file=2, all_threads=True)
                elif kind == "end" and not self._is_closed.is_set():
                    end_with(text)
            if messages is None:
                _crash_on_stderr()
                if not self._is_closed.is_set():
                    self._is_closed.set()
                    log.error("the watchdog of this process was killed; nobody notices if it hangs")
                return


def _start(process: int, advice: str, *, fds: tuple[int, int]) -> subprocess.Popen:
    # -P: nothing of the current folder is imported.
    command = [sys.executable, "-P", "-m", "jaxscale.watch.watchdog"]
    command += [*map(str, (*fds, process, os.getpid())), advice]
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    # It inherits what is blocked, from its first instruction on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_IT)
    try:
        return subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=fds,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _crash_on_stderr() -> None:
    faulthandler.enable(file=2, all_threads=True)


def end_with(text: str) -> None:
    """Says it and ends this process at once, whatever its other threads wait for."""
    with contextlib.suppress(Exception):
        os.write(2, f"\nerror: {text}\n".encode(errors="replace"))
    sys.stderr.flush()
    os._exit(EXIT_AGAIN)
