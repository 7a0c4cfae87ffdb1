"""Silent corruption: whether the devices remember and compute what they should, and which does not.

`step/replicas.py` and `step/replay.py` compare; here is what a run says and does about it.
"""

import functools
import logging
from collections.abc import Iterable

from jaxscale.data.batch import Batch
from jaxscale.launch import EXIT_CORRUPT
from jaxscale.step.plan import Plan
from jaxscale.step.replay import Replay, Unlike
from jaxscale.step.replicas import Odd, Replicas, replicas_of
from jaxscale.step.state import TrainState

log = logging.getLogger(__name__)


class IntegrityError(RuntimeError):
    """A device has changed what it holds, or computes other bits from the same. Nothing is saved.

    Another start on the same hosts may meet the same device, so the run does not come back alone.
    """

    exit_code = EXIT_CORRUPT


class Integrity:
    """The checks of a run. hosts: the name of each process's."""

    def __init__(self, plan: Plan, *, hosts: list[str], command: str):
        """command: what a message tells the user to run again."""
        self._plan, self._hosts, self._command = plan, hosts, command
        # The last step whose copies were compared, and alike.
        self.compared_step = -1

    @functools.cached_property
    def _replicas(self) -> Replicas:
        return replicas_of(self._plan)

    @functools.cached_property
    def _replay(self) -> Replay:
        return Replay(self._plan)

    def compare_replicas(self, step: int, state: TrainState, *, saved: str) -> None:
        """Raises IntegrityError if devices that hold the same do not; saved: what is, in words.

        Nothing if this step's were compared. Every process calls it, and all do alike.
        """
        if step == self.compared_step:
            return
        if odd := self._replicas.odd(state):
            raise self._error(step, "; ".join(self._described(odd)), saved=saved)
        self.compared_step = step

    def replay(self, step: int, state: TrainState, *, batch: Batch, saved: str) -> None:
        """Raises IntegrityError if two replays of this batch differ. Every process calls it."""
        if unlike := self._replay.unlike(state, batch):
            raise self._error(step, self._described_replay(unlike), saved=saved)

    def _described(self, odd: list[Odd]) -> Iterable[str]:
        """A part of a sentence for each set of devices."""
        for places, is_certain in dict.fromkeys((part.places, part.is_certain) for part in odd):
            parts = [p for p in odd if (p.places, p.is_certain) == (places, is_certain)]
            leaves = list(dict.fromkeys(part.leaf for part in parts))
            what = leaves[0] + (f" and {len(leaves) - 1} more" if len(leaves) > 1 else "")
            if is_certain:
                others = parts[0].num_copies - len(places)
                yield (
                    f"{what} on {self._named(places)} is not what the {others} other devices with "
                    "a copy hold"
                )
            else:
                yield f"{what} differs between {self._named(places)}, and no majority says which"

    def _described_replay(self, unlike: Unlike) -> str:
        others = f", and {unlike.num_others} more differ after it" if unlike.num_others else ""
        where = self._named(unlike.places)
        if len(unlike.places) == self._plan.mesh.size > 1:
            where = "every device, so a sum over all of them had spread it"
        return (
            f"replayed from the same state and batch, {unlike.what} came out otherwise the second "
            f"time on {where}{others}"
        )

    def _named(self, places: tuple[int, ...], *, most: int = 8) -> str:
        devices = [self._plan.mesh.devices.flat[place] for place in places]
        shown = [
            f"device {device.id} (process {device.process_index}, host "
            f"{self._hosts[device.process_index]})"
            for device in devices[:most]
        ]
        more = [f"{len(devices) - most} more"] if len(devices) > most else []
        return " and ".join(shown + more)

    def _error(self, step: int, what: str, *, saved: str) -> IntegrityError:
        return IntegrityError(
            f"step {step}: silent corruption: {what}. This state is not saved; {saved}. Take that "
            "host out, or test it (dcgmi diag -r 3, and the ECC errors of nvidia-smi -q), then "
            f"continue with: {self._command}"
        )
