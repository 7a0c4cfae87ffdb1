"""Compares the blocks of a store with the checksums beside it (`block_sums.py`).

The token of a flipped bit is a token like any other: without this a run trains on it.
"""

import contextlib
import logging
import threading
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import numpy as np

from jaxscale.config import OnCorruption
from jaxscale.data import block_sums
from jaxscale.data.indexed import IndexedDataset
from jaxscale.files import telling

# Up to this much is checked as a store is opened (0.1 s), the rest in the background, while the run
# trains: as much as this of a store, on half a core.
SMALL_BYTES, MOST_BYTES = 2**28, 2**36

log = logging.getLogger(__name__)


class CorruptionError(ValueError):
    """A store's bytes are not those that were written."""


class StoreChecks:
    """Compares the blocks of a store with their checksums; by several threads at once.

    on_corruption: STOP raises CorruptionError, SKIP leaves out the rows that a damaged block is
    part of. is_cached: the store is one that we converted, and can again: once damage is found, the
    next start does.
    """

    def __init__(
        self,
        store: IndexedDataset,
        *,
        on_corruption: OnCorruption = OnCorruption.STOP,
        is_cached: bool = False,
    ):
        """Raises CorruptionError for an .idx or .crc that is damaged, whatever on_corruption."""
        self._bin, self._path = f"{store.prefix}.bin", Path(store.prefix + block_sums.SUFFIX)
        self._name, self._is_cached, self._on_corruption = store.name, is_cached, on_corruption
        self._bytes = store.tokens.view(np.uint8)
        self._item_bytes = store.tokens.itemsize
        with telling(f"{self._path} cannot be read", "delete it to train without checks"):
            sums = block_sums.read(self._path)
            index = block_sums.sum_of_file(Path(store.prefix + ".idx"))
        if sums is None or sums.num_bytes != len(self._bytes):
            self._refuse(f"{self._path} is damaged, or of another store")
        if sums.index_sum != index:
            self._refuse(f"{store.prefix}.idx has changed since it was written")
        self._block_bytes, self._sums = sums.block_bytes, sums.blocks
        self._is_sound = np.zeros(len(self._sums), bool)
        self._damaged: dict[int, str] = {}

    @property
    def num_bytes(self) -> int:
        return len(self._bytes)

    def check_all(self) -> None:
        """Every block, here and now. Raises CorruptionError with on_corruption=STOP."""
        self._check(range(len(self._sums)))
        self._stop_if_damaged()

    def begin(self, *, part: int, parts: int) -> None:
        """Checks up to MOST_BYTES in the background; each part of a run begins at its own place."""
        first = part * len(self._sums) // parts
        most = MOST_BYTES // self._block_bytes
        blocks = np.roll(np.arange(len(self._sums)), -first)[:most].tolist()
        threading.Thread(target=self._go_through, args=(blocks,), daemon=True).start()

    def leave_out(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Which rows are not to be trained on, bool [rows]; before they are read.

        begins, ends: the tokens of each row's pieces, int64 [rows, pieces]. STOP checks the blocks
        of the first row, a sample where rows are shuffled, and raises CorruptionError for damage
        found by anyone; SKIP checks the blocks of all rows, once each.
        """
        if self._on_corruption == OnCorruption.STOP:
            self._check(self._blocks(begins[:1], ends[:1])[0])
            self._stop_if_damaged()
            return np.zeros(len(begins), bool)
        blocks = self._blocks(begins, ends)
        self._check({block for row in blocks for block in row if not self._is_sound[block]})
        is_bad = [any(block in self._damaged for block in row) for row in blocks]
        return np.array(is_bad, bool)

    def is_damaged(self, begin: int, end: int) -> bool:
        """Whether these tokens are; raises CorruptionError with on_corruption=STOP."""
        (blocks,) = self._blocks(np.array([[begin]]), np.array([[end]]))
        self._check(blocks)
        self._stop_if_damaged()
        return any(block in self._damaged for block in blocks)

    def _refuse(self, what: str) -> NoReturn:
        fix = f"copy or write the store again, or delete {self._path} to train without checks"
        raise CorruptionError(f"{what}; {fix}")

    def _go_through(self, blocks: list[int]) -> None:
        began, num_bytes = time.monotonic(), len(blocks) * self._block_bytes
        for block in blocks:
            start = time.monotonic()
            self._check([block])
            if self._damaged and self._on_corruption == OnCorruption.STOP:
                return
            time.sleep(time.monotonic() - start)
        log.info(
            "%s: %.1f of %.1f GB checked in %.0f s, %s",
            self._name,
            min(num_bytes, self.num_bytes) / 1e9,
            self.num_bytes / 1e9,
            time.monotonic() - began,
            f"{len(self._damaged)} blocks damaged" if self._damaged else "all as written",
        )

    def _blocks(self, begins: np.ndarray, ends: np.ndarray) -> list[list[int]]:
        """Those of each row; with the token behind each piece, a target."""
        size = self._item_bytes
        first = begins * size // self._block_bytes
        last = np.minimum((ends + 1) * size - 1, len(self._bytes) - 1) // self._block_bytes
        is_filled = begins < ends
        return [
            [block for piece in pieces for block in range(piece[0], piece[1] + 1) if piece[2]]
            for pieces in np.stack([first, last, is_filled], axis=-1).tolist()
        ]

    def _check(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            begin = block * self._block_bytes
            end = min(begin + self._block_bytes, len(self._bytes))
            found, expected = zlib.crc32(self._bytes[begin:end].data), int(self._sums[block])
            self._is_sound[block] = found == expected
            if found != expected and block not in self._damaged:
                self._note(block, f"CRC-32 {found:08x}, written with {expected:08x}")

    def _note(self, block: int, sums: str) -> None:
        begin = block * self._block_bytes
        end = min(begin + self._block_bytes, len(self._bytes))
        place = f"bytes {begin} to {end} (tokens {begin // self._item_bytes} on)"
        text = f"{self._bin} has changed since it was written: {place} have {sums}"
        self._damaged[block] = text
        if self._is_cached:
            with contextlib.suppress(OSError):
                self._path.unlink()  # what has no checksums is converted again
        if self._on_corruption == OnCorruption.SKIP:
            log.error("%s; rows that it is part of are left out", text)

    def _stop_if_damaged(self) -> None:
        if not self._damaged or self._on_corruption == OnCorruption.SKIP:
            return
        fix = "copy the store again, or set config.data.on_corruption=skip"
        if self._is_cached:
            fix = f"it is of {self._name}, and the next start converts that again"
        raise CorruptionError(f"{next(iter(self._damaged.values()))}; {fix}")


def checks_of(
    store: IndexedDataset, *, on_corruption: OnCorruption, is_cached: bool
) -> StoreChecks | None:
    """The checks of a store; None if it has no checksums.

    A small one is checked here; one of the cache was, as it was opened.
    """
    if not Path(store.prefix + block_sums.SUFFIX).exists():
        return None
    checks = StoreChecks(store, on_corruption=on_corruption, is_cached=is_cached)
    if not is_cached and checks.num_bytes <= SMALL_BYTES:
        checks.check_all()
    return checks
