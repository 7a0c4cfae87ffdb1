"""Records the kernels that XLA chooses for a config's step by timing them on this machine: what jaxscale/xla/targets ships.

    python scripts/record_kernels.py --config configs/llama3_8b.py [--config.x=y ...] [--output=FILE]

Compiles the step with nothing kept from before (half a minute for Llama 3 8B on an H200), and adds what was chosen to FILE:
the one of this card and jaxlib, which runs on such a card load from then on, unless another is named. What FILE had for
other products stays, so several configs share it. A product is known by its operands' shapes, layouts and dtypes: fewer
layers or more GPUs have the same ones as long as the tokens a GPU are the same.
"""

import dataclasses
import logging
import re
import sys
import tempfile
from pathlib import Path

import jax
from absl import app, flags

from jaxscale import config as run_config
from jaxscale.checkpoint.checksums import write_atomically
from jaxscale.command_line import EXIT_MISTAKE, parse_own_flags, read_config, tell
from jaxscale.compile import fit
from jaxscale.config import Config
from jaxscale.data.loader import open_dataset
from jaxscale.perf import bench
from jaxscale.step.state import plan_for_data
from jaxscale.xla import options as xla

OUTPUT = flags.DEFINE_string(
    "output", None, "The file to add to; default: of this card, in jaxscale/xla/targets."
)


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    try:
        xla.set_environment()
        config = read_config(argv[1:])
        output = output_of(bench.gpu_names())
        old = entries(output.read_text()) if output.exists() else {}
        new = entries(chosen_anew(config))
    except (ValueError, OSError) as error:
        return tell(error, EXIT_MISTAKE)
    # In the order of their keys, as XLA writes them.
    merged = sorted((old | new).items())
    write_atomically(output, "".join(entry for _, entry in merged).encode())
    print(f"{output}: {len(new)} kernels recorded, {len(merged) - len(new)} kept from before")
    return 0


def output_of(gpus: list[str]) -> Path:
    """gpus: as nvidia-smi names them. Raises ValueError where XLA times nothing, or there is nowhere to write."""
    if not gpus:
        raise ValueError(
            "XLA times kernels on GPUs only, and there is none here: run this on the card to record"
        )
    output = Path(OUTPUT.value) if OUTPUT.value else xla.kernels_path(gpus[0])
    if output is None:
        raise ValueError(
            f"{gpus[0]!r} has no short name such as H200: name the file, --output=FILE"
        )
    if not output.parent.is_dir():
        raise ValueError(f"--output={output}: there is no folder {output.parent}; make it first")
    return output


def chosen_anew(config: Config) -> str:
    """What XLA writes down when it compiles the step with no earlier choices at hand. Raises ValueError."""
    corpus = open_dataset(
        config.data, seed=config.seed, seq_len=config.seq_len, vocab_size=config.model.vocab_size
    )
    jax.config.update("jax_enable_compilation_cache", False)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "kernels.txtpb"
        options = (
            "xla_gpu_load_autotune_results_from=",
            f"xla_gpu_dump_autotune_results_to={written}",
        )
        config = dataclasses.replace(config, xla_options=(*config.xla_options, *options))
        fit.compile_plan(
            plan_for_data(config, corpus, run_config.validate_on(config, jax.device_count()))
        )
        if not written.exists():
            raise ValueError(
                "XLA wrote no choices: config.xla_options or XLA_FLAGS turn its autotuning off"
            )
        return written.read_text()


def entries(text: str) -> dict[str, str]:
    """Of an AutotuneResults proto in text format: key to the whole entry."""
    parts = re.findall(r"^entries \{$.*?^\}\n", text, re.MULTILINE | re.DOTALL)
    return {part.partition("  value {")[0]: part for part in parts}


if __name__ == "__main__":
    app.run(main, flags_parser=parse_own_flags)
