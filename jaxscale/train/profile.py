"""Some steps of a run, recorded by JAX's profiler.

For `scripts/anatomy.py`, and for viewers such as XProf.
"""

import logging
from pathlib import Path

import jax

from jaxscale.config import ProfileConfig
from jaxscale.distributed import is_lead

log = logging.getLogger(__name__)

# What the host marks a step by in a trace: the name that viewers look for.
STEP = "train"


class Profile:
    """Records steps `start + 1` to `start + steps` of this process, in the lead process alone.

    Wait for the device before `start()` and `stop()`: then the trace holds these steps whole, and
    no other. The steps that are recorded take longer.
    """

    def __init__(self, config: ProfileConfig, folder: Path, *, first_step: int):
        """folder: of the trace. first_step: the step that this process goes on from."""
        self._begin = first_step + config.start
        self._end = self._begin + config.steps
        self._folder = folder
        self._is_on = config.steps > 0 and is_lead()
        self._is_recording = False

    def starts_after(self, step: int) -> bool:
        return self._is_on and step == self._begin

    def stops_after(self, step: int) -> bool:
        return self._is_recording and step == self._end

    def start(self) -> None:
        jax.profiler.start_trace(self._folder, profiler_options=_options())
        self._is_recording = True

    def stop(self) -> None:
        """Writes the trace; does nothing if none is being recorded."""
        if not self._is_recording:
            return
        self._is_recording = False
        jax.profiler.stop_trace()
        log.info("the profile from step %d on is in %s", self._begin + 1, self._folder)


def _options() -> jax.profiler.ProfileOptions:
    options = jax.profiler.ProfileOptions()
    # Python's calls are left out: they fill a trace, cost the host most, and say nothing about the
    # device. Of the host's own events there are only the steps that the loop marks, and their like.
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    return options
