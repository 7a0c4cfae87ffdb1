"""Continues prompts with a trained model.

    python scripts/generate.py --workdir=runs/x --prompt="Once upon a time"
    python scripts/generate.py --hf=DIR --prompt=A --prompt=B --temperature=0 --max_tokens=50
    python scripts/generate.py --hf=DIR --serve=8000

--workdir: of a run, its newest checkpoint or --step. --hf: a model folder of Hugging Face. Without
--prompt, prompts are read from standard input, one a line. One text is written as it comes; of
several each is written when all are done. --serve answers HTTP at 127.0.0.1:PORT/v1/completions,
one request at a time: to try a checkpoint, and not for production; vLLM is for that, with what
convert_hf.py exports.
"""

import logging
import sys
import time

from absl import app, flags

from jaxscale.command_line import exit_code_of, parse_flags
from jaxscale.inference.opening import FLAG_OF_SETTING, ModelFlags

MODEL = ModelFlags()
PROMPT = flags.DEFINE_multi_string("prompt", None, "What to continue; may be repeated.")
MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 200, "Tokens of each continuation, at most.", lower_bound=1
)
TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0: always the likeliest token.")
TOP_K = flags.DEFINE_integer("top_k", 0, "Draws among so many likeliest tokens; 0: among all.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Draws among the fewest that hold this probability.")
SEED = flags.DEFINE_integer("seed", 0, "The same seed and prompts give the same texts.")
STOP = flags.DEFINE_multi_string("stop", [], "Ends a text before this; may be repeated.")
SERVE = flags.DEFINE_integer(
    "serve", None, "A port to answer HTTP at.", lower_bound=1, upper_bound=65535
)


def main(argv: list[str]) -> int:
    del argv
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    return exit_code_of(run, flag_of=FLAG_OF_SETTING)


def run() -> None:
    from jaxscale.inference.sampling import Sampling

    sampling = Sampling(
        temperature=TEMPERATURE.value, top_k=TOP_K.value, top_p=TOP_P.value, seed=SEED.value
    )
    sampling.validate()
    if SERVE.value:
        from jaxscale.inference.serve import open_server

        engine, tokenizer = MODEL.open()
        with open_server(engine, tokenizer, name=MODEL.name, port=SERVE.value) as server:
            print(f"answering at {server.address}/v1/completions; Ctrl-C ends it", flush=True)
            server.serve_forever()
        return
    prompts = PROMPT.value or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise ValueError("there is no prompt: write --prompt=..., or lines to standard input")
    engine, tokenizer = MODEL.open()
    write(engine, tokenizer, prompts=prompts, sampling=sampling)


def write(engine, tokenizer, *, prompts: list[str], sampling) -> None:
    """The texts to standard output, and how long it took to standard error."""
    from jaxscale.inference.text import Continuations

    began, pieces_of = time.perf_counter(), [[prompt] for prompt in prompts]
    is_alone = len(prompts) == 1
    show(prompts[0] if is_alone else "")
    for pieces in Continuations(
        engine,
        tokenizer,
        prompts,
        sampling=sampling,
        max_tokens=MAX_TOKENS.value,
        stop=STOP.value,
    ):
        for text, piece in zip(pieces_of, pieces, strict=True):
            text.append(piece)
        show(pieces[0] if is_alone else "")
    show("\n" if is_alone else "\n---\n".join("".join(text) for text in pieces_of) + "\n")
    seconds = time.perf_counter() - began
    print(f"{len(prompts)} texts in {seconds:.1f} s, compilation included", file=sys.stderr)


def show(text: str) -> None:
    """Characters that the terminal does not have are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
