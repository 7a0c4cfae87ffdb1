"""Checkpoints on a fast disk of the host, copied to the folder that all hosts share.

    LOCAL/ID/1200/             as in a checkpoint folder, the last two
    LOCAL/ID/workdir           whose they are; ID is in WORKDIR/checkpoints/local_id
    WORKDIR/checkpoints/1200/  a copy, compared with its checksums before it gets its name

A save takes what the fast disk takes; a process that is killed goes on from the newer of the two. A
host that is lost takes with it what was not copied.
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
from jaxscale.checkpoint.checkpointer import Checkpointer, CheckpointError
from jaxscale.config import CheckpointConfig
from jaxscale.files import write_atomically

KEEP_LOCAL = 2
ID, WORKDIR = "local_id", "workdir"

log = logging.getLogger(__name__)


def open_checkpoints(config: CheckpointConfig, folder: Path) -> "Checkpointer | TieredCheckpointer":
    """The checkpoints of a run. Raises ValueError for folders that cannot be written to."""
    shared = Checkpointer(folder, keep_last=config.keep_last, keep_every=config.keep_every)
    if not config.local:
        return shared
    hosts = set(distributed.every_process_says(socket.gethostname()))
    if len(hosts) > 1:
        raise ValueError(
            f"config.checkpoint.local={config.local!r}: it is for runs of one host, and this one "
            f"has {len(hosts)}; set config.checkpoint.local=''"
        )
    local = Path(config.local).expanduser() / _id_of(folder)
    fast = Checkpointer(local, keep_last=KEEP_LOCAL)
    if distributed.is_lead():
        write_atomically(local / WORKDIR, str(folder.absolute()).encode())
        _remove_others(local.parent)
    return TieredCheckpointer(fast, shared, keep_every=config.keep_every)


class TieredCheckpointer:
    """As a `Checkpointer`, of two folders: saves into `fast`, and copies to `shared`."""

    def __init__(self, fast: Checkpointer, shared: Checkpointer, *, keep_every: int):
        self._fast, self._shared, self._keep_every = fast, shared, keep_every
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="copy")
        self._copies: list[Future] = []
        self._newest, self._lock = -1, threading.Lock()
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
        while self._copies:
            self._copies.pop(0).result()

    def close(self) -> None:
        """Waits, and ends the threads."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            for tier in (self._fast, self._shared):
                tier.close()

    def _begin_copy(self, step: int) -> None:
        """In the thread that gave the step its name, on the lead."""
        with self._lock:
            self._newest = step
        self._fast.pinned.add(step)
        self._copies.append(self._executor.submit(self._copy, step))

    def _copy(self, step: int) -> None:
        try:
            is_kept = self._keep_every and step % self._keep_every == 0
            if step < self._newest and not is_kept:
                return  # the disk that is shared is slower than the run saves
            began = time.monotonic()
            num_bytes = self._shared.adopt(step, self._fast.folder_of(step))
            log.info(
                "copied step %d: %.3f GB in %.1f s", step, num_bytes / 1e9, time.monotonic() - began
            )
        finally:
            self._fast.pinned.discard(step)

    def _tell_failed_copies(self) -> None:
        done = [copy for copy in self._copies if copy.done()]
        self._copies = [copy for copy in self._copies if copy not in done]
        for copy in done:
            if error := copy.exception():
                log.error("%s. Training goes on; it is on the local disk alone", error)


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
