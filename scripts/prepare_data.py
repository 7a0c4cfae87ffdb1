"""Tokenises text once, into a .bin/.idx store that jaxscale and Megatron read.

    python scripts/prepare_data.py --input='corpus/*.jsonl.gz' --output=data/corpus \\
        --tokenizer=llama3/tokenizer.json
    python scripts/train.py --config configs/llama3_8b.py --workdir runs/x \\
        --config.data.path=data/corpus

Training on text directly does the same on first use, into a cache; this is for text that many runs
share, and for machines that should not keep it twice. Needs twice the store's size while it runs.
"""

import time

from absl import app, flags, logging

from jaxscale.data import indexed
from jaxscale.data.convert import convert
from jaxscale.data.tokenizer import open_tokenizer

FORMATS = ("auto", "text", "jsonl", "json", "csv", "parquet")

INPUT = flags.DEFINE_string(
    "input", None, "text, JSONL, JSON, CSV or Parquet: a file, folder or glob; or 'python-stdlib'"
)
OUTPUT = flags.DEFINE_string(
    "output", None, "prefix of the store: OUTPUT.bin and OUTPUT.idx are written"
)
TOKENIZER = flags.DEFINE_string(
    "tokenizer", "bytes", "'bytes', or the path of a Hugging Face tokenizer.json"
)
FORMAT = flags.DEFINE_enum("format", "auto", FORMATS, "auto goes by the files' suffixes")
TEXT_FIELD = flags.DEFINE_string("text_field", "text", "the field or column that holds the text")
OVERWRITE = flags.DEFINE_bool("overwrite", False, "replace an existing store")
flags.mark_flags_as_required(["input", "output"])


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(
            f"unexpected {argv[1:]}: quote globs, so that the shell does not expand them"
        )
    prefix = indexed.strip_suffix(str(OUTPUT.value))
    if indexed.is_store(prefix) and not OVERWRITE.value:
        raise app.UsageError(
            f"{prefix}.bin or .idx exists; pass --overwrite to replace it, or another --output"
        )
    start = time.monotonic()
    try:
        tokenizer = open_tokenizer(TOKENIZER.value)
        store = convert(
            str(INPUT.value),
            prefix,
            tokenizer=tokenizer,
            format=FORMAT.value,
            text_field=TEXT_FIELD.value,
        )
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    seconds = time.monotonic() - start
    logging.info("%d documents, %d tokens in %.1f s", len(store), store.num_tokens, seconds)
    logging.info(
        "train with --config.data.path=%s, vocab_size at least %d", prefix, tokenizer.vocab_size
    )


if __name__ == "__main__":
    app.run(main)
