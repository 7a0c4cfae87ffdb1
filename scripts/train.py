"""Trains a language model, as a config file says.

python scripts/train.py --config configs/tiny.py --workdir runs/tiny [--config.steps=500 ...]
"""

import logging
import sys
import traceback

from absl import app, flags

from jaxscale import config as run_config
from jaxscale.command_line import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_MISTAKE,
    command_to_repeat,
    define_config,
    folder_of,
    parse_flags,
    steady_output,
    tell,
)

CONFIG = define_config()
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where config.json, metrics, checkpoints and TensorBoard files go."
)
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> int:
    del argv
    steady_output()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
    try:
        run_config.validate(CONFIG.value)
        workdir = folder_of("workdir", WORKDIR.value)
        join_processes()
        from jaxscale.train.loop import train

        outcome = train(CONFIG.value, workdir, command=command_to_repeat())
        return EXIT_INTERRUPTED if outcome.interrupted else 0
    except (ValueError, RuntimeError) as error:
        if not raised_here(error):
            raise
        return tell(error, EXIT_MISTAKE if isinstance(error, ValueError) else EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def join_processes() -> None:
    """Sets what must be set before JAX starts, and finds the other processes of the run."""
    import jax

    from jaxscale import distributed
    from jaxscale.xla.environment import set_environment

    set_environment()
    distributed.initialize()
    # Asking who leads touches the devices, so a process that is alone is not asked.
    is_lead = not jax.distributed.is_initialized() or distributed.is_lead()
    logging.getLogger("jaxscale").setLevel(logging.INFO if is_lead else logging.ERROR)


def raised_here(error: BaseException) -> bool:
    """True if jaxscale itself raised it: a message for the user, not a fault deep in a library."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return frames[-1][0].f_globals.get("__name__", "").split(".")[0] == "jaxscale"


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
