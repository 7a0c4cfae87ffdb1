"""How fast the loader alone delivers packed tokens, without a model or an accelerator.

    python scripts/bench_data.py

Writes a synthetic store of web-like document lengths (log-normal, median 500 tokens, mean 900) in a
temporary folder, once as uint16 and once as int32, reads it through `jaxscale.data.batches`, and
prints one line and one JSON record for each. With --prefix it measures an existing store instead.
The store is in the page cache here: disks and network file systems are not part of the figure.
"""

import json
import os
import platform
import tempfile
import time
from importlib import metadata

import numpy as np
from absl import app, flags

from jaxscale.data import IndexedDataset, IndexedWriter, TokenRows, batches

PREFIX = flags.DEFINE_string("prefix", "", "measure this .bin/.idx store instead of synthetic ones")
SEQ_LEN = flags.DEFINE_integer("seq_len", 8192, "tokens in a row")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "rows in a batch")
THREADS = flags.DEFINE_integer("threads", 2, "reader threads")
PREFETCH = flags.DEFINE_integer("prefetch", 4, "batches read ahead")
SECONDS = flags.DEFINE_float("seconds", 5.0, "how long to read")
NUM_TOKENS = flags.DEFINE_integer("num_tokens", 100_000_000, "tokens in a synthetic store")
VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 50_257, "ids in a synthetic store lie below this")


def main(argv):
    del argv
    if PREFIX.value:
        report(IndexedDataset(PREFIX.value), vocab_size=2**31 - 1)
        return
    for dtype in (np.uint16, np.int32):
        with tempfile.TemporaryDirectory() as folder:
            write_synthetic(folder + "/tokens", dtype)
            report(IndexedDataset(folder + "/tokens"), VOCAB_SIZE.value)


def write_synthetic(prefix, dtype):
    """Random ids in documents whose lengths follow web text's long tail."""
    rng = np.random.default_rng(0)
    lengths = np.ceil(rng.lognormal(np.log(500), 1.08, NUM_TOKENS.value // 900)).astype(np.int64)
    block = rng.integers(0, VOCAB_SIZE.value, lengths.max(), dtype=dtype)
    with IndexedWriter(prefix, dtype) as writer:
        for length in lengths:
            writer.add(block[:length])


def report(dataset, vocab_size):
    """Measures and prints one store."""
    rows = TokenRows(dataset, seq_len=SEQ_LEN.value, seed=0, vocab_size=vocab_size)
    tokens_per_second = measure(rows)
    record = {
        "name": "data_loader",
        "tokens_per_second": round(tokens_per_second),
        "dtype": dataset.tokens.dtype.name,
        "seq_len": SEQ_LEN.value,
        "batch_size": BATCH_SIZE.value,
        "threads": THREADS.value,
        "prefetch": PREFETCH.value,
        "num_tokens": dataset.num_tokens,
        "mean_document_tokens": round(dataset.num_tokens / dataset.num_documents),
        "dropped_tokens": rows.dropped_tokens,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "grain": metadata.version("grain"),
    }
    print(
        f"{record['dtype']:>6} store: {tokens_per_second / 1e6:.1f} M packed tokens/s "
        f"({THREADS.value} threads on {record['cpu_cores']} cores)"
    )
    print(json.dumps(record))


def measure(rows):
    """Packed tokens a second out of `batches`, after a warm-up that fills the read-ahead."""
    stream = batches(
        rows, batch_size=BATCH_SIZE.value, threads=THREADS.value, prefetch=PREFETCH.value
    )
    num_tokens = 0
    try:
        for _ in range(PREFETCH.value + 2):
            next(stream)
        start = time.perf_counter()
        while time.perf_counter() - start < SECONDS.value:
            num_tokens += next(stream)[1].tokens.size
        return num_tokens / (time.perf_counter() - start)
    finally:
        stream.close()


if __name__ == "__main__":
    app.run(main)
