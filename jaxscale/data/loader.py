"""From the data settings to batches: the corpus of a run, and Grain reading ahead of it."""

import hashlib
import logging
import sys
from collections.abc import Generator
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from jaxscale.config import DataConfig
from jaxscale.data.batch import Batch
from jaxscale.data.checks import SMALL_BYTES, StoreChecks, checks_of
from jaxscale.data.convert import cached_store
from jaxscale.data.indexed import IndexedDataset
from jaxscale.data.rows import TokenRows
from jaxscale.data.text import describe_files, find_files
from jaxscale.data.tokenizer import Tokenizer, open_tokenizer

# Held-out rows are the same in every run, whatever its seed: evaluation losses stay comparable.
EVAL_SEED = 0
# What a fingerprint and an entropy look at: up to this much of a store, in evenly spaced blocks.
BLOCK_TOKENS = 2**14
FINGERPRINT_BLOCKS = 64
TRAIN_BLOCKS, EVAL_BLOCKS, BYTES_BLOCKS = 1024, 256, 16
# With config.data.max_documents_per_row=0 the bound is what the data needs, but not more than this.
MOST_DOCUMENTS = 64

log = logging.getLogger(__name__)


class Corpus:
    """The documents of a run, split in two.

    source: which files it is of, and as what they are read; a line. eval: None with
    config.data.eval_fraction=0. tokenizer: None for a store of tokens, unless
    config.data.tokenizer names a tokenizer.json. description: what makes the store this store, for
    a checkpoint to keep; plain JSON values.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        *,
        source: str,
        tokenizer: Tokenizer | None,
        train: TokenRows,
        eval: TokenRows | None,
        checks: StoreChecks | None = None,
    ):
        self.dataset, self.source, self.tokenizer = dataset, source, tokenizer
        self.train, self.eval, self._checks = train, eval, checks
        self.description: dict[str, Any] = {
            "num_documents": len(dataset.document_offsets) - 1,
            "num_tokens": int(dataset.document_offsets[-1]),
            "dtype": dataset.tokens.dtype.name,
            "fingerprint": _fingerprint(dataset),
        }

    def check_same(self, description: dict[str, Any]) -> None:
        """Raises ValueError naming what differs if a run's `description` is of other data."""
        differs = [
            f"{key} was {description.get(key)!r}, is {value!r}"
            for key, value in self.description.items()
            if description.get(key) != value
        ]
        if differs:
            raise ValueError(
                f"{self.dataset.name} is not the data this run began with: {'; '.join(differs)}. "
                "Resuming would repeat some documents and skip others: restore config.data.path "
                "and config.data.tokenizer, or start a new run"
            )

    def check_in_background(self, *, part: int, parts: int) -> None:
        """Compares a large store with its checksums; what is found, the next row says.

        part: this process, of so many of the run.
        """
        if self._checks is not None and self._checks.num_bytes > SMALL_BYTES:
            self._checks.begin(part=part, parts=parts)

    def unigram_entropy(self) -> float:
        """Nats per token of the held-out text under train token frequencies.

        What a model that ignores its context reaches: a loss that does not get below it has learned
        no context. Exact for up to 16 Mi train and 4 Mi held-out tokens, else estimated from that
        many, in evenly spaced blocks (the log says so). Add-one smoothing. Without an eval split
        train stands in.
        """
        train, held_out = self.train, self.eval or self.train
        counts = 1.0 + _count_ids(train, TRAIN_BLOCKS)
        held_out_counts = _count_ids(held_out, EVAL_BLOCKS)
        log_frequencies = np.log(counts / counts.sum())
        return float(-(held_out_counts * log_frequencies).sum() / held_out_counts.sum())

    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of the held-out text a token, over up to 256 Ki of them, for bits a byte.

        None without a tokenizer, or for tokens of which it makes no text.
        """
        if self.tokenizer is None:
            return None
        rows = self.eval or self.train
        blocks = [rows.stream[block] for block in _blocks(rows.num_tokens, BYTES_BLOCKS)]
        num_bytes = sum(len(self.tokenizer.decode(block).encode()) for block in blocks)
        return num_bytes / sum(map(len, blocks)) or None


def open_dataset(data_config: DataConfig, *, seed: int, seq_len: int, vocab_size: int) -> Corpus:
    """The Corpus that `data_config` describes; text is converted on the first use.

    Raises ValueError, before any device is touched, for data that is missing, damaged, too small
    for a row of seq_len tokens in either split, or that does not fit vocab_size.
    """
    format, files = find_files(data_config.path, data_config.format)
    tokenizer = None
    if format != "indexed" or data_config.tokenizer != "bytes":
        tokenizer = open_tokenizer(data_config.tokenizer)
        _check_vocabulary(tokenizer, data_config.tokenizer, vocab_size=vocab_size)
    is_cached = tokenizer is not None and format != "indexed"
    if tokenizer is None or format == "indexed":
        dataset = IndexedDataset(data_config.path)
    else:
        dataset = cached_store(
            data_config.path,
            tokenizer,
            format=format,
            text_field=data_config.text_field,
            cache_dir=data_config.cache_dir,
        )
    policy = data_config.on_corruption
    checks = checks_of(dataset, on_corruption=policy, is_cached=is_cached)
    most = data_config.max_documents_per_row or MOST_DOCUMENTS

    def rows(split: str, *, seed: int, shuffle: bool) -> TokenRows:
        return TokenRows(
            dataset,
            seq_len=seq_len,
            seed=seed,
            vocab_size=vocab_size,
            split=split,
            eval_fraction=data_config.eval_fraction,
            shuffle=shuffle,
            max_documents_per_row=most,
            checks=checks,
        )

    train = rows("train", seed=seed, shuffle=data_config.shuffle)
    held_out = None
    if data_config.eval_fraction:
        held_out = rows("eval", seed=EVAL_SEED, shuffle=True)
    if data_config.max_documents_per_row == 0:
        _bound_documents([train] if held_out is None else [train, held_out])
    source = describe_files(data_config.path, files, format=format)
    return Corpus(
        dataset, source=source, tokenizer=tokenizer, train=train, eval=held_out, checks=checks
    )


def _bound_documents(splits: list[TokenRows]) -> None:
    """Sets max_documents_per_row to what the data needs, a power of two up to MOST_DOCUMENTS.

    A few more documents then do not compile the update anew.
    """
    needed = max(split.most_documents() for split in splits)
    for split in splits:
        split.max_documents_per_row = min(1 << (needed - 1).bit_length(), MOST_DOCUMENTS)


class Rows(Protocol):
    """Where batches come from: a `TokenRows`."""

    def rows(self, indices: ArrayLike) -> Batch: ...


def batches(
    rows: Rows,
    *,
    batch_size: int,
    start: int = 0,
    local_rows: ArrayLike | None = None,
    prefetch: int = 4,
    threads: int = 2,
) -> Generator[tuple[int, Batch]]:
    """Yields (n, Batch) for n = start, start + 1, ... without end; close() it to stop its threads.

    Batch n holds samples [n * batch_size, (n + 1) * batch_size), across epochs.
    local_rows: int [num_local], sorted: which rows of the global batch this host reads; default:
        all. prefetch: batches read ahead, 0 for none; threads: how many read them. Neither changes
        a value.

    An exception in a reader is raised here, at the batch it belongs to; the iterator then ends.
    Raises ValueError for arguments out of range.
    """
    _check_least("batch_size", batch_size, least=1)
    _check_least("start", start, least=0)
    _check_least("config.data.prefetch", prefetch, least=0)
    _check_least("config.data.threads", threads, least=0)
    mine = np.arange(batch_size) if local_rows is None else np.asarray(local_rows)
    _check_local_rows(mine, batch_size)
    import grain  # imports jax, 2 s: scripts that only convert or count do without

    # A Grain element is a whole batch: 12 times as fast as one of a row (scripts/bench_data.py).
    source = grain.MapDataset.source(
        _BatchSource(rows, batch_size=batch_size, start=start, local_rows=mine)
    )
    # Grain wants a buffer no smaller than the threads that fill it, or logs a warning.
    options = grain.ReadOptions(num_threads=min(threads, prefetch), prefetch_buffer_size=prefetch)
    return _until_closed(iter(source.to_iter_dataset(options)))


class _BatchSource:
    """Grain's random access source protocol: item i is (start + i, that Batch)."""

    def __init__(self, rows: Rows, *, batch_size: int, start: int, local_rows: np.ndarray):
        self._rows, self._local_rows = rows, local_rows
        self._batch_size, self._start = batch_size, start

    def __len__(self) -> int:
        # Without end, as far as int64 sample numbers go.
        return (sys.maxsize - 1) // self._batch_size - self._start

    def __getitem__(self, index: int) -> tuple[int, Batch]:
        number = self._start + int(index)
        return number, self._rows.rows(number * self._batch_size + self._local_rows)


def _until_closed(iterator: Any) -> Generator[tuple[int, Batch]]:
    try:
        yield from iterator
    finally:
        iterator.close()


def _check_least(name: str, value: int, *, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")


def _check_local_rows(local_rows: np.ndarray, batch_size: int) -> None:
    is_sorted = local_rows.ndim == 1 and local_rows.size > 0 and (np.diff(local_rows) > 0).all()
    if not is_sorted or local_rows[0] < 0 or local_rows[-1] >= batch_size:
        raise ValueError(f"local_rows={local_rows} must rise within range(batch_size={batch_size})")


def _check_vocabulary(tokenizer: Tokenizer, name: str, *, vocab_size: int) -> None:
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"config.data.tokenizer={name!r} has {tokenizer.vocab_size} ids "
            f"but vocab_size={vocab_size}; "
            f"set config.model.vocab_size to {tokenizer.vocab_size} or more"
        )


def _fingerprint(dataset: IndexedDataset) -> str:
    """Hex, of the bounds of documents and of sampled tokens.

    Content, not file times: a copy on another machine is the same data. Reads at most 1 Mi tokens,
    whatever the store's size.
    """
    digest = hashlib.sha256()
    for array in (dataset.document_offsets, dataset.tokens):
        for block in _blocks(len(array), FINGERPRINT_BLOCKS):
            digest.update(np.ascontiguousarray(array[block]).tobytes())
    return digest.hexdigest()[:20]


def _blocks(length: int, num_blocks: int) -> list[slice]:
    """All of range(length) in one block, or `num_blocks` of BLOCK_TOKENS from first to last."""
    if length <= num_blocks * BLOCK_TOKENS:
        return [slice(0, length)]
    starts = np.linspace(0, length - BLOCK_TOKENS, num_blocks).astype(np.int64).tolist()
    return [slice(start, start + BLOCK_TOKENS) for start in starts]


def _count_ids(rows: TokenRows, num_blocks: int) -> np.ndarray:
    counts, num_counted = np.zeros(rows.vocab_size, np.int64), 0
    for block in _blocks(rows.num_tokens, num_blocks):
        ids = rows.stream[block]
        if not rows.check_ids(block):
            ids = ids[(ids >= 0) & (ids < rows.vocab_size)]
        found = np.bincount(ids)
        counts[: len(found)] += found
        num_counted += block.stop - block.start
    if num_counted < rows.num_tokens:
        log.info(
            "unigram entropy: counted %d of %d %s tokens", num_counted, rows.num_tokens, rows.split
        )
    return counts
