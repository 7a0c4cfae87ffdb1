"""Checkpoints on a fast disk of the host, copied to the folder that all hosts share.

    LOCAL/ID/1200/             as in a checkpoint folder, the last two
    LOCAL/ID/part-3/1200/      of several hosts: what process 3 wrote of it, on its own host
    LOCAL/ID/workdir           whose they are; ID is in WORKDIR/checkpoints/local_id
    WORKDIR/checkpoints/1200/  a copy, compared with its checksums before it gets its name

A save takes what the fast disk takes; a process that is killed goes on from the newer of the two. A
host that is lost takes with it what was not copied.

Of several hosts none has a whole step, and after a restart a process may need what another host
has: what is newer on their disks is copied first, each part by a process of its host, and all is
restored from the shared folder, into any layout.
"""

import contextlib
import logging
import shutil
import socket
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxscale import distributed
from jaxscale.checkpoint import parts
from jaxscale.checkpoint.checkpointer import SAVE_TIMEOUT_SECONDS, Checkpointer
from jaxscale.checkpoint.parts import Part
from jaxscale.checkpoint.stored import CheckpointError
from jaxscale.checkpoint.together import COPYING
from jaxscale.config import CheckpointConfig
from jaxscale.files import require_writable, telling, write_atomically

KEEP_LOCAL = 2
ID, WORKDIR = "local_id", "workdir"

log = logging.getLogger(__name__)


def open_checkpoints(config: CheckpointConfig, folder: Path) -> "Checkpointer | TieredCheckpointer":
    """The checkpoints of a run. Raises ValueError for folders that cannot be written to."""
    shared = Checkpointer(folder, keep_last=config.keep_last, keep_every=config.keep_every)
    local = Path(config.local).expanduser().absolute()
    disks = distributed.every_process_says(f"{socket.gethostname()}:{local}" * bool(config.local))
    if not any(disks):
        return shared
    if not all(disks):
        raise ValueError(
            f"config.checkpoint.local: process {disks.index('')} has none, and others have; set a "
            "folder on each host, or none"
        )
    what = f"config.checkpoint.local={config.local!r} cannot be written to"
    with telling(what, "set it to another folder, or to '' for none"):
        require_writable(local)
    me, home = jax.process_index(), local / _id_of(folder)
    home.mkdir(exist_ok=True)
    if disks.index(disks[me]) == me:
        write_atomically(home / WORKDIR, str(folder.absolute()).encode())
        _remove_others(local)
    is_one_disk = len(set(disks)) == 1
    here = parts.find(home) | ({} if is_one_disk else parts.find_whole(home))
    if _gather_newest(here, shared) and disks.index(disks[me]) == me:
        # Of an earlier start, with other processes here.
        mine = [] if is_one_disk else [n for n, disk in enumerate(disks) if disk == disks[me]]
        keeps = {parts.folder_of(home, process) for process in mine}
        for path in {path for path in here.values() if path.parent not in keeps}:
            shutil.rmtree(path, ignore_errors=True)
    if is_one_disk:
        fast = Checkpointer(home, keep_last=KEEP_LOCAL)
        return TieredCheckpointer(fast, shared, keep_every=config.keep_every)
    start = distributed.every_process_says(uuid.uuid4().hex[:16])[0]
    fast = Checkpointer(parts.folder_of(home, me), keep_last=KEEP_LOCAL, start=start)
    return PartedCheckpointer(fast, shared, keep_every=config.keep_every)


class TieredCheckpointer:
    """As a `Checkpointer`, of two folders: saves into `fast`, and copies to `shared`."""

    def __init__(self, fast: Checkpointer, shared: Checkpointer, *, keep_every: int):
        self._fast, self._shared, self._keep_every = fast, shared, keep_every
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="copy")
        self._copies: list[Future] = []
        self._newest, self._num_meetings, self._lock = -1, 0, threading.Lock()
        fast.on_published = self._begin_copy

    def __enter__(self) -> "TieredCheckpointer":
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if kind is None:
                raise
            log.error("%s", error)

    def save(self, step: int, state: Any, *, metadata: dict) -> bool:
        """As `Checkpointer.save`. Waits for no copy; a failed one is told."""
        self._tell_failed_copies()
        return self._fast.save(step, state, metadata=metadata)

    def restore(
        self, abstract_state: Any, step: int | None = None, *, before: int | None = None
    ) -> tuple[int, Any, dict] | None:
        """As `Checkpointer.restore`; of each step the fast folder's, if it is sound."""
        steps = distributed.lead_says(sorted({*self._fast.steps(), *self._shared.steps()})[::-1])
        if step is not None:
            steps = [step]
        failed = None
        for candidate in steps:
            for tier in (self._fast, self._shared):
                if (before is None or candidate < before) and candidate in tier.steps():
                    try:
                        return tier.restore(abstract_state, candidate)
                    except CheckpointError as error:
                        failed = error
        if failed is not None:
            raise failed
        return None

    def latest_step(self) -> int | None:
        """The newest step of either folder whose metadata is sound."""
        found = (self._fast.latest_step(), self._shared.latest_step())
        return max((step for step in found if step is not None), default=None)

    def metadata(self, step: int) -> dict:
        """As `Checkpointer.metadata`."""
        with contextlib.suppress(CheckpointError, ValueError):
            return self._fast.metadata(step)
        return self._shared.metadata(step)

    def wait(self) -> None:
        """Until the last step is in both folders. Raises CheckpointError if it is not."""
        self._fast.wait()
        copies, self._copies = self._copies, []
        for copy in copies[:-1]:
            _tell_failure(copy)
        for copy in copies[-1:]:
            copy.result()

    def close(self) -> None:
        """Waits, and ends the threads."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            for tier in (self._fast, self._shared):
                tier.close()

    def _begin_copy(self, step: int) -> None:
        """In the thread that gave the step its name, on the lead; of parts on each process."""
        with self._lock:
            self._newest = step
        self._fast.pinned.add(step)
        self._copies.append(self._executor.submit(self._copy, step))

    def _copy(self, step: int) -> None:
        try:
            if not self._is_wanted(step):
                return
            began = time.monotonic()
            num_bytes = self._bring(step)
            if distributed.is_lead():
                log.info(
                    "copied step %d: %.3f GB in %.1f s",
                    step,
                    num_bytes / 1e9,
                    time.monotonic() - began,
                )
        finally:
            self._fast.pinned.discard(step)

    def _is_wanted(self, step: int) -> bool:
        """False for a step that the shared disk was too slow for, and that is not kept for good."""
        is_kept = self._keep_every and step % self._keep_every == 0
        return bool(step >= self._newest or is_kept)

    def _bring(self, step: int) -> int:
        """Returns the bytes of the step."""
        return self._shared.adopt(step, self._fast.folder_of(step))

    def _tell_failed_copies(self) -> None:
        done = [copy for copy in self._copies if copy.done()]
        self._copies = [copy for copy in self._copies if copy not in done]
        for copy in done:
            _tell_failure(copy)


class PartedCheckpointer(TieredCheckpointer):
    """Of several hosts: `fast` holds a process's own parts, and all else is of `shared`."""

    def restore(
        self, abstract_state: Any, step: int | None = None, *, before: int | None = None
    ) -> tuple[int, Any, dict] | None:
        """As `Checkpointer.restore`, once all that was saved is copied; what failed is told."""
        try:
            self.wait()
        except CheckpointError as error:
            if distributed.is_lead():
                log.error("%s", error)
        return self._shared.restore(abstract_state, step, before=before)

    def latest_step(self) -> int | None:
        """As `Checkpointer.latest_step`: of what is copied."""
        return self._shared.latest_step()

    def metadata(self, step: int) -> dict:
        """As `Checkpointer.metadata`."""
        return self._shared.metadata(step)

    def _is_wanted(self, step: int) -> bool:
        """The same on each process: not if it is late on one."""
        late = "" if super()._is_wanted(step) else "late"
        self._num_meetings += 1
        place = f"jaxscale/late/{self._num_meetings}"
        return not distributed.meet(place, late, timeout_seconds=SAVE_TIMEOUT_SECONDS, lane=COPYING)

    def _bring(self, step: int) -> int:
        part = {jax.process_index(): self._fast.folder_of(step)}
        return self._shared.gather(step, part, num_parts=jax.process_count())


def _tell_failure(copy: Future) -> None:
    if (error := copy.exception()) and distributed.is_lead():
        log.error("%s. Training goes on; it is on the local disk alone", error)


def _gather_newest(here: dict[tuple[int, Part], Path], shared: Checkpointer) -> bool:
    """Copies the newest step that is on the local disks, all parts of it, and not in the workdir.

    False, and it says so, where a newer one cannot be had. Call on every process. here: the parts
    that it sees.
    """
    me, troubles = jax.process_index(), []
    (latest,) = distributed.lead_says([shared.latest_step() or 0])
    for step, holders in parts.newest_first(distributed.every_process_says(parts.to_json(here))):
        num_parts = next(iter(holders)).of
        if step <= latest:
            break
        if missing := set(range(num_parts)) - {part.number for part in holders}:
            troubles.append(
                f"step {step} on the local disks lacks the part of process {min(missing)} of "
                f"{num_parts}: its host is not among these, or its disk was emptied"
            )
            continue
        mine = {part.number: here[step, part] for part in holders if holders[part] == me}
        try:
            num_bytes = shared.gather(step, mine, num_parts=num_parts)
        except CheckpointError as error:
            troubles.append(str(error))
            continue
        if distributed.is_lead():
            log.info("step %d is newer on the local disks: copied, %.3f GB", step, num_bytes / 1e9)
        latest = step
    if troubles and distributed.is_lead():
        log.warning("%s. Going on from %s", troubles[0], f"step {latest}" if latest else "nothing")
    return not troubles


def _id_of(folder: Path) -> str:
    """The same on every process, and another one in a workdir that is made anew."""
    path = folder / ID
    if distributed.is_lead() and not path.exists():
        write_atomically(path, uuid.uuid4().hex[:16].encode())
    mine = path.read_text() if distributed.is_lead() else ""
    return distributed.every_process_says(mine)[0] if jax.process_count() > 1 else mine


def _remove_others(local: Path) -> None:
    """The folders of workdirs that are there and have another ID by now: nobody reads them."""
    for path in local.glob(f"*/{WORKDIR}"):
        folder = Path(path.read_text())
        with contextlib.suppress(OSError):
            if folder.parent.is_dir() and (
                not (folder / ID).exists() or (folder / ID).read_text() != path.parent.name
            ):
                log.info("removing %s: %s is another run now", path.parent, folder.parent)
                shutil.rmtree(path.parent, ignore_errors=True)
