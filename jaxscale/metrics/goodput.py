"""Where a run's wall time goes: steps that count, and everything else.

It counts from the first start of a run: a record says what the checkpoint of its step has cost so
far, and a process that goes on from there adds the time since as `restart`: what was lost, the time
that no process ran, and what it did before its own clock began.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Of a process, in this order; `steps` alone is productive.
PHASES = (
    "steps",
    "start_up",
    "compile",
    "restore",
    "data",
    "checkpoint",
    "evaluation",
    "integrity",
    "skipped",
    "restart",
    "other",
)


class Goodput:
    """The seconds of each phase, whose sum is the wall time since the run's first start."""

    def __init__(
        self, *, before: dict[str, Any] | None = None, clock: Callable[[], float] = time.time
    ):
        """The clock starts here. before: a record that this process goes on from, see `read`."""
        self._clock, self._began = clock, clock()
        self._seconds, self._before = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        if before is not None:
            self.go_on_from(before)

    def go_on_from(self, record: dict[str, Any]) -> None:
        """Counts what an earlier process had, and the time between as `restart`.

        A clock that was set back in between makes no time negative.
        """
        self._before = {phase: float(record.get(f"{phase}_seconds", 0.0)) for phase in PHASES}
        self._before["restart"] += max(0.0, self._began - float(record["time"]))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around what belongs to this phase; phases do not nest."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """What is no phase is `other`."""
        self._seconds[name if name in PHASES else "other"] += seconds

    def add_step(self, record: dict[str, Any]) -> None:
        """A step's record: its wait for data, and the rest of it."""
        waited = min(record["data_wait_seconds"], record["step_seconds"])
        self.add("data", waited)
        self.add("skipped" if record.get("skipped") else "steps", record["step_seconds"] - waited)

    def begin_steps(self) -> None:
        """What this process did so far, and has no other name, was its start-up."""
        self.add("start_up", self._unnamed())

    def lose_steps(self, seconds: float) -> None:
        """Steps that the run went back over count as `restart`."""
        lost = min(seconds, self._seconds["steps"])
        self._seconds["steps"] -= lost
        self._seconds["restart"] += lost

    def record(self) -> dict[str, float]:
        """For metrics.jsonl: the share of steps, the seconds of each phase, and when this was."""
        seconds = {phase: self._before[phase] + self._seconds[phase] for phase in PHASES}
        seconds["other"] += self._unnamed()
        wall = sum(seconds.values())
        named = {f"{phase}_seconds": value for phase, value in seconds.items()}
        return {
            "goodput": seconds["steps"] / max(wall, 1e-9),
            "wall_seconds": wall,
            "time": self._clock(),
        } | named

    def describe(self) -> str:
        """`goodput 91.2%: 120.0 s of steps in 131.6 s; compile 6.1 s, ...`, the largest first."""
        record = self.record()
        others = sorted(((record[f"{phase}_seconds"], phase) for phase in PHASES[1:]), reverse=True)
        parts = [f"{phase.replace('_', '-')} {value:.1f} s" for value, phase in others if value]
        return (
            f"goodput {record['goodput']:.1%}: {record['steps_seconds']:.1f} s of steps in "
            f"{record['wall_seconds']:.1f} s; {', '.join(parts)}"
        )

    def _unnamed(self) -> float:
        return max(0.0, self._clock() - self._began - sum(self._seconds.values()))


def read(path: Path, *, step: int) -> dict[str, Any] | None:
    """The last record of goodput in metrics.jsonl of this step or before; None if there is none."""
    found = None
    try:
        with open(path, "rb") as file:
            for line in file:
                if b'"goodput"' in line and (record := _record_of(line, step=step)):
                    found = record
    except OSError:
        return None
    return found


def _record_of(line: bytes, *, step: int) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        is_ours = 0 < record["step"] <= step and math.isfinite(record["time"])
        all(math.isfinite(record.get(f"{phase}_seconds", 0.0)) for phase in PHASES)
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return record if is_ours else None
