"""Scripts run in the tests' own process, where jax is imported already: that takes seconds."""

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from absl import flags

ROOT = Path(__file__).resolve().parents[2]


class Script:
    """A script of scripts/, run as often as wanted. module: to replace what it starts.

    Its flags exist only while it is loaded and while it runs: scripts have flags of the same names.
    """

    def __init__(self, name: str):
        self.path = ROOT / "scripts" / f"{name}.py"
        self.module = load(self.path)
        own = flags.FLAGS.flags_by_module_dict().get(self.module.__name__, [])
        self._flags = {flag.name: flag for flag in own}
        self._forget_flags()

    def run(self, *arguments: object) -> int:
        """Its exit code; environment, logging and flags are as before then."""
        argv = [str(self.path), *map(str, arguments)]
        parse = getattr(self.module, "parse_own_flags", flags.FLAGS)
        with self._with_flags(), _with_own_logging(), mock.patch.dict(os.environ):
            with mock.patch.object(sys, "argv", argv):
                return self.module.main(parse(argv)) or 0

    @contextlib.contextmanager
    def _with_flags(self) -> Iterator[None]:
        for key, flag in self._flags.items():
            flags.FLAGS[key] = flag
        try:
            yield
        finally:
            flags.FLAGS.unparse_flags()
            self._forget_flags()

    def _forget_flags(self) -> None:
        for key in self._flags:
            delattr(flags.FLAGS, key)


@contextlib.contextmanager
def _with_own_logging() -> Iterator[None]:
    """Hides pytest's handlers from a script: one that sets up logging anew closes what it finds."""
    root, progress = logging.getLogger(), logging.getLogger("jaxscale.perf")
    handlers, levels = root.handlers, (root.level, progress.level)
    root.handlers = []
    try:
        yield
    finally:
        root.handlers = handlers
        for logger, level in zip((root, progress), levels, strict=True):
            logger.setLevel(level)


def load(path: Path):
    """The file as a module, although its folder is not one that Python imports from."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}.{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # absl looks there for the module that defines a flag
    spec.loader.exec_module(module)
    return module


def with_devices(count: int) -> str:
    """XLA_FLAGS for a process with so many: two compile in half the time of conftest.py's eight."""
    # The last of two flags counts.
    return f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"


def is_running(pid: int) -> bool:
    """A process that has ended but is not collected is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
