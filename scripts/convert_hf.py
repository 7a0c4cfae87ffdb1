"""Makes a run of a model of Hugging Face, or a model of Hugging Face of a run.

    python scripts/convert_hf.py import --hf=DIR --workdir=runs/x --config configs/tiny.py \\
        [--config.x=y ...]
    python scripts/convert_hf.py export --workdir=runs/x --output=DIR [--dtype=fp8]

import: the config, with the model and the weights of DIR, as step 0 of a run that scripts/train.py
continues. (`train.py --config.init_from=hf:DIR --config.model=hf:DIR` does the same in one go.)
export: the newest checkpoint or --step, with config.json and the tokenizer beside it, as
`transformers` and vLLM load it. It needs no GPU.
"""

import logging
import re
import sys
from pathlib import Path

from absl import app, flags

from jaxscale.command_line import exit_code_of, parse_own_flags, read_config

WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder.")
HF = flags.DEFINE_string("hf", None, "import: the model folder to read.")
OUTPUT = flags.DEFINE_string("output", None, "export: the model folder to write; must not exist.")
STEP = flags.DEFINE_integer("step", None, "export: of the run's checkpoints this one.")
DTYPE = flags.DEFINE_enum(
    "dtype",
    "bfloat16",
    ["bfloat16", "float16", "float32", "fp8"],
    "export: of the weights; fp8: matrices of layers in 8 bits with a scale for each 128 x 128.",
)


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
    logging.getLogger("jaxscale").setLevel(logging.INFO)
    return exit_code_of(lambda: run(argv[1:]))


def run(words: list[str]) -> None:
    verb, *settings = words or [""]
    if verb == "import":
        import_(settings)
    elif verb == "export" and not settings:
        export()
    else:
        raise ValueError(f"{' '.join(words)!r}: write import or export first; see --help")


def import_(settings: list[str]) -> None:
    source = f"hf:{named('hf', HF.value)}"
    workdir = Path(named("workdir", WORKDIR.value)).expanduser()
    # In front of settings of the model's keys, which would be overwritten.
    is_key = [re.match(r"--?(no)?config\.", word) is not None for word in settings]
    first = [*is_key, True].index(True)
    settings[first:first] = [f"--config.model={source}", f"--config.init_from={source}"]
    config = read_config(settings)
    from jaxscale.train.exchange import import_model
    from jaxscale.xla.environment import set_environment

    set_environment()
    import_model(config, workdir)
    print(f"step 0 of a run is in {workdir}")


def export() -> None:
    workdir, output = named("workdir", WORKDIR.value), Path(named("output", OUTPUT.value))
    import jax

    jax.config.update("jax_platforms", "cpu")
    from jaxscale.data.tokenizer import open_tokenizer
    from jaxscale.inference.export import export_model
    from jaxscale.inference.weights import open_weights

    weights = open_weights(workdir=workdir, hf=None, step=STEP.value)
    tokenizer = open_tokenizer(weights.tokenizer)
    export_model(weights, output.expanduser(), dtype=DTYPE.value, tokenizer=tokenizer)
    print(f"{output}: {', '.join(sorted(path.name for path in output.expanduser().iterdir()))}")
    if weights.tokenizer == "bytes":
        print("its tokens are bytes (256 ends a text), for which Hugging Face has no tokenizer")


def named(flag: str, value: str | None) -> str:
    if not value:
        raise ValueError(f"--{flag} is missing; see --help")
    return value


if __name__ == "__main__":
    app.run(main, flags_parser=parse_own_flags)
