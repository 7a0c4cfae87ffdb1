"""Steps whose update is skipped: what is known of their batch, and when the run stops for them.

`step/update.py` leaves the state as it was where the loss or the gradient is not finite, or the
loss is above a limit that comes from here. With float16 a step is also skipped where its loss scale
was too large (`step/loss_scale.py`): that is the scale's fault, not the batch's, and counted apart.
"""

import collections
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.config import Config
from jaxscale.data.rows import TokenRows
from jaxscale.distributed import is_lead

FILE = "bad_batches.jsonl"
# Of a step's loss the limit knows those up to two steps before: one is on the devices, and one is
# read behind it. So it is the same whatever else happens between steps.
LAG = 2
# The least standard deviation that is taken for one, as a share of the median.
LEAST_DEVIATION = 0.01

log = logging.getLogger(__name__)


class BadStepError(RuntimeError):
    """Too many updates in a row were skipped."""


class BadSteps:
    """Takes the records of steps in turn.

    losses: [(step, loss), ...] that the limit goes by, as a checkpoint keeps them. go_back_from:
    the last of too many in a row, where config.bad_steps.roll_back lets the run go back.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        *,
        rows: TokenRows,
        batch_of: Callable[[int], int],
        losses: list[tuple[int, float]] | None = None,
    ):
        """batch_of: the number of the batch that a step reads."""
        self._config, self._settings, self._workdir = config, config.bad_steps, workdir
        self._rows, self._batch_of = rows, batch_of
        self.num_skipped, self.num_roll_backs, self.num_overflows = 0, 0, 0
        self.go_back_from: int | None = None
        self._streak: list[int] = []
        self._place: str | None = None
        self.reset(losses or [])

    def reset(self, losses: list[tuple[int, float]]) -> None:
        """The run goes on from a checkpoint, which kept these."""
        self._losses: collections.deque[tuple[int, float]] = collections.deque(
            maxlen=self._settings.window + LAG
        )
        self._losses.extend((step, loss) for step, loss in losses)
        self._streak, self._place, self.go_back_from = [], None, None

    @property
    def losses(self) -> list[tuple[int, float]]:
        return list(self._losses)

    @property
    def first_of_streak(self) -> int:
        """The first of the steps in a row that were skipped last."""
        return self._streak[0]

    def limits(self, step: int) -> dict[str, np.float32]:
        """What the update of this step takes besides its batch."""
        if not self._settings.spike:
            return {}
        known = [loss for number, loss in self._losses if number <= step - LAG]
        known = known[-self._settings.window :]
        if len(known) < self._settings.window:
            return {"loss_limit": np.float32(np.inf)}
        median = np.median(known)
        deviation = max(
            1.4826 * np.median(np.abs(np.array(known) - median)), LEAST_DEVIATION * median
        )
        return {"loss_limit": np.float32(median + self._settings.spike * deviation)}

    def take(
        self,
        record: dict[str, Any],
        *,
        saved: str,
        locate: Callable[[int], str | None] = lambda step: None,
    ) -> None:
        """Raises BadStepError for the last in a row that is too long; saved: what is, in words.

        locate: says where the values of a step stop being finite; asked for the first in a row.
        """
        if self.go_back_from is not None:
            return  # a step that was on its way is done again, too
        if record.get("overflow"):
            self._take_overflow(record)
            return
        step, reason = record["step"], self._reason(record)
        if reason is None:
            self._streak, self._place = [], None
            if self._settings.spike:
                self._losses.append((step, record["loss"]))
            return
        self._streak.append(step)
        self.num_skipped += 1
        batch = self._batch_of(step)
        identity = self._identity(batch)
        if is_lead():
            log.warning(
                "step %d: %s; its update is skipped (%d in a row, the run %s after %d). Batch %d: "
                "rows %d to %d of training, documents %s",
                step,
                reason,
                len(self._streak),
                "goes back" if self._may_go_back() else "stops",
                self._settings.stop_after,
                batch,
                *identity["rows"],
                _shortened(identity["documents"]),
            )
        place = None
        if len(self._streak) == 1 and self._settings.locate and _not_finite(record):
            self._place = place = locate(step)
        if is_lead():
            if place:
                log.warning("step %d: not finite from %s on", step, place)
            line = {"step": step, "reason": reason, "batch": batch} | identity
            self._keep(line | ({"from": place} if place else {}))
        if len(self._streak) < self._settings.stop_after:
            return
        if self._may_go_back():
            self.go_back_from = step
            return
        in_a_row = f", the last of {len(self._streak)} in a row" if len(self._streak) > 1 else ""
        place = f" Values were not finite from {self._place} on." if self._place else ""
        raise BadStepError(
            f"step {step}: {reason}{in_a_row}.{place} The run stopped; {saved}. Look at the data "
            f"of that step ({self._workdir / FILE}), lower config.schedule.peak, or set "
            "config.dtype='float32' to find out more"
        )

    def _take_overflow(self, record: dict[str, Any]) -> None:
        """Neither a bad step, nor the end of some in a row."""
        self.num_overflows += 1
        if is_lead():
            log.info(
                "step %d: gradients overflow float16 at a loss scale of %g; its update is skipped",
                record["step"],
                record["loss_scale"],
            )

    def _reason(self, record: dict[str, Any]) -> str | None:
        if bad := _not_finite(record):
            return ", ".join(f"{key} is {record[key]}" for key in bad)
        if not record.get("skipped"):
            return None
        limit = self.limits(record["step"])["loss_limit"]
        return f"loss is {record['loss']:.4f}, above {limit:.4f}, a spike"

    def _may_go_back(self) -> bool:
        return self.num_roll_backs < self._settings.roll_back

    def _identity(self, batch: int) -> dict[str, Any]:
        size = self._config.batch_size
        numbers = np.arange(batch * size, (batch + 1) * size)
        return {
            "rows": [int(numbers[0]), int(numbers[-1])],
            "documents": self._rows.documents(numbers),
        }

    def _keep(self, line: dict[str, Any]) -> None:
        try:
            with open(self._workdir / FILE, "a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            log.error("%s cannot be written: %s", self._workdir / FILE, error.strerror)


def _not_finite(record: dict[str, Any]) -> list[str]:
    return [key for key in ("loss", "grad_norm") if not math.isfinite(record[key])]


def _shortened(documents: list[list[int]], *, most: int = 8) -> str:
    """The first of them: `3, 17 to 19, ...`."""
    parts = [str(a) if a == b else f"{a} to {b}" for a, b in documents[:most]]
    return ", ".join(parts + ["..."] * (len(documents) > most))
