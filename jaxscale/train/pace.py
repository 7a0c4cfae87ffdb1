"""How long a step, or what stands between steps, may take before the process counts as stuck."""

import collections
import time

from jaxscale import distributed
from jaxscale.config import WatchdogConfig
from jaxscale.watch.verdict import HELD_OUT_DATA

# What takes about as long each time, of an evaluation a batch; to read one, or a checkpoint, takes
# what a disk takes.
STEADY = ("step", "evaluation")
NUM_LAST = 20
TIMES_THE_SLOWEST = 3


class Pace:
    """Tells the watchdog where this process is, and until when the next word may take."""

    def __init__(self, config: WatchdogConfig):
        self._config = config
        self._last = {phase: collections.deque[float](maxlen=NUM_LAST) for phase in STEADY}

    def tell(self, step: int, phase: str, *, batch: int = 0) -> None:
        """step: updates done. phase: "step", or what it pauses for; batch: of it, from 1."""
        distributed.at(step, phase, allowed=self.allowed(phase), batch=batch)

    def took(self, phase: str, seconds: float) -> None:
        """One of this phase, or of its batches, took so long.

        The first step, which connects the processes, makes those after it wait for longer.
        """
        if phase in STEADY:
            self._last[phase].append(seconds)

    def allowed(self, phase: str) -> float:
        """Seconds; 0: any number."""
        config = self._config
        last = self._last.get(phase)
        if not last:
            return config.pause_seconds
        steady = config.step_seconds
        return steady and steady + TIMES_THE_SLOWEST * max(last)


class Progress:
    """Tells the watchdog how far an evaluation is, batch by batch; before there is a pace, nobody.

    step: updates done.
    """

    def __init__(self, pace: Pace | None = None, *, step: int = 0):
        self._pace, self._step, self._last_end = pace, step, time.perf_counter()

    def reading(self, batch: int) -> None:
        """It waits for this batch, counted from 1."""
        if self._pace is not None:
            self._pace.tell(self._step, HELD_OUT_DATA, batch=batch)

    def running(self, batch: int) -> None:
        """It has this batch, and hands it to the devices."""
        if self._pace is not None:
            self._pace.tell(self._step, "evaluation", batch=batch)

    def done(self) -> None:
        """The devices have done one more; its time is that since the one before."""
        if self._pace is not None:
            end = time.perf_counter()
            self._pace.took("evaluation", end - self._last_end)
            self._last_end = end
