"""Checksums of a store's blocks, kept beside it in `prefix.crc`, little endian:

    8 bytes           b"JAXSCRC\\0"
    uint64            bytes of a block
    uint64            bytes of the .bin
    uint32            CRC-32 of the .idx
    uint32            CRC-32 of the lines above and of all below
    uint32 [blocks]   CRC-32 of each block of the .bin

Stores of other tools have none.
"""

import array
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

SUFFIX = ".crc"
MAGIC = b"JAXSCRC\x00"
HEAD, CRC = struct.Struct("<8sQQI"), struct.Struct("<I")
# Checking the block of one row takes 0.25 ms (4.2 GB/s of one core), 8% of what a batch of 64 rows
# of 8192 tokens takes to read; 60 TB of tokens have 240 MB of checksums.
BLOCK_BYTES = 2**20


class BlockSums:
    """The checksums of what is written, block by block."""

    def __init__(self):
        self._sums, self._sum, self._num_bytes = array.array("I"), 0, 0

    def add(self, data: bytes) -> None:
        """Takes the next bytes of the .bin."""
        rest = memoryview(data)
        while rest:
            here = rest[: BLOCK_BYTES - self._num_bytes % BLOCK_BYTES]
            self._sum = zlib.crc32(here, self._sum)
            self._num_bytes += len(here)
            if self._num_bytes % BLOCK_BYTES == 0:
                self._sums.append(self._sum)
                self._sum = 0
            rest = rest[len(here) :]

    def to_bytes(self, index: Path) -> bytes:
        """The .crc. index: the .idx that goes with it."""
        is_cut = self._num_bytes % BLOCK_BYTES > 0
        sums = np.array([*self._sums, *[self._sum] * is_cut], "<u4").tobytes()
        head = HEAD.pack(MAGIC, BLOCK_BYTES, self._num_bytes, sum_of_file(index))
        return head + CRC.pack(zlib.crc32(sums, zlib.crc32(head))) + sums


class Sums(NamedTuple):
    """What a .crc says. blocks: uint32 [blocks]."""

    block_bytes: int
    num_bytes: int
    index_sum: int
    blocks: np.ndarray


def read(path: Path) -> Sums | None:
    """None for a file that is damaged, or none of ours."""
    data, size = path.read_bytes(), HEAD.size + CRC.size
    if len(data) < size or (len(data) - size) % 4:
        return None
    magic, block_bytes, num_bytes, index_sum = HEAD.unpack_from(data)
    (expected,) = CRC.unpack_from(data, HEAD.size)
    found = zlib.crc32(memoryview(data)[size:], zlib.crc32(data[: HEAD.size]))
    if magic != MAGIC or found != expected:
        return None
    return Sums(block_bytes, num_bytes, index_sum, np.frombuffer(data, "<u4", offset=size))


def sum_of_file(path: Path) -> int:
    """CRC-32."""
    total = 0
    with open(path, "rb") as file:
        while chunk := file.read(BLOCK_BYTES):
            total = zlib.crc32(chunk, total)
    return total
