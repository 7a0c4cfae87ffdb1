"""The Megatron indexed dataset: the tokens end to end in `prefix.bin`, documents in `prefix.idx`.

The .idx, little endian, no padding (Megatron-LM, core/datasets/indexed_dataset.py):

    9 bytes           b"MMIDIDX\\0\\0"
    uint64            version, 1
    uint8             dtype code, see DTYPES
    uint64            num_sequences
    uint64            num_documents + 1
    int32 [sequences] tokens in each sequence
    int64 [sequences] byte offset of each sequence in the .bin
    int64 [documents + 1]  first sequence of each document, then num_sequences
    int8  [sequences] modes, multimodal stores only; not read here

A document is one sequence, or several (Megatron's sentence splitting); here only documents count.
"""

import array
import contextlib
import logging
import mmap
import os
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from jaxscale.data.block_sums import SUFFIX, BlockSums
from jaxscale.files import is_file, telling

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
HEADER = struct.Struct("<9sQBQQ")
# In the order in which they get their names.
FILES = (".bin", SUFFIX, ".idx")
MAX_DOCUMENT_TOKENS = 2**31 - 1  # the format stores sequence lengths as int32

# The prefix of a store, or either of its files.
StorePath = str | os.PathLike[str]

log = logging.getLogger(__name__)


class IndexedDataset:
    """A memory-mapped store. Opening reads the index once; tokens are read as they are sliced.

    prefix: the path without .bin/.idx (a path that ends in either is accepted).
    name: what errors about its content call it; the prefix unless given.
    tokens: [num_tokens], a read-only view of the mapped .bin in its own dtype.
    document_offsets: int64 [num_documents + 1]; document i is tokens[offsets[i]:offsets[i + 1]].
        Costs 8 bytes of memory per document.

    Documents without tokens (Megatron's preprocessing writes one for an empty text) hold nothing to
    train on: they are left out of the numbering, with one warning that says how many. Refusing them
    would force a rewrite of terabytes that are otherwise sound.

    Raises ValueError if a file is missing or empty, if the index is truncated, of another format or
    version, of an unknown dtype, not contiguous, or does not agree with the size of the .bin.
    """

    def __init__(self, prefix: StorePath, *, name: str | None = None):
        self.prefix = strip_suffix(prefix)
        self.name = name or self.prefix
        bin_path, idx_path = self.prefix + ".bin", self.prefix + ".idx"
        with telling(f"{self.prefix} cannot be read", "make it readable, or copy it again"):
            _check_present(bin_path, idx_path)
            index = _read_index(idx_path)
            tokens = _map_file(bin_path)
        self.dtype: np.dtype = index.dtype
        ends = np.cumsum(index.lengths, dtype=np.int64)
        _check_pointers(idx_path, index)
        _check_documents(idx_path, index)
        self.num_tokens = int(ends[-1])
        _check_size(bin_path, len(tokens), num_tokens=self.num_tokens, dtype=self.dtype)
        offsets = np.concatenate([[0], ends])[index.documents]
        self.document_offsets: np.ndarray = _without_empty(offsets, idx_path)
        # Not np.memmap: its slices run __array_finalize__ in Python, 1 us each.
        self.tokens: np.ndarray = np.frombuffer(tokens, self.dtype)

    @property
    def num_documents(self) -> int:
        """Documents that hold at least one token."""
        return len(self.document_offsets) - 1

    def __len__(self) -> int:
        return self.num_documents

    def __getitem__(self, number: int) -> np.ndarray:
        """The tokens of one document, a read-only view."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.prefix}: it has {self.num_documents}")
        start, end = self.document_offsets[number : number + 2]
        return self.tokens[start:end]


class IndexedWriter:
    """Writes a store that `IndexedDataset` and Megatron read; one sequence per document.

    Files get temporary names until `close`, which syncs and renames them, the .idx last: nobody
    ever sees half a store, and a killed run leaves only `*.tmp-*` behind, or what is in the folder
    `temporary`. Beside them goes a .crc with checksums (`block_sums.py`). As a context manager it
    closes on success and deletes its temporary files on an exception, of its own closing too. An
    existing store is replaced at close.

    Raises ValueError for a dtype the format lacks, a document that is empty or longer than
    2**31 - 1 tokens, an id the dtype cannot hold, and at close if nothing was added; each names the
    document. Raises OSError where the disk refuses.
    """

    def __init__(self, prefix: StorePath, dtype: DTypeLike, *, temporary: Path | None = None):
        self.prefix = strip_suffix(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = _dtype_code(self.dtype)
        self._lengths = array.array("i")
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        suffix = f".tmp-{os.getpid()}-{os.urandom(4).hex()}"
        start = self.prefix if temporary is None else str(temporary / Path(self.prefix).name)
        self._temporary = {end: start + end + suffix for end in FILES}
        self._sums = BlockSums()
        # 1 MiB: a document of web length is 2 kB, and would be a system call each.
        self._bin = open(self._temporary[".bin"], "wb", buffering=2**20)

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths)

    def add(self, tokens: ArrayLike) -> None:
        """Appends one document: integers [num_tokens], num_tokens > 0."""
        tokens = np.asarray(tokens)
        name = f"document {self.num_documents} of {self.prefix}"
        if tokens.ndim != 1 or not 0 < tokens.size <= MAX_DOCUMENT_TOKENS:
            raise ValueError(
                f"{name} has shape {tokens.shape}; a document is one dimension of 1 to "
                f"{MAX_DOCUMENT_TOKENS} tokens: leave empty documents out, split longer ones"
            )
        if tokens.dtype != self.dtype:
            _check_fits(tokens, self.dtype, name=name)
        data = tokens.astype(self.dtype, copy=False).tobytes()
        self._bin.write(data)
        self._sums.add(data)
        self._lengths.append(tokens.size)

    def close(self) -> None:
        """Writes the index and gives both files their names."""
        if not self._lengths:
            self.abort()
            raise ValueError(
                f"no documents were added to {self.prefix}; an empty store trains nothing"
            )
        try:
            _sync_and_close(self._bin)
            with open(self._temporary[".idx"], "wb") as idx:
                self._write_index(idx)
                _sync_and_close(idx)
            with open(self._temporary[SUFFIX], "wb") as crc:
                crc.write(self._sums.to_bytes(Path(self._temporary[".idx"])))
                _sync_and_close(crc)
            self._give_names()
        except BaseException:
            self.abort()
            raise

    def _give_names(self) -> None:
        # An old .idx must not be seen beside the new .bin, nor the new one beside the old .bin.
        Path(self.prefix + ".idx").unlink(missing_ok=True)
        for end in FILES:
            os.replace(self._temporary[end], self.prefix + end)

    def abort(self) -> None:
        """Drops what was written; an existing store of this name stays as it was."""
        with contextlib.suppress(OSError):  # on a full disk what is buffered cannot be written
            self._bin.close()
        for path in self._temporary.values():
            Path(path).unlink(missing_ok=True)

    def _write_index(self, file: BinaryIO) -> None:
        lengths = np.frombuffer(self._lengths, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)
        file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write(((ends - lengths) * self.dtype.itemsize).astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def strip_suffix(path: StorePath) -> str:
    """The prefix of a store from the prefix or from either of its files."""
    text = os.path.expanduser(os.fspath(path))
    return text[:-4] if text.endswith((".bin", ".idx")) else text


def is_store(path: StorePath) -> bool:
    """Whether `path` names a store, or half of one (opening it then says which half is missing)."""
    prefix = strip_suffix(path)
    return os.fspath(path).endswith((".bin", ".idx")) or any(
        os.path.isfile(prefix + end) for end in (".bin", ".idx")
    )


def _check_present(bin_path: str, idx_path: str) -> None:
    missing = [path for path in (bin_path, idx_path) if not is_file(path)]
    if missing:
        raise ValueError(
            f"no such file: {' and '.join(missing)}; a token store is {bin_path} and {idx_path} "
            "together: copy both, or set config.data.path to the prefix they share"
        )
    for path in (bin_path, idx_path):
        if os.path.getsize(path) == 0:
            raise ValueError(f"{path} is empty: write or copy the store again")


class _Index(NamedTuple):
    """lengths: int32 [sequences]; pointers: int64 [sequences]; documents: int64 [documents + 1]."""

    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray


def _read_index(path: str) -> _Index:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            raise ValueError(
                f"{path} is truncated: {size} bytes, the header alone has {HEADER.size}"
            )
        magic, version, code, num_sequences, num_bounds = HEADER.unpack(header)
        _check_header(path, magic, version=version, code=code)
        need = HEADER.size + 12 * num_sequences + 8 * num_bounds
        if size < need:
            raise ValueError(
                f"{path} is truncated: {size} bytes, but its header announces {num_sequences} "
                f"sequences and {num_bounds - 1} documents, {need} bytes; copy or write it again"
            )
        if num_sequences == 0 or num_bounds < 2:
            raise ValueError(
                f"{path} lists {num_sequences} sequences and no documents: the store is empty"
            )
        lengths = np.fromfile(file, "<i4", num_sequences)
        pointers = np.fromfile(file, "<i8", num_sequences)
        documents = np.fromfile(file, "<i8", num_bounds)
    return _Index(DTYPES[code], lengths, pointers, documents)


def _check_header(path: str, magic: bytes, *, version: int, code: int) -> None:
    if magic != MAGIC:
        raise ValueError(
            f"{path} is not a Megatron index: it begins with {magic!r}, not {MAGIC!r}; "
            "convert text with scripts/prepare_data.py"
        )
    if version != VERSION:
        raise ValueError(f"{path} has index version {version}; only version {VERSION} is known")
    if code not in DTYPES:
        known = ", ".join(f"{number} {dtype.name}" for number, dtype in DTYPES.items())
        raise ValueError(f"{path} has dtype code {code}; the format defines {known}")


def _check_pointers(path: str, index: _Index) -> None:
    """Packing reads across documents, so each sequence must begin where the one before it ended."""
    lengths, pointers = index.lengths, index.pointers
    if lengths.min() < 0:
        raise ValueError(
            f"{path}: sequence {np.argmin(lengths)} has length {lengths.min()}: "
            "the index is damaged"
        )
    expected = (np.cumsum(lengths, dtype=np.int64) - lengths) * index.dtype.itemsize
    wrong = np.flatnonzero(pointers != expected)
    if wrong.size:
        sequence = int(wrong[0])
        falls = sequence > 0 and pointers[sequence] < pointers[sequence - 1]
        raise ValueError(
            f"{path}: sequence {sequence} begins at byte {pointers[sequence]} of the .bin, "
            f"but the one before it ends at byte {expected[sequence]}"
            + (" (offsets fall: did the tool that wrote them overflow?)" if falls else "")
            + "; sequences must lie end to end: write the store again"
        )


def _check_documents(path: str, index: _Index) -> None:
    documents, num_sequences = index.documents, len(index.lengths)
    falls = np.flatnonzero(documents[1:] < documents[:-1])  # a difference could overflow
    if documents[0] != 0 or documents[-1] != num_sequences or falls.size:
        where = f", falling at document {falls[0]}" if falls.size else ""
        raise ValueError(
            f"{path}: document bounds run from {documents[0]} to {documents[-1]}{where}; they must "
            f"rise from 0 to {num_sequences}, the number of sequences: write the store again"
        )


def _map_file(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _check_size(bin_path: str, have: int, *, num_tokens: int, dtype: np.dtype) -> None:
    """have: bytes of the .bin."""
    need = num_tokens * dtype.itemsize
    if have != need:
        cause = (
            "the .bin is truncated: copy it again"
            if have < need
            else "they belong to different stores"
        )
        raise ValueError(
            f"{bin_path} has {have} bytes, but its .idx lists {num_tokens} tokens of "
            f"{dtype.name}, {need} bytes: {cause}"
        )


def _without_empty(offsets: np.ndarray, path: str) -> np.ndarray:
    keep = np.diff(offsets, prepend=-1) > 0
    num_empty = len(offsets) - int(keep.sum())
    if num_empty:
        log.warning(
            "%s: left out %d of %d documents, they hold no tokens",
            path,
            num_empty,
            len(offsets) - 1,
        )
    return offsets[keep]


def _dtype_code(dtype: np.dtype) -> int:
    for code, known in DTYPES.items():
        if known == dtype:
            return code
    names = ", ".join(known.name for known in DTYPES.values())
    raise ValueError(f"dtype={dtype.name} is not in the format; use one of {names}")


def _check_fits(tokens: np.ndarray, dtype: np.dtype, *, name: str) -> None:
    if dtype.kind not in "iu":
        return
    if tokens.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {tokens.dtype.name}; token ids are integers")
    low, high = int(tokens.min()), int(tokens.max())
    limits = np.iinfo(dtype)
    if low < limits.min or high > limits.max:
        raise ValueError(
            f"{name} has ids {low} to {high}; {dtype.name} holds {limits.min} to {limits.max}: "
            "use a wider dtype"
        )


def _sync_and_close(file: BinaryIO) -> None:
    # Without the sync a power cut after the rename can leave a file of the right size, all zeros.
    with contextlib.closing(file):
        file.flush()
        os.fsync(file.fileno())
