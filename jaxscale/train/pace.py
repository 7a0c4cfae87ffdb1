"""How long a step, or what stands between steps, may take before the process counts as stuck."""

import collections

from jaxscale import distributed
from jaxscale.config import WatchdogConfig

# What takes about as long each time; a batch or a checkpoint takes what a disk takes.
STEADY = ("step", "evaluation")
NUM_LAST = 20
TIMES_THE_SLOWEST = 3


class Pace:
    """Tells the watchdog where this process is, and until when the next word may take."""

    def __init__(self, config: WatchdogConfig):
        self._config = config
        self._last = {phase: collections.deque[float](maxlen=NUM_LAST) for phase in STEADY}

    def tell(self, step: int, phase: str) -> None:
        """step: updates done. phase: "step", or what it pauses for."""
        distributed.at(step, phase, allowed=self.allowed(phase))

    def took(self, phase: str, seconds: float) -> None:
        """One of this phase took so long.

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
