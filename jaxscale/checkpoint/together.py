"""What the processes of a run do together to save a step: all of them succeed, or none.

A process that fails says so to the others, where they would wait for it. They meet through JAX's
service of keys and barriers, not by collectives: a save goes on in a thread beside the training.
"""

import collections
import contextlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxscale import distributed
from jaxscale.checkpoint.checksums import NAME as CHECKSUMS

# The lane of copies, which go on beside saves.
COPYING = "/copying"
# Of the meetings of each lane: threads take turns in another order on each process.
_numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


class SaveFailed(RuntimeError):
    """Some process could not do its part. The same words on each: which, its host, and why."""


class Together:
    """The meetings of one save. Every process makes one for each save, in the same order."""

    def __init__(self, timeout_seconds: float, *, lane: str = ""):
        """timeout_seconds: how long a meeting waits for the last; a dead process ends it sooner.

        lane: one save at a time in each.
        """
        self._name = f"jaxscale/save{lane}/{next(_numbers[lane])}"
        self._timeout_seconds, self._lane = timeout_seconds, lane
        self._num_meetings, self._is_over = 0, False

    def meet(self, error: BaseException | None = None) -> None:
        """Waits for all. Raises SaveFailed on each if one comes with an error.

        A process that is alone raises its own.
        """
        if jax.process_count() == 1:
            if error is not None:
                raise error
            return
        self._num_meetings, self._is_over = self._num_meetings + 1, True
        said = distributed.meet(
            f"{self._name}/{self._num_meetings}",
            _in_a_line(error) if error is not None else "",
            timeout_seconds=self._timeout_seconds,
            lane=self._lane,
        )
        if said:
            raise SaveFailed("; ".join(said)) from error
        self._is_over = False

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """An exception inside is told at the next meeting, where the others are or will be."""
        try:
            yield
        except Exception as error:
            if self._is_over:
                raise  # a meeting's own
            self.meet(error)

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """As `telling`, and the meeting is at its end."""
        with self.telling():
            yield
            self.meet()


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:2000]}"


# The files of a step, and who writes which.


def file_names(folder: Path) -> list[str]:
    """Every file under a step except the checksums themselves, as paths relative to it."""
    paths = (
        Path(parent, name).relative_to(folder)
        for parent, _, names in os.walk(folder)
        for name in names
    )
    return sorted(path.as_posix() for path in paths if not path.name.startswith(CHECKSUMS))


def writer_of(name: str, *, state: str) -> int:
    """The process that wrote a file; state: the folder of the arrays."""
    match = re.match(rf"{state}/ocdbt\.process_(\d+)/", name)
    return int(match[1]) if match else 0


def other_processes_checksums(
    saving: Path, *, timeout_seconds: float
) -> dict[str, tuple[int, int]]:
    """What the others have written, and removes it. Raises TimeoutError, naming who wrote none."""
    files, deadline = {}, time.monotonic() + timeout_seconds
    for process in range(1, jax.process_count()):
        path = saving / f"{CHECKSUMS}.{process}"
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the checksums of process {process} are not seen after {timeout_seconds:.0f} s"
                )
            time.sleep(0.1)
        files |= json.loads(path.read_bytes())
        path.unlink()
    return files
