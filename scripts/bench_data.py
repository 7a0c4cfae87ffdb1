"""How fast the loader alone delivers packed tokens, without a model or an accelerator.

    python scripts/bench_data.py

Writes a synthetic store of web-like document lengths (log-normal, median 500 tokens, mean 900) in a
temporary folder, once as uint16 and once as int32, reads it through `jaxscale.data.batches`, and
prints one line and one JSON record for each. With --prefix it measures an existing store instead.
The store is in the page cache here: disks and network file systems are not part of the figure.
"""

import json

from absl import app, flags

from jaxscale.command_line import parse_flags_and_words
from jaxscale.perf import loader_speed

PREFIX = flags.DEFINE_string("prefix", "", "measure this .bin/.idx store instead of synthetic ones")
SEQ_LEN = flags.DEFINE_integer("seq_len", 8192, "tokens in a row")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "rows in a batch")
THREADS = flags.DEFINE_integer("threads", 2, "reader threads")
PREFETCH = flags.DEFINE_integer("prefetch", 4, "batches read ahead")
SECONDS = flags.DEFINE_float("seconds", 5.0, "how long to read")
NUM_TOKENS = flags.DEFINE_integer("num_tokens", 100_000_000, "tokens in a synthetic store")
VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 50_257, "ids in a synthetic store lie below this")


def main(argv: list[str]) -> None:
    del argv
    options = loader_speed.Options(
        seq_len=SEQ_LEN.value,
        batch_size=BATCH_SIZE.value,
        threads=THREADS.value,
        prefetch=PREFETCH.value,
        seconds=SECONDS.value,
        num_tokens=NUM_TOKENS.value,
        vocab_size=VOCAB_SIZE.value,
    )
    if PREFIX.value:
        records = iter([loader_speed.measure_store(PREFIX.value, options)])
    else:
        records = loader_speed.measure_synthetic(options)
    for record in records:
        print(loader_speed.describe(record))
        print(json.dumps(record))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags_and_words)
