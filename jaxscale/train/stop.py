"""Signals: the step is finished and saved before the run ends; before the first, it ends at once.

SIGINT (Ctrl-C) is a user who stops. SIGTERM and SIGUSR1 are a scheduler that wants the machine:
the run ends with another exit code, by which scripts/train.slurm has the job come back.

Nothing heavy is imported here, so a script can call `end_at_once` before it imports the rest.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from jaxscale.launch import EXIT_AGAIN

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# What an orderly end may take before training, such as removing temporary files.
ORDERLY_SECONDS = 3.0
# Signals that came before training and have not ended the process yet.
_come: list[int] = []
_raises_later = threading.Event()


def code_of(signum: int) -> int:
    """The exit code of a run that this signal has stopped."""
    return 128 + signum if signum == signal.SIGINT else EXIT_AGAIN


def end_at_once() -> None:
    """From here on a signal ends the process within a moment, whatever it is doing.

    Python runs handlers between two of its instructions only: not in the seconds of an import in
    C, of waiting for other processes or of compiling; and an exception out of a handler may be
    swallowed where it lands. So a thread hears of the signal, by a pipe that C writes to.
    """
    _hear(_at_once)


def end_in_order() -> None:
    """From here on SIGINT is KeyboardInterrupt and the others SystemExit, to clean up.

    Where that takes longer than ORDERLY_SECONDS the thread of `end_at_once` ends the process.
    """
    _hear(_in_order)


def _hear(handler: Callable) -> None:
    if signal.getsignal(signal.SIGTERM) not in (_at_once, _in_order):
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        # A forked child would write into the same pipe.
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=_end, args=[reading], name="signals", daemon=True).start()
    for signum in SIGNALS:
        # A shell without job control has SIGINT ignored in what it starts with `&`.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, handler)


def _forget() -> None:
    signal.set_wakeup_fd(-1)
    for signum in SIGNALS:
        if signal.getsignal(signum) in (_at_once, _in_order):
            signal.signal(signum, signal.SIG_DFL)


def _end(reading: int) -> None:
    while number := os.read(reading, 1):
        signum = number[0]
        if signum in SIGNALS and signal.getsignal(signum) is _in_order:
            time.sleep(ORDERLY_SECONDS)
        # Others are heard too, such as those of `interrupts`, which are not for this thread.
        if signum in SIGNALS and signal.getsignal(signum) in (_at_once, _in_order):
            os._exit(code_of(signum))


def _at_once(signum, frame):
    _come.append(signum)


@contextlib.contextmanager
def raising_later() -> Iterator[None]:
    """What `end_in_order` has raised is raised at the end instead.

    For code that swallows it: where JAX starts a plugin it prints the traceback and goes on.
    """
    _raises_later.set()
    try:
        yield
    finally:
        _raises_later.clear()
        if _come:
            _raise(_come[-1])


def _in_order(signum, frame):
    _come.append(signum)
    if not _raises_later.is_set() and not _is_collecting(frame):
        _raise(signum)


def _is_collecting(frame) -> bool:
    """Whether it is within what JAX has the garbage collector call.

    What is raised there Python prints with its traceback, and goes on.
    """
    while frame is not None and frame.f_code.co_name != "_xla_gc_callback":
        frame = frame.f_back
    return frame is not None


def _raise(signum: int) -> NoReturn:
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(code_of(signum))


class Interrupts:
    """Whether SIGINT, SIGTERM or SIGUSR1 has come: call it. code: what the process ends with."""

    def __init__(self) -> None:
        self.code = 0

    def __call__(self) -> bool:
        return self.code != 0

    def note(self, signum, frame):
        self.code = max(self.code, code_of(signum))  # a user who stops wins
        # Not KeyboardInterrupt: it would wait for the save in flight, and for threads. A kill harms
        # no checkpoint.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        name = signal.Signals(signum).name
        log.warning("%s: finishing the step and saving (once more Ctrl-C stops at once)", name)


@contextlib.contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Notes the signals instead. A SIGINT after that ends the process at once.

    One that came shortly before is noted too: what `end_in_order` raised may have been swallowed,
    and its thread leaves the process alone once it trains. (Seen: 10,000 steps after a Ctrl-C.)
    """
    noted = Interrupts()
    previous = {signum: signal.signal(signum, noted.note) for signum in SIGNALS}
    try:
        while _come:
            noted.note(_come.pop(), None)
        yield noted
    finally:
        for signum, handler in previous.items():
            # None: not set by Python.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
