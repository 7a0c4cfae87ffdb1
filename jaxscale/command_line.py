"""The command lines of scripts: their own flags, a config file, and settings of its keys.

A mistake is told in a line.
"""

import contextlib
import importlib.machinery
import importlib.util
import itertools
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from jaxscale import config as run_config
from jaxscale.files import telling

# What a script ends with when it failed by itself, and when its user made a mistake. Either is told
# in a line, without a traceback.
EXIT_FAILED = 1
EXIT_MISTAKE = 2
# As shells have it for Ctrl-C. (For a run that was told to stop otherwise: launch.EXIT_AGAIN.)
EXIT_INTERRUPTED = 130

# What is defined here is in the --help of the script that asks for it.
flags.disclaim_key_flags()


class ConfigFile(flags.ArgumentParser):
    """Reads the config file, and checks the keys on the command line.

    ml_collections answers mistakes in either with tracebacks.
    """

    def __init__(self, words: list[str]):
        self._words = words

    def parse(self, path: str) -> run_config.Config:
        name, *argument = path.split(":", 1)
        file = Path(os.path.expanduser(name))
        if name and file.is_dir():
            raise ValueError("it is a folder; name a file, such as the config.json of a run's")
        if not file.is_file():
            raise ValueError("no such file; the ones that come with jaxscale are in configs/")
        config = (
            run_config.read_json(file) if file.suffix == ".json" else _from_python(file, argument)
        )
        for word in self._words:
            if model := re.match(r"--?config\.model=(.*)", word):
                config.model = _model_from(model[1])  # its keys may follow
            if part := re.match(r"--?config\.(optim|schedule)=", word):
                raise ValueError(
                    f"{word}: name another config.{part[1]} in the config file, or set its keys"
                )
        for word in self._words:
            if override := re.match(r"--?(?:no)?config\.([^=]*)", word):
                run_config.check_key(config, override[1])
        return config


def _model_from(value: str):
    """The model part that `--config.model=hf:DIR` asks for. Raises ValueError."""
    from jaxscale.models.model_folder import ModelFolder, parse  # with jax, which takes a second

    try:
        return ModelFolder(parse(value)).model
    except (ValueError, OSError) as error:
        shown = run_config.shown(value)
        raise ValueError(f"config.model={shown}: {error}") from None


def _from_python(file: Path, argument: list[str]) -> run_config.Config:
    """What its get_config returns. Raises ValueError for whatever it raises, with the line."""
    loader = importlib.machinery.SourceFileLoader("config_file", str(file))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses of its own look for their module
    with _faults_of(file):
        loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise ValueError("it has no get_config(arg) that returns a jaxscale.config.Config")
        config = module.get_config(*argument)
    return run_config.from_config_dict(config)


@contextlib.contextmanager
def _faults_of(file: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(file)
        ]
        line = error.lineno if isinstance(error, SyntaxError) else (lines or [None])[-1]
        # What the file raises by itself, for its argument, is a message; the rest names its kind.
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        place = f" ({file}, line {line})" if line else ""
        raise ValueError(f"{kind}{text}{place}") from error


class IntegerOrNone(flags.IntegerParser):
    """`--config.model.window=none`; where None is not allowed the typed check says so."""

    def parse(self, argument: Any) -> Any:
        return None if argument == "none" else super().parse(argument)


class ModelFrom(flags.ArgumentParser):
    """`--config.model=hf:DIR`; settings of its keys may follow."""

    def parse(self, argument: Any) -> Any:
        return _model_from(argument) if isinstance(argument, str) else argument


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
    values["config"].parser = ConfigFile(argv)
    return holder


def read_config(settings: list[str]) -> run_config.Config:
    """The config that these words of a command line say. Raises ValueError."""
    if not any(re.match("--?config(=|$)", word) for word in settings):
        raise ValueError("name a config: --config=FILE")
    values, argv = flags.FlagValues(), ["", *settings]
    holder = define_config(values, argv)
    try:
        _refuse_words(_parsed(argv, values=values), argv=argv)
    except flags.Error as error:
        raise ValueError(_short(error)) from None
    run_config.validate(holder.value)
    return holder.value


def parse_flags(argv: list[str]) -> list[str]:
    """For app.run, of a script that takes flags alone, the config among them or not."""
    try:
        return _refuse_words(_parsed(argv), argv=argv)
    except (flags.Error, ValueError) as error:
        sys.exit(tell(error, EXIT_MISTAKE))


def parse_flags_and_words(argv: list[str]) -> list[str]:
    """For app.run, of a script that takes words as well, such as names of files."""
    try:
        return _parsed(argv)
    except flags.Error as error:
        sys.exit(tell(error, EXIT_MISTAKE))


def parse_own_flags(argv: list[str]) -> list[str]:
    """For app.run: takes the script's flags, and leaves the config and its settings.

    `read_config` reads what is left.
    """
    flags.FLAGS.set_gnu_getopt()
    try:
        return _parsed(argv, known_only=True)
    except flags.Error as error:
        sys.exit(tell(error, EXIT_MISTAKE))


def _parsed(
    argv: list[str], *, values: flags.FlagValues = flags.FLAGS, known_only: bool = False
) -> list[str]:
    """The words that are left of it. Raises flags.Error."""
    try:
        return values(argv, known_only=known_only)
    finally:
        _refuse_flags_for_values(argv, values=values)


def _refuse_flags_for_values(argv: list[str], *, values: flags.FlagValues) -> None:
    """absl takes `--temperature=0` for the prompt in `--prompt --temperature=0`."""
    for word, following in itertools.pairwise(argv):
        name = word.removeprefix("--")
        is_of_words = name != word and name in values and not values[name].boolean
        if is_of_words and following.startswith("--"):
            raise flags.Error(f"{word} has no value; write {word}=..., in front of {following}")


def folder_of(flag: str, value: Any) -> str:
    """The folder that a flag names, with ~ as the shell has it. Raises ValueError for no name."""
    if not value or "\0" in value:
        raise ValueError(f"--{flag}={value!r} names no folder; write one, such as --{flag}=runs/x")
    return os.path.expanduser(value)


def file_of(flag: str, value: str | None) -> Path:
    """The file that a flag names, to be written when the work is done; None or "": nowhere.

    Raises ValueError here and now where that cannot be.
    """
    path = Path(os.path.expanduser(value or os.devnull))
    is_new = not path.exists()
    with telling(f"--{flag}={value} cannot be written", "name another file"):
        open(path, "a").close()
        if is_new:
            path.unlink()
    return path


def exit_code_of(run: Callable[[], object], *, flag_of: Mapping[str, str] | None = None) -> int:
    """Runs a script's work; what its user or a disk did wrong is told in a line.

    flag_of: what the script calls settings of a run, which a message names.
    """
    try:
        run()
        return 0
    except ValueError as error:
        return tell(ValueError(_in_flags(str(error), flag_of or {})), EXIT_MISTAKE)
    except (OSError, RuntimeError) as error:
        return tell(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _in_flags(text: str, flag_of: Mapping[str, str]) -> str:
    return re.sub(r"config\.[\w.]*\w", lambda key: flag_of.get(key[0], key[0]), text)


def tell(error: Exception, code: int) -> int:
    """Prints the error, and returns the exit code."""
    sys.stderr.write(f"\nerror: {_short(error)}\n")
    return code


# What absl and ml_collections say of a command line -> that in words which say what to write.
PLAINER = (
    (r"invalid literal for int\(\) with base \d+: .*", "write a whole number"),
    (r"could not convert string to float: .*", "write a number"),
    (r"\('Non-boolean argument to boolean flag', .*\)", "write true or false"),
    (r"flag --(\w+)=None: Flag .* must have a value .*", r"--\1 is missing; see --help"),
    (r"Found (\S+) in argv before .*", r"\1 stands in front of --config=FILE; write it behind"),
)


def _short(error: Exception) -> str:
    """In plain words; absl repeats what was typed, however long it is."""
    text = str(error)
    for pattern, plainer in PLAINER:
        text = re.sub(pattern, plainer, text, flags=re.DOTALL)
    return re.sub(r"(\S{80})\S{400,}", r"\1...", text)


def _refuse_words(arguments: list[str], *, argv: list[str]) -> list[str]:
    if len(arguments) == 1:
        return arguments
    word = arguments[1]
    # Such as the name of a bool, which takes no word. (Not there: it came out of a --flagfile.)
    before = argv[argv.index(word, 1) - 1] if word in argv[1:] else ""
    key = before if before.startswith("--") and "=" not in before else "--key"
    shown = run_config.shown(word)
    raise ValueError(f"{shown} is no flag; write {key}={'value' if key == '--key' else word[:80]}")


# The command itself, as a message repeats it.


def command_to_repeat() -> str:
    """This command for a shell in any folder, its words as they were typed.

    Where a launcher started this process among others: the launcher's, out of `JAXSCALE_COMMAND`.
    """
    if launched := os.environ.get("JAXSCALE_COMMAND"):
        return launched
    folder, python = Path.cwd(), Path(sys.executable)
    # That of `make` is in .venv, and a fresh Debian has no `python` on its path.
    short = python.relative_to(folder) if python.is_relative_to(folder) else python
    return f"cd {shlex.quote(str(folder))} && {shlex.join([str(short), *sys.argv])}"


def with_setting(command: str, key: str, *, value: object) -> str:
    """The command with this value of `config.key`, in place of those that it has."""
    name = re.escape(f"config.{key}")
    return re.sub(rf" --?{name}(?:=|\s+)\S+", "", command) + f" --config.{key}={value}"


# What it prints to.


class SteadyStream:
    """A text stream that stops nothing: its reader may leave, its disk may fill up.

    What comes after goes nowhere. What its encoding has not is written as an escape.
    """

    def __init__(self, stream: Any, *, name: str):
        self._stream, self._name = stream, name
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        with self._kept_up():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._kept_up():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _kept_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # The file itself: what is left in the buffer must have a place to go at the exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if self._name != "stderr":
                sys.stderr.write(f"{self._name}: {error.strerror}; going on without it\n")


def steady_output() -> None:
    """Neither stdout nor stderr can end this process; of those that are closed, too."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")
        setattr(sys, name, SteadyStream(stream, name=name))
