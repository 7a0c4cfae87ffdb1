"""Records what XLA chooses for a config's step by timing it on this machine: its autotune entries.

    python scripts/record_kernels.py --config configs/llama3_8b.py [--config.x=y ...] [--output=F]

Compiles the step with nothing kept from before (half a minute for Llama 3 8B on an H200), and adds
the entries to the file F: the one of this card and jaxlib in jaxscale/xla/targets, which runs on
such a card load from then on, unless another is named. What the file had for other products stays,
so several configs share it (jaxscale/perf/autotune.py says what a product is known by).
"""

from absl import app, flags

from jaxscale.command_line import EXIT_MISTAKE, parse_own_flags, read_config, tell
from jaxscale.perf import autotune
from jaxscale.perf.gpus import gpu_names
from jaxscale.perf.progress import show_progress
from jaxscale.xla.environment import set_environment

OUTPUT = flags.DEFINE_string(
    "output", None, "The file to add to; default: of this card, in jaxscale/xla/targets."
)


def main(argv: list[str]) -> int:
    show_progress()
    try:
        set_environment()
        config = read_config(argv[1:])
        done = autotune.record(config, autotune.path_for(gpu_names(), asked=OUTPUT.value))
    except (ValueError, OSError) as error:
        return tell(error, EXIT_MISTAKE)
    print(
        f"{done.path}: {done.num_recorded} autotune entries recorded, "
        f"{done.num_kept} kept from before"
    )
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=parse_own_flags)
