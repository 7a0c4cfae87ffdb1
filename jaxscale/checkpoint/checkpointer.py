"""Saves and restores the training state. Orbax moves the arrays; this file makes them trustworthy.

Orbax 0.12 restores flipped bits without a word (239 of 240 single-bit flips), and saving over an existing step silently
saves nothing. So a step is written beside its final name, checksummed, and only then renamed:

    checkpoints/
      1200/                 a whole step; nothing in it changes after the rename
        state/              the arrays, written by Orbax (OCDBT); readable with Orbax alone
        metadata.json       the caller's metadata, and the shape and dtype of every leaf
        checksums.json      size and CRC-32 of every file above
      1300.saving/          in progress, or left by a kill: removed at the next save
      1100.corrupt/         failed its checksums at a restore; never deleted here
      1250.superseded/      newer than a save made after going back to an older step; never deleted here

Reading never changes the folder, so an evaluation may read while a run writes.
"""

import dataclasses
import json
import logging
import math
import os
import re
import shutil
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxscale import distributed
from jaxscale.checkpoint import checksums

log = logging.getLogger(__name__)

# One save may take this long: 800 GB (a 70B model with AdamW) at 0.25 GB/s.
SAVE_TIMEOUT_SECONDS = 3600

STATE, METADATA, CHECKSUMS = "state", "metadata.json", checksums.NAME


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged, or a save that failed. Nothing the user typed."""


class Checkpointer:
    """Saves and restores steps in `folder`, which every process must share. One save is in flight at a time."""

    def __init__(self, folder: Path | str, *, keep_last: int, keep_every: int = 0):
        """Keeps the `keep_last` newest steps, and for ever those divisible by `keep_every` (0: none).

        keep_last=0 opens the folder for reading only: nothing is created and save() raises.
        Raises ValueError when the folder cannot be written to. Call on every process.
        """
        if keep_last < 0 or keep_every < 0:
            raise ValueError(
                f"keep_last={keep_last} and keep_every={keep_every} must not be negative"
            )
        self._folder = Path(folder).absolute()
        self._keep_last, self._keep_every = keep_last, keep_every
        self._defects: dict[int, str] = {}
        self._pending: Future | None = None
        self._pending_step = -1
        if keep_last:
            _require_writable(self._folder)
        _quieten_orbax()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # Without compression a save is 2x faster (128 MiB of random float32, 8 CPU devices: 0.09 s against 0.19 s) and
        # the files are 9% larger.
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False),
            timeout_secs=SAVE_TIMEOUT_SECONDS,
        )

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def save(self, step: int, state: Any, metadata: dict) -> bool:
        """Starts saving `state` as `step`, and returns True as soon as its arrays may be donated.

        state: a pytree of jax.Array (global arrays when there are several processes). metadata: whatever JSON holds.
        Waits for the save before it. A step that exists is replaced once the new one is whole; steps newer than this
        one (the run went back) are then renamed `.superseded`.
        Raises ValueError for a state or metadata that cannot be saved, CheckpointError for the failure of this save or
        of the one before it. Call on every process.
        """
        if not self._keep_last:
            raise ValueError(
                f"{self._folder} was opened for reading (keep_last=0); set keep_last to 1 or more to save"
            )
        if step < 0:
            raise ValueError(f"step={step} must not be negative")
        leaves = _describe_saved(state)
        record = _metadata_to_json({"step": step, "metadata": metadata, "leaves": leaves})
        self._wait_for_previous(step)
        saving = self._folder / f"{step}.saving"
        try:
            if distributed.is_lead():
                self._tidy()
                saving.mkdir()
                checksums.write_atomically(saving / METADATA, record)
            self._orbax.save(saving / STATE, args=ocp.args.PyTreeSave(state))
            if not (saving / METADATA).exists():
                raise OSError(
                    "process 0 created it, this process does not see it; the folder must be shared by all hosts"
                )
        except OSError as error:
            raise self._save_error(step, error) from error
        self._pending_step = step
        self._pending = self._executor.submit(self._finish, step, saving)
        return True

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[int, Any, dict] | None:
        """Returns (step, state, metadata) of the newest sound step, or of `step`; None when the folder has no step.

        abstract_state: a pytree of jax.ShapeDtypeStruct with shardings; the arrays come out in exactly these shardings
        and dtypes, whatever layout they were saved in (floats are converted, one log line says so). Every byte is read
        and compared with its checksum first, before anything goes to a device; the processes share that work.
        A damaged step is logged and passed over; save() later renames it `.corrupt`.
        Raises CheckpointError when `step`, or every step, is damaged; ValueError when `step` does not exist or the
        leaves differ. Call on every process.
        """
        self.wait()
        wanted = _describe_wanted(abstract_state)
        steps = _lead_says(sorted(self._folders(), reverse=True))
        if step is not None and step not in steps:
            raise ValueError(f"step={step} is not in {self._folder}; it holds {_listed(steps)}")
        candidates = steps if step is None else [step]
        for candidate in candidates:
            defect = self._find_defect(candidate)
            if defect is None:
                state, metadata = self._load(candidate, abstract_state, wanted)
                return candidate, state, metadata
            self._defects[candidate] = defect
            if distributed.is_lead():
                log.error(
                    "checkpoint step %d in %s is damaged and not used: %s",
                    candidate,
                    self._folder,
                    defect,
                )
        if not candidates:
            return None
        defects = "".join(
            f"\n  {candidate}: {self._defects[candidate]}" for candidate in candidates
        )
        raise CheckpointError(
            f"no sound checkpoint to restore in {self._folder}:{defects}\n"
            + (f"restore another step ({_listed([s for s in steps if s != step])})" if step is not None
               else "to start from scratch, move these folders away or choose another workdir")
        )  # fmt: skip

    def latest_step(self) -> int | None:
        """The newest step whose metadata is sound, as this process sees the folder; its arrays are not checked."""
        return next(
            (step for step in sorted(self._folders(), reverse=True) if self._has_record(step)), None
        )

    def metadata(self, step: int) -> dict:
        """The metadata saved with `step`. Touches no device and no array file. Raises CheckpointError if damaged."""
        return self._record(step)["metadata"]

    def wait(self) -> None:
        """Waits for the save in flight. Raises CheckpointError if it failed.

        On process 0 the step is then whole; elsewhere this process's part of it is.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except Exception as error:  # whatever Orbax or TensorStore raised
            raise self._save_error(self._pending_step, error) from error

    def close(self) -> None:
        """Waits, and ends the threads. A process that exits without it can lose the save in flight."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            self._orbax.close()

    # The folder.

    def _folders(self) -> dict[int, Path]:
        folders = {}
        # Sorted by length: `12` is listed before `12.replaced`, which counts only while a replacement was cut short.
        for path in sorted(self._folder.glob("[0-9]*"), key=lambda path: len(path.name)):
            match = re.fullmatch(r"(\d+)(\.replaced)?", path.name)
            if match and path.is_dir():
                folders.setdefault(int(match[1]), path)
        return folders

    def _step_folder(self, step: int) -> Path:
        return self._folders().get(step, self._folder / str(step))

    def _tidy(self) -> None:
        """Puts damaged steps aside and clears what a killed run or a failed save left behind. No save is in flight."""
        for step in self._defects:
            self._put_aside(step, "corrupt")
        self._defects.clear()
        for path in self._folder.glob("*.saving"):
            log.info("removing %s: that save was cut short", path)
            _remove(path)
        for path in self._folder.glob("*.replaced"):
            if path.with_suffix("").exists():
                _remove(path)
            else:
                path.rename(path.with_suffix(""))

    def _put_aside(self, step: int, why: str) -> None:
        source = self._step_folder(step)
        if not source.exists():
            return
        target, count = self._folder / f"{step}.{why}", 1
        while target.exists():
            count += 1
            target = self._folder / f"{step}.{why}-{count}"
        source.rename(target)
        log.warning(
            "renamed checkpoint %s to %s; delete it when you no longer need it", source, target.name
        )

    # Saving, in the background.

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

    def _finish(self, step: int, saving: Path) -> None:
        begin = time.monotonic()
        self._orbax.wait_until_finished()
        write_seconds = time.monotonic() - begin
        # Each process reads back what it wrote, out of its own page cache.
        mine = [name for name in _file_names(saving) if _writer_of(name) == jax.process_index()]
        files = checksums.compute(saving, mine)
        if not distributed.is_lead():
            checksums.write_atomically(
                saving / f"{CHECKSUMS}.{jax.process_index()}", checksums.to_json(files)
            )
            return
        files |= _other_processes_checksums(saving)
        missing = sorted(set(_file_names(saving)) - set(files))
        assert not missing, f"no process checksummed {missing}"
        checksums.write(saving, files)
        self._publish(step, saving)
        num_bytes = sum(size for size, _ in files.values())
        log.info(
            "saved step %d: %.3f GB, written in %.1f s, checked and in place after %.1f s",
            step, num_bytes / 1e9, write_seconds, time.monotonic() - begin,
        )  # fmt: skip
        self._retire(step)

    def _publish(self, step: int, saving: Path) -> None:
        final, replaced = self._folder / str(step), self._folder / f"{step}.replaced"
        if final.exists():
            _remove(replaced)
            final.rename(replaced)
        saving.rename(final)
        checksums.sync(self._folder)
        _remove(replaced)

    def _retire(self, newest: int) -> None:
        whole = sorted(
            step for step, path in self._folders().items() if (path / CHECKSUMS).exists()
        )
        for step in whole:
            if step > newest:
                self._put_aside(step, "superseded")
        for step in [step for step in whole if step <= newest][: -self._keep_last]:
            if not self._keep_every or step % self._keep_every:
                # Renamed first: a kill in the middle must not leave half a step under a whole step's name.
                self._step_folder(step).rename(self._folder / f"{step}.deleting")
        for path in self._folder.glob("*.deleting"):
            # NFS keeps files that others hold open; what stays is tried again after the next save.
            shutil.rmtree(path, ignore_errors=True)

    def _save_error(self, step: int, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"saving step {step} to {self._folder} failed: {type(error).__name__}: {error}; "
            "check that there is space and every host can write there"
        )

    # Restoring.

    def _record(self, step: int) -> dict:
        folder = self._step_folder(step)
        if not folder.exists():
            raise ValueError(
                f"step={step} is not in {self._folder}; it holds {_listed(self._folders())}"
            )
        try:
            defects = checksums.defects(folder, checksums.read(folder), [METADATA])
        except checksums.ChecksumError as error:
            defects = [str(error)]
        if defects:
            raise CheckpointError(f"checkpoint {folder}: {defects[0]}")
        return json.loads((folder / METADATA).read_bytes())

    def _has_record(self, step: int) -> bool:
        try:
            self._record(step)
        except (CheckpointError, ValueError):
            return False
        return True

    def _find_defect(self, step: int) -> str | None:
        """What is wrong with a step, the same on every process; each reads its share of the bytes."""
        begin, folder = time.monotonic(), self._step_folder(step)
        try:
            files = checksums.read(folder)
        except checksums.ChecksumError as error:
            files, defects = {}, [str(error)]
        else:
            by_size = sorted(files, key=lambda name: (-files[name][0], name))
            share = by_size[jax.process_index() :: jax.process_count()]
            defects = checksums.defects(folder, files, share)
        more = f" (and {len(defects) - 1} more files)" if len(defects) > 1 else ""
        defect = next(
            (text for text in _every_process_says(defects[0] + more if defects else "") if text),
            None,
        )
        if defect is None and distributed.is_lead():
            num_bytes = sum(size for size, _ in files.values())
            log.info(
                "step %d is sound: %.3f GB read in %.1f s",
                step,
                num_bytes / 1e9,
                time.monotonic() - begin,
            )
        return defect

    def _load(self, step: int, abstract_state: Any, wanted: dict[str, "_Leaf"]) -> tuple[Any, dict]:
        record = self._record(step)
        saved = {
            path: _Leaf(tuple(shape), dtype) for path, (shape, dtype) in record["leaves"].items()
        }
        differences = _different_leaves(saved, wanted)
        if differences:
            raise ValueError(
                f"checkpoint step {step} in {self._folder} does not fit this model; set its configuration back to "
                "the saved one, or choose another workdir:\n  " + "\n  ".join(differences)
            )
        converted = [path for path in wanted if wanted[path].dtype != saved[path].dtype]
        if converted and distributed.is_lead():
            path = converted[0]
            log.warning("converting %d leaves of step %d to another dtype, such as %s: saved %s, wanted %s",
                        len(converted), step, path, saved[path].dtype, wanted[path].dtype)  # fmt: skip
        restore_args = jax.tree.map(
            lambda leaf: ocp.ArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
            ),
            abstract_state,
        )
        state = self._orbax.restore(
            self._step_folder(step) / STATE,
            args=ocp.args.PyTreeRestore(item=abstract_state, restore_args=restore_args),
        )
        return state, record["metadata"]


def different_keys(saved: dict, wanted: dict, prefix: str = "") -> list[str]:
    """Lines such as `model.num_layers: saved 4, now 6` for each key in which two nested dicts differ.

    Values are compared as JSON gives them back: (1, 2) equals [1, 2], and a StrEnum its string.
    """
    lines = []
    for key in [*saved, *(key for key in wanted if key not in saved)]:
        name = f"{prefix}.{key}" if prefix else str(key)
        old, new = saved.get(key, _ABSENT), wanted.get(key, _ABSENT)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += different_keys(old, new, name)
        elif _plain(old) != _plain(new):
            lines.append(f"{name}: saved {_plain(old)}, now {_plain(new)}")
    return lines


_ABSENT = object()


def _plain(value: Any) -> Any:
    return "absent" if value is _ABSENT else json.loads(json.dumps(value, default=str))


# Leaves: what a state consists of, as one flat dict from a path such as `params.layers.0.kernel`.


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def _leaves_by_path(tree: Any) -> dict[str, Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}
    if len(leaves) != len(flat):
        raise ValueError(
            "two leaves of the state have the same path once its keys are joined by '.'; rename one of them"
        )
    return leaves


def _describe_saved(state: Any) -> dict[str, tuple[list[int], str]]:
    leaves = _leaves_by_path(state)
    for path, leaf in leaves.items():
        if not isinstance(leaf, jax.Array) or jax.dtypes.issubdtype(
            leaf.dtype, jax.dtypes.extended
        ):
            kind = leaf.dtype if isinstance(leaf, jax.Array) else type(leaf).__name__
            raise ValueError(
                f"{path} of the state is {kind}; only a plain jax.Array can be saved (for a key: jax.random.key_data)"
            )
        if jax.process_count() > 1 and leaf.is_fully_addressable:
            raise ValueError(
                f"{path} of the state exists on this process only; make it a global array before saving"
            )
        if math.prod(leaf.shape) == 0:
            raise ValueError(
                f"{path} of the state has shape {leaf.shape}; an array without elements cannot be saved, leave it out"
            )
    return {path: (list(leaf.shape), leaf.dtype.name) for path, leaf in leaves.items()}


def _describe_wanted(abstract_state: Any) -> dict[str, _Leaf]:
    leaves = _leaves_by_path(abstract_state)
    for path, leaf in leaves.items():
        if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is None:
            raise ValueError(
                f"{path} of abstract_state is {leaf}; it must be a jax.ShapeDtypeStruct with a sharding"
            )
    return {
        path: _Leaf(tuple(leaf.shape), np.dtype(leaf.dtype).name) for path, leaf in leaves.items()
    }


def _different_leaves(saved: dict[str, _Leaf], wanted: dict[str, _Leaf]) -> list[str]:
    lines = []
    for path in [*saved, *(path for path in wanted if path not in saved)]:
        old, new = saved.get(path), wanted.get(path)
        if (
            old is None
            or new is None
            or old.shape != new.shape
            or not _is_convertible(old.dtype, new.dtype)
        ):
            lines.append(f"{path}: saved {old or 'absent'}, wanted {new or 'absent'}")
    return lines


def _is_convertible(saved: str, wanted: str) -> bool:
    return saved == wanted or all(
        jax.numpy.issubdtype(jax.numpy.dtype(d), jax.numpy.floating) for d in (saved, wanted)
    )


# Files.


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix=".writable-"):
            pass
    except OSError as error:
        raise ValueError(
            f"workdir: checkpoints cannot be written to {folder} ({error.strerror}); "
            "set workdir to a folder that every host shares and may write to"
        ) from error


def _file_names(folder: Path) -> list[str]:
    """Every file under a step except the checksums themselves, as paths relative to it."""
    paths = (
        Path(parent, name).relative_to(folder)
        for parent, _, names in os.walk(folder)
        for name in names
    )
    return sorted(path.as_posix() for path in paths if not path.name.startswith(CHECKSUMS))


def _writer_of(name: str) -> int:
    match = re.match(rf"{STATE}/ocdbt\.process_(\d+)/", name)
    return int(match[1]) if match else 0


def _other_processes_checksums(saving: Path) -> dict[str, tuple[int, int]]:
    files, deadline = {}, time.monotonic() + SAVE_TIMEOUT_SECONDS
    for process in range(1, jax.process_count()):
        path = saving / f"{CHECKSUMS}.{process}"
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"process {process} wrote no checksums within {SAVE_TIMEOUT_SECONDS} s"
                )
            time.sleep(0.1)
        files |= json.loads(path.read_bytes())
        path.unlink()
    return files


def _metadata_to_json(value: Any) -> bytes:
    try:
        return checksums.to_json(value)
    except TypeError as error:
        raise ValueError(f"the metadata of a checkpoint must be JSON: {error}") from error


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _listed(steps: Any) -> str:
    return ", ".join(str(step) for step in sorted(steps)) or "no steps"


# Several processes: all must take the same decision, though file systems may show them different folders.


def _lead_says(steps: list[int]) -> list[int]:
    if jax.process_count() == 1:
        return steps
    padded = np.full(1024, -1, np.int32)
    padded[: len(steps[:1024])] = steps[:1024]
    return [int(step) for step in multihost_utils.broadcast_one_to_all(padded) if step >= 0]


def _every_process_says(text: str) -> list[str]:
    if jax.process_count() == 1:
        return [text]
    padded = np.frombuffer(text.encode()[:512].ljust(512, b"\0"), np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(padded)).reshape(
        jax.process_count(), 512
    )
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in gathered]


def _is_not_orbax_chatter(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or "orbax" not in record.pathname


def _quieten_orbax() -> None:
    # Orbax logs some 60 lines per save at level INFO to absl's logger. A filter by file leaves its warnings and errors,
    # and everybody else's absl messages, as they are.
    logger = logging.getLogger("absl")
    if _is_not_orbax_chatter not in logger.filters:
        logger.addFilter(_is_not_orbax_chatter)
