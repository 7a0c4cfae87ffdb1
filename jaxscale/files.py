"""Files that are whole or not there, folders to write to, and the user's cache folder.

What the disk refuses is told in the user's words: `telling`.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def cache_folder() -> Path:
    """For what can be made again: $XDG_CACHE_HOME/jaxscale, or ~/.cache/jaxscale.

    Raises ValueError for a user without a home, as in some containers.
    """
    home = os.path.expanduser("~")
    if not (cache := os.environ.get("XDG_CACHE_HOME")) and not os.path.isabs(home):
        raise ValueError("this user has no home folder: set XDG_CACHE_HOME, where caches are kept")
    return Path(cache or os.path.join(home, ".cache")) / "jaxscale"


@contextlib.contextmanager
def telling(what: str, fix: str) -> Iterator[None]:
    """Tells an OSError inside as a ValueError: "`what`: No space left on device; `fix`"."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{what}: {error.strerror or error}; {fix}") from error


def is_file(path: str | Path) -> bool:
    """Whether a file is there. Raises OSError where that cannot be known: os.path says no then."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def require_writable(folder: Path) -> None:
    """Makes the folder if it is missing. Raises OSError if no file can be written in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder, prefix=".writable-"):
        pass


def write_atomically(path: Path, data: bytes) -> None:
    """The file holds either what it held or all of `data`, also after a power cut."""
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that takes the place of `path` at the end, once all of it is on the disk.

    After an exception `path` is as it was; NAME.tmp stays beside it until the next time.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Makes what a file holds, or the renames in a folder, last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
