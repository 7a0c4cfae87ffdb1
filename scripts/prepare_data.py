"""Tokenises text once, into a .bin/.idx store that jaxscale and Megatron read.

    python scripts/prepare_data.py --input='corpus/*.jsonl.gz' --output=data/corpus \\
        --tokenizer=llama3/tokenizer.json
    python scripts/train.py --config configs/llama3_8b.py --workdir runs/x \\
        --config.data.path=data/corpus

    python scripts/prepare_data.py --input=book.txt --output=data/book --train_tokenizer=32768

trains a byte-level BPE on the text first, and leaves it in data/book-tokenizer.

Training on text directly does the same on first use, into a cache; this is for text that many runs
share, and for machines that should not keep it twice. Needs twice the store's size while it runs.
"""

import logging
import os
import sys
import tempfile
from pathlib import Path

from absl import app, flags

from jaxscale.command_line import exit_code_of, parse_flags_and_words
from jaxscale.config import DataFormat
from jaxscale.data import indexed
from jaxscale.data.convert import convert, train_tokenizer
from jaxscale.data.text import describe_files, find_files
from jaxscale.data.tokenizer import open_tokenizer
from jaxscale.files import telling, write_atomically

FORMATS = [format.value for format in DataFormat if format != DataFormat.INDEXED]

INPUT = flags.DEFINE_string(
    "input",
    None,
    "text, JSONL, JSON, CSV, Parquet or Arrow: a file, folder or glob; a folder that `datasets` "
    "saved; or 'python-stdlib'",
)
OUTPUT = flags.DEFINE_string(
    "output", None, "prefix of the store: OUTPUT.bin and OUTPUT.idx are written"
)
TOKENIZER = flags.DEFINE_string(
    "tokenizer", "bytes", "'bytes', or the path of a Hugging Face tokenizer.json"
)
TRAIN_TOKENIZER = flags.DEFINE_integer(
    "train_tokenizer",
    None,
    "train a byte-level BPE of so many tokens on the text, into OUTPUT-tokenizer, and use it",
    lower_bound=257,
    upper_bound=2**20,
)
FORMAT = flags.DEFINE_enum("format", "auto", FORMATS, "auto goes by the files' suffixes")
TEXT_FIELD = flags.DEFINE_string("text_field", "text", "the field or column that holds the text")
OVERWRITE = flags.DEFINE_bool("overwrite", False, "replace an existing store")
flags.mark_flags_as_required(["input", "output"])

# What jaxscale calls them, where it speaks of a run's settings.
FLAG_OF_SETTING = {
    "config.data.path": "--input",
    "config.data.tokenizer": "--tokenizer",
    "config.data.format": "--format",
    "config.data.text_field": "--text_field",
}


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    logging.getLogger("jaxscale").setLevel(logging.INFO)
    return exit_code_of(lambda: prepare(argv[1:]), flag_of=FLAG_OF_SETTING)


def prepare(words: list[str]) -> None:
    if words:
        raise ValueError(
            f"{words[0]!r} is no flag; write --key=value, and quote globs, so that the shell does "
            "not expand them"
        )
    path, prefix = str(INPUT.value), checked_prefix(str(OUTPUT.value))
    format, files = find_files(path, FORMAT.value)
    print(describe_files(path, files, format=format), file=sys.stderr)
    text = dict(format=format, text_field=TEXT_FIELD.value)
    name = str(TOKENIZER.value)
    with (
        telling(
            f"--output={prefix} cannot be written",
            "make room for twice the store's size, or choose another --output",
        ),
        tempfile.TemporaryDirectory() as folder,
    ):
        if TRAIN_TOKENIZER.value:
            name = folder
            train_tokenizer(path, Path(folder), vocab_size=TRAIN_TOKENIZER.value, **text)
        tokenizer = open_tokenizer(name)
        store = convert(path, prefix, tokenizer=tokenizer, **text)
        if TRAIN_TOKENIZER.value:  # now, so that no old store ever has another tokenizer beside it
            name = keep_tokenizer(folder, prefix)
    print(
        f"{prefix}: {len(store):,} documents, {store.num_tokens:,} tokens\n"
        f"train with --config.data.path={prefix} --config.data.tokenizer={name} and "
        f"--config.model.vocab_size at least {tokenizer.vocab_size}",
        file=sys.stderr,
    )


def keep_tokenizer(folder: str, prefix: str) -> str:
    """The folder where it is kept."""
    kept = tokenizer_folder(prefix)
    kept.mkdir(exist_ok=True)
    for file in Path(folder).iterdir():
        write_atomically(kept / file.name, file.read_bytes())
    return str(kept)


def tokenizer_folder(prefix: str) -> Path:
    return Path(f"{prefix}-tokenizer")


def checked_prefix(output: str) -> str:
    prefix = indexed.strip_suffix(output)
    if os.path.basename(prefix) in ("", ".", ".."):
        raise ValueError(f"--output={output!r} names no store; give a prefix such as data/corpus")
    if indexed.is_store(prefix) and not OVERWRITE.value:
        raise ValueError(
            f"{prefix}.bin or .idx exists; pass --overwrite to replace it, or another --output"
        )
    if TRAIN_TOKENIZER.value and flags.FLAGS["tokenizer"].present:
        raise ValueError("--tokenizer and --train_tokenizer exclude each other; leave one out")
    kept = tokenizer_folder(prefix)
    if TRAIN_TOKENIZER.value and (kept.is_file() or (kept.exists() and not OVERWRITE.value)):
        raise ValueError(
            f"{kept} exists; pass --overwrite to replace a tokenizer there, or another --output"
        )
    return prefix


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags_and_words)
