"""Says how likely a trained model finds text: nats a token, perplexity and bits a byte.

    python scripts/evaluate.py --workdir=runs/x --data='corpus/*.txt'
    python scripts/evaluate.py --hf=DIR --data=corpus/ --by=folder --output=scores.json

--data: what config.data.path takes. Of every file, or of every folder below --data, and of all.
"""

import json
import logging
import sys

from absl import app, flags

from jaxscale.command_line import exit_code_of, file_of, parse_flags
from jaxscale.config import DataFormat
from jaxscale.inference.opening import FLAG_OF_SETTING, ModelFlags

MODEL = ModelFlags()
DATA = flags.DEFINE_string("data", None, "A file, folder or glob of text, or a token store.")
FORMAT = flags.DEFINE_enum(
    "format", "auto", [str(format) for format in DataFormat], "Of the files."
)
TEXT_FIELD = flags.DEFINE_string("text_field", "text", "The field that holds the text.")
BY = flags.DEFINE_enum("by", "file", ["file", "folder"], "What gets a line of its own.")
LENGTH = flags.DEFINE_integer("length", 2048, "Tokens that are judged together.", lower_bound=2)
OUTPUT = flags.DEFINE_string("output", None, "A JSON file to write the figures to.")
flags.mark_flags_as_required(["data"])


def main(argv: list[str]) -> int:
    del argv
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    return exit_code_of(
        run,
        flag_of=FLAG_OF_SETTING
        | {
            "config.data.path": "--data",
            "config.data.format": "--format",
            "config.data.text_field": "--text_field",
        },
    )


def run() -> None:
    from jaxscale.data.text import find_files
    from jaxscale.inference.perplexity import judge

    find_files(str(DATA.value), FORMAT.value)  # before the weights are read, which takes minutes
    output = file_of("output", OUTPUT.value)
    engine, tokenizer = MODEL.open()
    records = []
    for record in judge(
        engine,
        tokenizer,
        path=str(DATA.value),
        format=FORMAT.value,
        text_field=TEXT_FIELD.value,
        by=BY.value,
        length=min(LENGTH.value, engine.model.max_seq_len or LENGTH.value),
    ):
        records.append(record)
        print(line(record), flush=True)
    output.write_text(json.dumps(records, indent=2) + "\n")


def line(record) -> str:
    bits = record["bits_per_byte"]
    return (
        f"{record['name']}: {record['nats_per_token']:.4f} nats/token, "
        f"perplexity {record['perplexity']:,.2f}, "
        f"{'' if bits is None else f'{bits:.4f} bits/byte, '}"
        f"{record['num_tokens']:,} tokens in {record['num_documents']:,} documents"
    )


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
