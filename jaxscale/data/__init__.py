"""Token stores, packing and the loader. Batch n is a pure function of (seed, n), whatever reads it.

    corpus = open_dataset(config.data, seed=0, seq_len=8192, vocab_size=128256)
    for n, batch in batches(corpus.train, batch_size=256, start=step):
        ...

batch.py        Batch: tokens, targets, segments, positions
indexed.py      the Megatron .bin/.idx store, reader and writer
block_sums.py   its checksums, in a .crc beside it
checks.py       who compares them, and what follows
text.py         text, JSONL and Parquet files -> documents
tokenizer.py    bytes, or a Hugging Face tokenizer.json
convert.py      documents -> store, in the cache or where asked
permutation.py  shuffling as arithmetic
rows.py         packing as arithmetic: sample number -> row
loader.py       the corpus of a run; Grain's threads reading ahead
"""

from jaxscale.data.batch import Batch
from jaxscale.data.indexed import IndexedDataset, IndexedWriter
from jaxscale.data.loader import Corpus, batches, open_dataset
from jaxscale.data.rows import TokenRows
from jaxscale.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, open_tokenizer

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "HuggingFaceTokenizer",
    "IndexedDataset",
    "IndexedWriter",
    "TokenRows",
    "Tokenizer",
    "batches",
    "open_dataset",
    "open_tokenizer",
]
