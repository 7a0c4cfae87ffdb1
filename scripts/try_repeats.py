"""Whether a config's updates give the same bits each time on this host.

    python scripts/try_repeats.py --config configs/llama3_8b.py --config.deterministic=True \\
        [--config.x=y ...] [--times=4] [--updates=4]

Compiles the update once, runs the first --updates of them --times times from the same start and on
the same batches, and compares losses, gradient norms and every leaf of the state on every device,
bit for bit. Prints a line for each update, up to one that differs; then the exit code is 1. What
differs on GPUs without config.deterministic is meant to (docs/reliability.md).
"""

import jax
from absl import app, flags

from jaxscale.command_line import exit_code_of, parse_own_flags, read_config
from jaxscale.perf import repeats
from jaxscale.perf.processes import FailedError
from jaxscale.perf.progress import show_progress
from jaxscale.xla.environment import set_environment

TIMES = flags.DEFINE_integer("times", 4, "How often they are run.", lower_bound=2)
UPDATES = flags.DEFINE_integer("updates", 4, "Updates from one start.", lower_bound=1)


def main(argv: list[str]) -> int:
    show_progress()
    return exit_code_of(lambda: repeat(argv[1:]))


def repeat(words: list[str]) -> None:
    """Raises FailedError for other bits."""
    set_environment()
    config = read_config(words)
    found = repeats.repeat(config, times=TIMES.value, num_updates=UPDATES.value)
    print(*found, sep="\n")
    version = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    where = f"{TIMES.value} times on {jax.device_count()} x {version}"
    if not found[-1].is_same:
        hint = "" if config.deterministic else "; GPUs need config.deterministic=True for the same"
        raise FailedError(f"other bits, {where}{hint}")
    print(f"the same bits, {where}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_own_flags)
