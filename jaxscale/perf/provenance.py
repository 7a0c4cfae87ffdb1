"""Where a figure is from: what a record says besides the figure, so that it can be made again."""

import contextlib
import datetime
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jaxscale
from jaxscale.perf.gpus import driver_version
from jaxscale.perf.processes import output_of
from jaxscale.xla.environment import VARIABLES

ROOT = Path(__file__).resolve().parents[2]

# Variables that may change a step's time without being named on the command line begin so.
ENVIRONMENT = ("CUDA_", "JAX_", "NCCL_", "XLA_")


def provenance(*, commit: str = "") -> dict[str, Any]:
    """Date, command, commit, versions, driver, a run's environment.

    commit: what to say where there is no git.
    """
    found = output_of("git", "-C", str(ROOT), "rev-parse", "HEAD")
    has_git = bool(found) and not commit
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shown([sys.executable, *sys.argv]),
        "commit": commit or found or None,
        "is_dirty": _is_dirty() if has_git else None,
        "driver": driver_version(),
        "python": platform.python_version(),
        "versions": _versions(),
        "environment": _environment(),
    }


def shown(command: Sequence[object]) -> str:
    """The command as a user would type it in the checkout: it names no path of this machine."""
    python = {sys.executable, str(Path(sys.executable).resolve())}
    words = [
        "python" if word in python else word.removeprefix(f"{ROOT}/") for word in map(str, command)
    ]
    return shlex.join(words)


def _is_dirty() -> bool:
    return bool(output_of("git", "-C", str(ROOT), "status", "--porcelain"))


def _versions() -> dict[str, str | None]:
    others = {name: _version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    return {"jaxscale": jaxscale.__version__, **others}


def _version(name: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _environment() -> dict[str, str]:
    """A run's: what jaxscale sets, and what is set here, which wins."""
    ours = {variable.name: variable.value for variable in VARIABLES}
    theirs = {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)}
    return dict(sorted((ours | theirs).items()))
