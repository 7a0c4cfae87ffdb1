"""The command lines of scripts: their own flags, a config file, and settings of its keys.

A mistake is told in a line.
"""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from jaxscale import config as run_config

# What a script ends with when it failed by itself, and when its user made a mistake. Either is told
# in a line, without a traceback.
EXIT_FAILED = 1
EXIT_MISTAKE = 2

# What is defined here is in the --help of the script that asks for it.
flags.disclaim_key_flags()


class ConfigFile(flags.ArgumentParser):
    """Reads the config file, and checks the keys on the command line.

    ml_collections answers mistakes in either with tracebacks.
    """

    def __init__(self, parser: flags.ArgumentParser, words: list[str]):
        self._parser, self._words = parser, words

    def parse(self, path: str) -> run_config.Config:
        if not Path(path.partition(":")[0]).is_file():
            raise ValueError("no such file; the ones that come with jaxscale are in configs/")
        try:
            config = self._parser.parse(path)
        except ValueError as error:  # its message holds a traceback
            raise ValueError(str(error.__context__)) from None
        config = run_config.from_config_dict(config)
        for word in self._words:
            if model := re.match(r"--?config\.model=(.*)", word):
                config.model = run_config.model_from(model[1])  # its keys may follow
            if part := re.match(r"--?config\.(optim|schedule)=", word):
                raise ValueError(
                    f"{word}: name another config.{part[1]} in the config file, or set its keys"
                )
        for word in self._words:
            if override := re.match(r"--?(?:no)?config\.([\w.]+)", word):
                run_config.check_key(config, override[1])
        return config


class IntegerOrNone(flags.IntegerParser):
    """`--config.model.window=none`; where None is not allowed the typed check says so."""

    def parse(self, argument: Any) -> Any:
        return None if argument == "none" else super().parse(argument)


class ModelFrom(flags.ArgumentParser):
    """`--config.model=hf:DIR`; settings of its keys may follow."""

    def parse(self, argument: Any) -> Any:
        return run_config.model_from(argument) if isinstance(argument, str) else argument


config_flags.register_flag_parser_for_type(int, IntegerOrNone())
# The type of config.model.
config_flags.register_flag_parser_for_type(Any, ModelFrom())


def define_config(
    values: flags.FlagValues = flags.FLAGS, argv: list[str] | None = None
) -> flags.FlagHolder:
    """`--config=FILE` with `--config.key=value` among `values`.

    argv: the command line, if it is not the process's own.
    """
    argv = sys.argv if argv is None else argv
    text = "A file with get_config(arg) -> Config; any field can be overridden."
    holder = config_flags.DEFINE_config_file(
        "config", None, text, flag_values=values, sys_argv=argv
    )
    values["config"].parser = ConfigFile(values["config"].parser, argv)
    return holder


def read_config(settings: list[str]) -> run_config.Config:
    """The config that these words of a command line say. Raises ValueError."""
    values, argv = flags.FlagValues(), ["", *settings]
    holder = define_config(values, argv)
    try:
        _refuse_words(values(argv))
    except flags.Error as error:
        raise ValueError(f"{shlex.join(settings)}: {error}") from None
    if holder.value is None:
        raise ValueError("name a config: --config=FILE")
    run_config.validate(holder.value)
    return holder.value


def parse_flags(argv: list[str]) -> list[str]:
    """For app.run, of a script that has the config among its flags."""
    try:
        return _refuse_words(flags.FLAGS(argv))
    except (flags.Error, ValueError) as error:
        sys.exit(tell(error, EXIT_MISTAKE))


def parse_own_flags(argv: list[str]) -> list[str]:
    """For app.run: takes the script's flags, and leaves the config and its settings.

    `read_config` reads what is left.
    """
    flags.FLAGS.set_gnu_getopt()
    try:
        return flags.FLAGS(argv, known_only=True)
    except flags.Error as error:
        sys.exit(tell(error, EXIT_MISTAKE))


def tell(error: Exception, code: int) -> int:
    """Prints the error, and returns the exit code."""
    sys.stderr.write(f"\nerror: {error}\n")
    return code


def _refuse_words(arguments: list[str]) -> list[str]:
    if len(arguments) > 1:
        raise ValueError(f"{arguments[1]!r} is no flag; write --key=value")
    return arguments
