"""Trains a language model: python scripts/train.py --config configs/tiny.py --workdir runs/tiny [--config.steps=500 ...]"""

import logging
import re
import shlex
import sys
import traceback
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

from jaxscale import config as run_config

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "A file with get_config(arg) -> Config; any field can be overridden."
)
WORKDIR = flags.DEFINE_string("workdir", None, "Where config.json, metrics, checkpoints and TensorBoard files go.")
flags.mark_flags_as_required(["config", "workdir"])

# A mistake of the user's, and a run that failed by itself: told in a line, without a traceback.
EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130


class ConfigFile(flags.ArgumentParser):
    """Reads the config file, and checks the keys on the command line: ml_collections answers these with tracebacks."""

    def __init__(self, parser: flags.ArgumentParser):
        self._parser = parser

    def parse(self, path: str) -> run_config.Config:
        if not Path(path.partition(":")[0]).is_file():
            raise ValueError("no such file; the ones that come with jaxscale are in configs/")
        try:
            config = self._parser.parse(path)
        except ValueError as error:  # its message holds a traceback
            raise ValueError(str(error.__context__)) from None
        config = run_config.from_config_dict(config)
        for argument in sys.argv:
            if override := re.match(r"--?(?:no)?config\.([\w.]+)", argument):
                run_config.check_key(config, override[1])
        return config


class IntegerOrNone(flags.IntegerParser):
    """`--config.model.window=none`; where None is not allowed the typed check says so."""

    def parse(self, argument):
        return None if argument == "none" else super().parse(argument)


flags.FLAGS["config"].parser = ConfigFile(flags.FLAGS["config"].parser)
config_flags.register_flag_parser_for_type(int, IntegerOrNone())


def parse_flags(argv: list[str]) -> list[str]:
    try:
        arguments = flags.FLAGS(argv)
        if len(arguments) > 1:
            raise ValueError(f"{arguments[1]!r} is no flag; write --key=value")
    except (flags.Error, ValueError) as error:
        sys.exit(tell(error, EXIT_MISTAKE))
    return arguments


def main(argv: list[str]) -> int:
    del argv
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
    try:
        run_config.validate(CONFIG.value)
        return EXIT_INTERRUPTED if run(CONFIG.value) else 0
    except (ValueError, RuntimeError) as error:
        if not raised_here(error):
            raise
        return tell(error, EXIT_MISTAKE if isinstance(error, ValueError) else EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def run(config: run_config.Config) -> bool:
    """True if it was interrupted."""
    import jax

    from jaxscale import distributed, xla

    xla.set_environment()
    distributed.initialize()
    # Asking who leads touches the devices, so a process that is alone is not asked.
    is_lead = not jax.distributed.is_initialized() or distributed.is_lead()
    logging.getLogger("jaxscale").setLevel(logging.INFO if is_lead else logging.ERROR)
    from jaxscale.train.loop import train

    return train(config, str(WORKDIR.value), command=shlex.join([interpreter(), *sys.argv])).interrupted


def interpreter() -> str:
    """As a user would type it: a fresh Debian has no `python`, and the one of `make` is in .venv."""
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def tell(error: Exception, code: int) -> int:
    print(f"\nerror: {error}", file=sys.stderr)
    return code


def raised_here(error: BaseException) -> bool:
    """True if jaxscale itself raised it: a message for the user, not a fault deep in a library."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return frames[-1][0].f_globals.get("__name__", "").split(".")[0] == "jaxscale"


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
