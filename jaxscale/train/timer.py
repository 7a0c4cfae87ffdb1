"""A clock that all processes of a run read alike."""

import time
from collections.abc import Callable

import jax

from jaxscale.distributed import any_process


class Timer:
    """Is up once so many seconds have passed since it was, or since the start, on any process."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._clock = seconds, clock
        self._since = clock()
        self._any_is_up = any_process(lambda: self._clock() - self._since >= self._seconds)
        self._is_answered = False

    def is_up(self) -> bool:
        """True once each time; every process calls it at the same places."""
        is_up = self._any_is_up()
        # Several processes hear the votes of the call before: the next answer is of this one too.
        if is_up and self._is_answered:
            self._is_answered = False
            return False
        if is_up:
            self._since = self._clock()
            self._is_answered = jax.process_count() > 1
        return is_up
