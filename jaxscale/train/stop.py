"""Ctrl-C and SIGTERM: the step is finished and saved before the run ends."""

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether SIGINT or SIGTERM has come.

    A SIGINT after that ends the process at once.
    """
    came: list[int] = []

    def note(signum, frame):
        came.append(signum)
        # Not KeyboardInterrupt: it would wait for the save in flight, and for threads. A kill harms
        # no checkpoint.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        name = signal.Signals(signum).name
        log.warning("%s: finishing the step and saving (once more Ctrl-C stops at once)", name)

    previous = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for signum, handler in previous.items():
            # None: not set by Python.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
