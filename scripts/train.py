"""Trains a language model: python scripts/train.py --config configs/tiny.py --workdir runs/tiny [--config.steps=500 ...]"""

import logging
import shlex
import sys
import traceback

from absl import app, flags
from ml_collections import config_flags

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "A file with get_config(arg) -> Config; any field can be overridden."
)
WORKDIR = flags.DEFINE_string("workdir", None, "Where config.json, metrics, checkpoints and TensorBoard files go.")
flags.mark_flags_as_required(["config", "workdir"])

# A mistake of the user's: told in a line, without a traceback.
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130


def main(argv: list[str]) -> int:
    del argv
    from jaxscale import config as run_config
    from jaxscale import distributed, xla

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
    try:
        config = run_config.from_config_dict(CONFIG.value)
        run_config.validate(config)
        xla.set_environment()
        distributed.initialize()
        xla.enable_compilation_cache()
        logging.getLogger("jaxscale").setLevel(logging.INFO if distributed.is_lead() else logging.ERROR)
        from jaxscale.train.loop import train

        outcome = train(config, str(WORKDIR.value), command=resume_command())
    except ValueError as error:
        if not raised_here(error):
            raise
        print(f"\nerror: {error}", file=sys.stderr)
        return EXIT_MISTAKE
    return EXIT_INTERRUPTED if outcome.interrupted else 0


def raised_here(error: BaseException) -> bool:
    """True if jaxscale itself raised it: a message for the user, not a fault deep in a library."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return frames[-1][0].f_globals.get("__name__", "").split(".")[0] == "jaxscale"


def resume_command() -> str:
    """This command line without its number of steps, which continuing may raise."""
    return "python " + shlex.join(arg for arg in sys.argv if not arg.startswith("--config.steps="))


if __name__ == "__main__":
    app.run(main)
