"""How fast the loader alone delivers packed tokens, without a model or an accelerator.

The store is in the page cache here: disks and network file systems are not part of the figure.
"""

import dataclasses
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata

import numpy as np

from jaxscale.data import IndexedDataset, IndexedWriter, TokenRows, batches
from jaxscale.perf.records import Record

# Of synthetic documents: lengths as in web text, log-normal with a median of 500 tokens.
MEDIAN_TOKENS, SIGMA, MEAN_TOKENS = 500, 1.08, 900


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """num_tokens and vocab_size: of a synthetic store. prefetch: batches read ahead."""

    seq_len: int
    batch_size: int
    threads: int
    prefetch: int
    seconds: float
    num_tokens: int
    vocab_size: int


def measure_synthetic(options: Options) -> Iterator[Record]:
    """The records of two synthetic stores, uint16 and int32, in a temporary folder."""
    for dtype in (np.uint16, np.int32):
        with tempfile.TemporaryDirectory() as folder:
            prefix = f"{folder}/tokens"
            _write_synthetic(prefix, dtype, options=options)
            yield measure(IndexedDataset(prefix), options, vocab_size=options.vocab_size)


def measure_store(prefix: str, options: Options) -> Record:
    """The record of a store that is there."""
    return measure(IndexedDataset(prefix), options, vocab_size=2**31 - 1)


def measure(dataset: IndexedDataset, options: Options, *, vocab_size: int) -> Record:
    """The record of one store."""
    rows = TokenRows(dataset, seq_len=options.seq_len, seed=0, vocab_size=vocab_size)
    return {
        "name": "data_loader",
        "tokens_per_second": round(_tokens_per_second(rows, options)),
        "dtype": dataset.tokens.dtype.name,
        "seq_len": options.seq_len,
        "batch_size": options.batch_size,
        "threads": options.threads,
        "prefetch": options.prefetch,
        "num_tokens": dataset.num_tokens,
        "mean_document_tokens": round(dataset.num_tokens / dataset.num_documents),
        "dropped_tokens": rows.dropped_tokens,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "grain": metadata.version("grain"),
    }


def describe(record: Record) -> str:
    """The record in a line a person reads."""
    return (
        f"{record['dtype']:>6} store: {record['tokens_per_second'] / 1e6:.1f} M packed tokens/s "
        f"({record['threads']} threads on {record['cpu_cores']} cores)"
    )


def _write_synthetic(prefix: str, dtype: type[np.integer], *, options: Options) -> None:
    """Random ids in documents whose lengths have web text's long tail."""
    rng = np.random.default_rng(0)
    num_documents = options.num_tokens // MEAN_TOKENS
    lengths = np.ceil(rng.lognormal(np.log(MEDIAN_TOKENS), SIGMA, num_documents)).astype(np.int64)
    block = rng.integers(0, options.vocab_size, lengths.max(), dtype=dtype)
    with IndexedWriter(prefix, dtype) as writer:
        for length in lengths:
            writer.add(block[:length])


def _tokens_per_second(rows: TokenRows, options: Options) -> float:
    """Out of `batches`, after a warm-up that fills the read-ahead."""
    stream = batches(
        rows,
        batch_size=options.batch_size,
        threads=options.threads,
        prefetch=options.prefetch,
    )
    num_tokens = 0
    try:
        for _ in range(options.prefetch + 2):
            next(stream)
        start = time.perf_counter()
        while time.perf_counter() - start < options.seconds:
            num_tokens += next(stream)[1].tokens.size
        return num_tokens / (time.perf_counter() - start)
    finally:
        stream.close()
