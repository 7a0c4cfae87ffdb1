"""Saves and restores the training state. Orbax moves the arrays; this file makes them trustworthy.

Orbax 0.12 restores flipped bits without a word, and saving over an existing step silently saves
nothing. So a step is written beside its final name, checksummed, and only then renamed:

    checkpoints/
      1200/                 a whole step; nothing in it changes after the rename
        state/              the arrays, written by Orbax (OCDBT); readable with Orbax alone
        metadata.json       the caller's metadata, and the shape and dtype of every leaf
        checksums.json      size and CRC-32 of every file above

`folders.py` has the other names that a step goes through; `stored.py` reads. Reading never changes
the folder, so an evaluation may read while a run writes.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxscale import distributed
from jaxscale.checkpoint import checksums
from jaxscale.checkpoint import leaves as state_leaves
from jaxscale.checkpoint.folders import StepFolders
from jaxscale.checkpoint.parts import Part, copy_parts, is_index
from jaxscale.checkpoint.quiet import leave_out_late_writes, quieten_orbax
from jaxscale.checkpoint.stored import METADATA, STATE, CheckpointError, StoredSteps, listed
from jaxscale.checkpoint.together import (
    COPYING,
    SaveFailed,
    Together,
    file_names,
    other_processes_checksums,
    writer_of,
)
from jaxscale.files import require_writable, sync, write_atomically

log = logging.getLogger(__name__)

# One save may take this long: 800 GB (a 70B model with AdamW) at 0.25 GB/s.
SAVE_TIMEOUT_SECONDS = 3600
# And a file that another host has written be seen so late: NFS keeps what it knows for 60 s.
SEEN_SECONDS = 90

CHECKSUMS = checksums.NAME


class Checkpointer:
    """Saves and restores steps in `folder`, which every process must share.

    One save is in flight at a time. With `start` the folder is this process's own, and holds its
    part of each step, which `gather` of another Checkpointer reads.
    """

    def __init__(self, folder: Path | str, *, keep_last: int, keep_every: int = 0, start: str = ""):
        """Keeps the `keep_last` newest steps, and for ever those divisible by `keep_every`.

        keep_every=0 keeps none for ever. keep_last=0 opens the folder for reading only: nothing is
        created and save() raises. start: another name at each start, the same on all processes.
        Raises ValueError when the folder cannot be written to. Call on every process.
        """
        if keep_last < 0 or keep_every < 0:
            raise ValueError(
                f"keep_last={keep_last} and keep_every={keep_every} must not be negative"
            )
        self._folder = Path(folder).absolute()
        self._steps = StepFolders(self._folder)
        self._stored = StoredSteps(self._folder, self._steps)
        self._keep_last, self._keep_every = keep_last, keep_every
        self._start, self._num_saves = start, 0
        # For `tiers.py`: called with a step that has its name; and steps that must not be deleted.
        self.on_published: Callable[[int], None] = lambda step: None
        self.pinned: set[int] = set()
        self._pending: Future | None = None
        self._pending_step = -1
        self._together = Together(SAVE_TIMEOUT_SECONDS)
        if keep_last:
            _check_writable(self._folder)
        quieten_orbax()
        self._has_failed = False
        self._tell_late_writes = leave_out_late_writes()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        whose = ocp.options.MultiprocessingOptions(primary_host=None if start else 0)
        # Without compression a save of random float32 takes half the time; the files are 9% larger.
        self._handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True, use_compression=False, multiprocessing_options=whose
        )
        # What makes one index of those of all processes, and refuses a part alone.
        self._make_index = self._handler.finalize
        if start:
            self._handler.finalize = lambda directory: None
        self._orbax = ocp.AsyncCheckpointer(
            self._handler,
            timeout_secs=SAVE_TIMEOUT_SECONDS,
            multiprocessing_options=whose,
            # Where its own barriers would wait for a process that has failed.
            async_options=ocp.options.AsyncOptions(
                timeout_secs=SAVE_TIMEOUT_SECONDS,
                barrier_sync_fn=lambda **_: self._together.meet(),
            ),
        )

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if kind is None:
                raise
            log.error("%s", error)  # what ends the run is told as its error

    def save(self, step: int, state: Any, *, metadata: dict) -> bool:
        """Starts saving `state` as `step`, and returns True as soon as its arrays may be donated.

        state: a pytree of jax.Array (global arrays when there are several processes). metadata:
        whatever JSON holds. Waits for the save before it. A step that exists is replaced once the
        new one is whole; steps newer than this one (the run went back) are then renamed
        `.superseded`. Raises ValueError for a state or metadata that cannot be saved,
        CheckpointError for the failure of this save or of the one before it. Call on every process.
        """
        if not self._keep_last:
            raise ValueError(
                f"{self._folder} was opened for reading (keep_last=0); "
                "set keep_last to 1 or more to save"
            )
        if step < 0:
            raise ValueError(f"step={step} must not be negative")
        leaves = state_leaves.to_json(state_leaves.describe_saved(state))
        record = _metadata_to_json({"step": step, "metadata": metadata, "leaves": leaves})
        self._wait_for_previous(step)
        saving = self._steps.saving(step)
        self._num_saves += 1
        self._together = Together(SAVE_TIMEOUT_SECONDS)
        try:
            self._start_saving(saving, state, record=record)
        except (OSError, SaveFailed) as error:
            raise self._save_error(step, error) from error
        self._pending_step = step
        self._pending = self._executor.submit(self._finish, step, saving, together=self._together)
        return True

    def restore(
        self, abstract_state: Any, step: int | None = None, *, before: int | None = None
    ) -> tuple[int, Any, dict] | None:
        """Returns (step, state, metadata) of the newest sound step, or of `step`.

        before: of the newest below this one. None when there is no such step. abstract_state: a
        pytree of jax.ShapeDtypeStruct with shardings, or a function of a step's leaves and metadata
        that gives it; the arrays come out in exactly these shardings and dtypes, whatever layout
        they were saved in (floats are converted, one log line says so). Every byte is read and
        compared with its checksum first, before anything goes to a device; the processes share that
        work. A damaged step is logged and passed over; save() later renames it `.corrupt`.
        Raises CheckpointError when `step`, or every step, is damaged; ValueError when `step` does
        not exist or the leaves differ. Call on every process.
        """
        self.wait()
        if not callable(abstract_state):
            state_leaves.describe_wanted(abstract_state)  # refused with or without a step
        # The lead's list counts for all: file systems may show other processes other folders.
        steps = distributed.lead_says(sorted(self._steps.all(), reverse=True))
        if step is not None and step not in steps:
            raise ValueError(f"step={step} is not in {self._folder}; it holds {listed(steps)}")
        candidates = steps if step is None else [step]
        candidates = [c for c in candidates if before is None or c < before]
        for candidate in candidates:
            if self._stored.is_sound(candidate):
                wanted = self._asked(abstract_state, candidate)
                self._stored.check_leaves(candidate, state_leaves.describe_wanted(wanted))
                return candidate, self._load(candidate, wanted), self.metadata(candidate)
        if not candidates:
            return None
        raise self._stored.error_of(candidates, untried=[s for s in steps if s not in candidates])

    def restore_part(self, abstract_part: Any, *, step: int) -> dict[str, Any]:
        """These leaves of a sound step, by path, in these shardings and dtypes; no other is read.

        abstract_part: a dict of them, or a function as for `restore`.
        Raises CheckpointError when the step is damaged, ValueError when it does not exist or has
        not these leaves. Call on every process.
        """
        if not self._stored.is_sound(step):
            raise self._stored.error_of([step], untried=[s for s in self._steps.all() if s != step])
        abstract_part = self._asked(abstract_part, step)
        self._stored.check_part(step, state_leaves.describe_wanted(abstract_part))
        return self._load(step, abstract_part)

    def latest_step(self) -> int | None:
        """The newest step whose metadata is sound, as this process sees the folder.

        Its arrays are not checked.
        """
        newest_first = sorted(self._steps.all(), reverse=True)
        return next(filter(self._stored.has_record, newest_first), None)

    def metadata(self, step: int) -> dict:
        """The metadata saved with `step`; touches no device and no array file.

        Raises ValueError when `step` does not exist, CheckpointError when it is damaged.
        """
        return self._stored.record(step)["metadata"]

    def steps(self) -> list[int]:
        """Those that have a whole folder, as this process sees it and as far as its name tells."""
        return sorted(self._steps.all())

    def folder_of(self, step: int) -> Path:
        """Where a step is, or would be."""
        return self._steps.of(step)

    def adopt(self, step: int, source: Path) -> int:
        """Copies a whole step in, and gives it its name once it is as its checksums say.

        Returns its bytes. Raises CheckpointError. On the lead alone; no save is in flight.
        """
        saving = self._steps.saving(step)
        try:
            self._put_damaged_aside()
            self._steps.clear()
            shutil.copytree(source, saving)
            files = checksums.read(saving)
            for name in (*files, CHECKSUMS):
                sync(saving / name)
            if defects := checksums.defects(saving, files, names=files):
                raise OSError(f"the copy is not what was copied: {defects[0]}")
            self._steps.publish(step)
        except (OSError, shutil.Error, checksums.ChecksumError) as error:
            raise self._save_error(step, error) from error
        self._retire(step)
        return sum(size for size, _ in files.values())

    def gather(self, step: int, parts: dict[int, Path], *, num_parts: int) -> int:
        """Copies a step in of which each process has parts, as `adopt`; returns the lead's bytes.

        parts: those that this process copies, by their number; each of `num_parts` is copied by one
        process. Raises CheckpointError on all if one fails. Call on every process; no save is in
        flight in this folder.
        """
        saving = self._steps.saving(step)
        together = Together(SAVE_TIMEOUT_SECONDS, lane=COPYING)
        try:
            with together.part():
                if distributed.is_lead():
                    self._put_damaged_aside()
                    self._steps.clear()
                    (saving / STATE).mkdir(parents=True)
            with together.part():
                _wait_to_see(saving / STATE)
                files = copy_parts(parts, saving)
            with together.telling():
                if distributed.is_lead() and num_parts > 1:
                    self._make_index(saving / STATE)
                    made = [name for name in file_names(saving) if is_index(name, state=STATE)]
                    files |= checksums.compute(saving, made)
                num_bytes = self._publish(step, files, together=together)
                together.meet()
        except Exception as error:  # whatever TensorStore raised
            raise self._save_error(step, error) from error
        return num_bytes

    def wait(self) -> None:
        """Waits for the save in flight. Raises CheckpointError if it failed, on any process.

        All processes know the same of it.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except Exception as error:  # whatever Orbax or TensorStore raised
            raise self._save_error(self._pending_step, error) from error

    def close(self) -> None:
        """Waits, and ends the threads. A process that exits without it can lose a save."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            # Orbax raises the failure of a save once more, in words of its own.
            with contextlib.suppress(Exception):
                self._orbax.close()
            if not self._has_failed:
                self._tell_late_writes()

    # Saving, in the background.

    def _start_saving(self, saving: Path, state: Any, *, record: bytes) -> None:
        with self._together.part():
            if self._changes_folder():
                self._put_damaged_aside()
                self._steps.clear()
                saving.mkdir()
                write_atomically(saving / METADATA, record)
                if self._start:
                    save = f"{self._start}-{self._num_saves}"
                    part = Part(jax.process_index(), of=jax.process_count(), save=save)
                    part.write(saving)
        with self._together.part():
            _wait_to_see(saving / METADATA)
        self._orbax.save(saving / STATE, args=ocp.args.PyTreeSave(state))

    def _changes_folder(self) -> bool:
        """Whether this process makes, renames and deletes what is in the folder."""
        return bool(self._start) or distributed.is_lead()

    def _put_damaged_aside(self) -> None:
        for step in self._stored.defects:
            self._steps.put_aside(step, "corrupt")
        self._stored.defects.clear()

    def _wait_for_previous(self, step: int) -> None:
        begin, previous = time.monotonic(), self._pending_step
        self.wait()
        waited_seconds = time.monotonic() - begin
        if waited_seconds > 1 and distributed.is_lead():
            log.warning(
                "saving step %d waited %.1f s for the save of step %d to finish; save less often",
                step,
                waited_seconds,
                previous,
            )

    def _finish(self, step: int, saving: Path, *, together: Together) -> None:
        with together.telling():
            begin = time.monotonic()
            self._orbax.wait_until_finished()
            write_seconds = time.monotonic() - begin
            # Each process reads back what it wrote, out of its own page cache.
            me, names = jax.process_index(), file_names(saving)
            mine = [name for name in names if self._start or writer_of(name, state=STATE) == me]
            num_bytes = self._publish(step, checksums.compute(saving, mine), together=together)
            if distributed.is_lead():
                log.info(
                    "saved step %d%s: %.3f GB, written in %.1f s, checked and in place after %.1f "
                    "s",
                    step,
                    ", the part of process 0" if self._start else "",
                    num_bytes / 1e9,
                    write_seconds,
                    time.monotonic() - begin,
                )
            together.meet()
        # Only now: no process hears of a save that has failed on another.
        if self._changes_folder():
            self.on_published(step)

    def _publish(self, step: int, files: checksums.Files, *, together: Together) -> int:
        """Once all processes have done their part: checksums, and the step's name.

        files: those that this process answers for. Returns the bytes as far as it knows them.
        """
        saving = self._steps.saving(step)
        if not self._changes_folder():
            write_atomically(
                saving / f"{CHECKSUMS}.{jax.process_index()}", checksums.to_json(files)
            )
        together.meet()
        if self._changes_folder():
            if not self._start:
                files |= other_processes_checksums(saving, timeout_seconds=SEEN_SECONDS)
            missing = sorted(set(file_names(saving)) - set(files))
            assert not missing, f"no process checksummed {missing}"
            checksums.write(saving, files)
            self._steps.publish(step)
            self._retire(step)
        return sum(size for size, _ in files.values())

    def _retire(self, step: int) -> None:
        self._steps.retire(
            step, keep_last=self._keep_last, keep_every=self._keep_every, pinned=self.pinned
        )

    def _save_error(self, step: int, error: BaseException) -> CheckpointError:
        self._has_failed = True
        kind = "" if isinstance(error, SaveFailed) else f"{type(error).__name__}: "
        return CheckpointError(
            f"saving step {step} to {self._folder} failed: {kind}{error}; "
            "check that there is space and every host can write there",
            step=step,
        )

    # Restoring.

    def _asked(self, abstract_state: Any, step: int) -> Any:
        if callable(abstract_state):
            return abstract_state(self._stored.leaves(step), self.metadata(step))
        return abstract_state

    def _load(self, step: int, abstract_state: Any) -> Any:
        return self._orbax.restore(
            self._steps.of(step) / STATE,
            args=ocp.args.PyTreeRestore(
                item=abstract_state,
                restore_args=jax.tree.map(_restore_args, abstract_state),
                partial_restore=True,
            ),
        )


def _wait_to_see(path: Path) -> None:
    """Raises OSError if what process 0 has made is not here."""
    deadline = time.monotonic() + SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise OSError(
                f"process 0 has created {path.parent}, which is not seen here; the folder must be "
                "shared by all hosts"
            )
        time.sleep(0.1)


def _restore_args(leaf: jax.ShapeDtypeStruct) -> ocp.ArrayRestoreArgs:
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _check_writable(folder: Path) -> None:
    try:
        require_writable(folder)
    except OSError as error:
        raise ValueError(
            f"workdir: checkpoints cannot be written to {folder} ({error.strerror}); "
            "set workdir to a folder that every host shares and may write to"
        ) from error


def _metadata_to_json(value: Any) -> bytes:
    try:
        return checksums.to_json(value)
    except TypeError as error:
        raise ValueError(f"the metadata of a checkpoint must be JSON: {error}") from error
