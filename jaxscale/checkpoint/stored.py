"""The steps of a folder as they are read: what is in them, and whether it is as it was saved."""

import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path

import jax

from jaxscale import distributed
from jaxscale.checkpoint import checksums
from jaxscale.checkpoint import leaves as state_leaves
from jaxscale.checkpoint.folders import StepFolders

log = logging.getLogger(__name__)

STATE, METADATA = "state", "metadata.json"


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged, or a save that failed. Nothing the user typed.

    step: of the save that failed.
    """

    def __init__(self, message: str, *, step: int | None = None):
        super().__init__(message)
        self.step = step


class StoredSteps:
    """Reads a folder and changes nothing. defects: of the steps that were found damaged, in words.

    With several processes `is_sound` and what follows it is called on each.
    """

    def __init__(self, folder: Path, steps: StepFolders):
        self._folder, self._steps = folder, steps
        self.defects: dict[int, str] = {}

    def record(self, step: int) -> dict:
        """step, metadata and leaves, as they were saved; no array file is read.

        Raises ValueError where there is no such step, CheckpointError where this much is damaged.
        """
        folder = self._steps.of(step)
        if not folder.exists():
            raise ValueError(
                f"step={step} is not in {self._folder}; it holds {listed(self._steps.all())}"
            )
        try:
            defects = checksums.defects(folder, checksums.read(folder), names=[METADATA])
        except checksums.ChecksumError as error:
            defects = [str(error)]
        record = {} if defects else json.loads((folder / METADATA).read_bytes())
        if defects := defects or _other_step(record, step):
            raise CheckpointError(f"checkpoint {folder}: {defects[0]}")
        return record

    def has_record(self, step: int) -> bool:
        """Whether `record` would give one."""
        try:
            self.record(step)
        except (CheckpointError, ValueError):
            return False
        return True

    def is_sound(self, step: int) -> bool:
        """Says what is wrong with a damaged step, and remembers it; the same on every process."""
        defect = self._find_defect(step)
        if defect is None:
            return True
        self.defects[step] = defect
        if distributed.is_lead():
            log.error(
                "checkpoint step %d in %s is damaged and not used: %s",
                step,
                self._folder,
                defect,
            )
        return False

    def _find_defect(self, step: int) -> str | None:
        """What is wrong with a step, the same on every process; each reads a share of the bytes."""
        begin, folder = time.monotonic(), self._steps.of(step)
        try:
            files = checksums.read(folder)
        except checksums.ChecksumError as error:
            files, defects = {}, [str(error)]
        else:
            by_size = sorted(files, key=lambda name: (-files[name][0], name))
            share = by_size[jax.process_index() :: jax.process_count()]
            defects = checksums.defects(folder, files, names=share)
            if not defects and METADATA in files:
                defects = _other_step(json.loads((folder / METADATA).read_bytes()), step)
        more = f" (and {len(defects) - 1} more files)" if len(defects) > 1 else ""
        said = distributed.every_process_says(defects[0] + more if defects else "")
        if defect := next(filter(None, said), None):
            return defect
        if distributed.is_lead():
            num_bytes = sum(size for size, _ in files.values())
            log.info(
                "step %d is sound: %.3f GB read in %.1f s",
                step,
                num_bytes / 1e9,
                time.monotonic() - begin,
            )
        return None

    def check_leaves(self, step: int, wanted: state_leaves.Leaves) -> None:
        """Raises ValueError unless the leaves of the step can become these."""
        saved = self.leaves(step)
        if differences := state_leaves.different_leaves(saved, wanted):
            raise ValueError(
                f"checkpoint step {step} in {self._folder} does not fit this model; set its "
                "configuration back to the saved one, or choose another workdir:\n  "
                + "\n  ".join(differences)
            )
        converted = [path for path in wanted if wanted[path].dtype != saved[path].dtype]
        if converted and distributed.is_lead():
            path = converted[0]
            log.warning(
                "converting %d leaves of step %d to another dtype, such as %s: saved %s, wanted %s",
                len(converted),
                step,
                path,
                saved[path].dtype,
                wanted[path].dtype,
            )

    def check_part(self, step: int, wanted: state_leaves.Leaves) -> None:
        """Raises ValueError unless these leaves are there, or can become these."""
        part = {path: leaf for path, leaf in self.leaves(step).items() if path in wanted}
        if differences := state_leaves.different_leaves(part, wanted):
            raise ValueError(
                f"checkpoint step {step} in {self._folder} is not of this model:\n  "
                + "\n  ".join(differences)
            )

    def leaves(self, step: int) -> state_leaves.Leaves:
        """Shape and dtype of what was saved, by path."""
        return state_leaves.from_json(self.record(step)["leaves"])

    def error_of(self, damaged: list[int], *, untried: list[int]) -> CheckpointError:
        """For steps that `is_sound` has refused; untried: the others that there are."""
        defects = "".join(f"\n  {step}: {self.defects[step]}" for step in damaged)
        return CheckpointError(
            f"no sound checkpoint to restore in {self._folder}:{defects}\n"
            + (
                f"restore another step ({listed(untried)})"
                if untried
                else "to start from scratch, move these folders away or choose another workdir"
            )
        )


def _other_step(record: dict, step: int) -> list[str]:
    """A line if what is in the folder of this step was saved as another one."""
    saved = record["step"]
    if saved == step:
        return []
    return [f"it holds step {saved}, saved under that name; was the folder renamed?"]


def listed(steps: Iterable[int]) -> str:
    """For messages."""
    return ", ".join(str(step) for step in sorted(steps)) or "no steps"
