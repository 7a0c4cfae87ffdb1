"""Says how likely a trained model finds text: nats a token, perplexity and bits a byte.

    python scripts/evaluate.py --workdir=runs/x --data='corpus/*.txt'
    python scripts/evaluate.py --hf=DIR --data=corpus/ --by=folder --output=scores.json

--data: what config.data.path takes. Of every file, or of every folder below --data, and of all.
"""

import json
import logging
import sys
from pathlib import Path

from absl import app, flags

from jaxscale.command_line import EXIT_FAILED, EXIT_MISTAKE, parse_flags, tell
from jaxscale.config import DataFormat

WORKDIR = flags.DEFINE_string("workdir", None, "A run's folder, for its newest checkpoint.")
STEP = flags.DEFINE_integer("step", None, "Of the run's checkpoints this one.")
HF = flags.DEFINE_string("hf", None, "A model folder of Hugging Face.")
TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "'bytes', or a tokenizer.json or its folder, if not the model's own."
)
DATA = flags.DEFINE_string("data", None, "A file, folder or glob of text, or a token store.")
FORMAT = flags.DEFINE_enum(
    "format", "auto", [str(format) for format in DataFormat], "Of the files."
)
TEXT_FIELD = flags.DEFINE_string("text_field", "text", "The field that holds the text.")
BY = flags.DEFINE_enum("by", "file", ["file", "folder"], "What gets a line of its own.")
LENGTH = flags.DEFINE_integer("length", 2048, "Tokens that are judged together.", lower_bound=2)
OUTPUT = flags.DEFINE_string("output", None, "A JSON file to write the figures to.")
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of matrix products.")
flags.mark_flags_as_required(["data"])


def main(argv: list[str]) -> int:
    del argv
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    try:
        records = []
        for record in judged():
            records.append(record)
            print(line(record), flush=True)
        if OUTPUT.value:
            Path(OUTPUT.value).write_text(json.dumps(records, indent=2) + "\n")
        return 0
    except ValueError as error:
        return tell(error, EXIT_MISTAKE)
    except (OSError, RuntimeError) as error:
        return tell(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return 130


def judged():
    """The records, one after the other."""
    from jaxscale.config import Dtype
    from jaxscale.data.tokenizer import open_tokenizer
    from jaxscale.inference.engine import Engine
    from jaxscale.inference.perplexity import judge
    from jaxscale.inference.weights import open_weights
    from jaxscale.xla.cache import enable_compilation_cache
    from jaxscale.xla.environment import set_environment

    set_environment()
    weights = open_weights(workdir=WORKDIR.value, hf=HF.value, step=STEP.value)
    tokenizer = open_tokenizer(TOKENIZER.value or weights.tokenizer)
    enable_compilation_cache()
    return judge(
        Engine(weights, dtype=Dtype(DTYPE.value)),
        tokenizer,
        path=str(DATA.value),
        format=FORMAT.value,
        text_field=TEXT_FIELD.value,
        by=BY.value,
        length=min(LENGTH.value, weights.model.max_seq_len or LENGTH.value),
    )


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
