"""Parts of a step: what one process of several has written of it, in a folder of its own.

    LOCAL/ID/part-1/1200/
      state/ocdbt.process_1/         the arrays that process 1 wrote, with an index of its own
      state/array_metadatas/process_1
      metadata.json, checksums.json  as in a whole step
      part.json                      which part of how many it is, and of which save

A whole step has all of them in one folder, and an index of those indices.
"""

import contextlib
import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxscale.checkpoint import checksums
from jaxscale.checkpoint.folders import StepFolders
from jaxscale.files import sync, write_atomically

PART = "part.json"
_OF_A_PROCESS = re.compile(r"process_\d+(/|$)")


@dataclasses.dataclass(frozen=True)
class Part:
    """number: of the process that wrote it. save: no two saves have the same, also of one step."""

    number: int
    of: int
    save: str

    def write(self, folder: Path) -> None:
        write_atomically(folder / PART, checksums.to_json(dataclasses.asdict(self)))


def folder_of(home: Path, process: int) -> Path:
    """Where the parts of a process are."""
    return home / f"part-{process}"


def find(home: Path) -> dict[tuple[int, Part], Path]:
    """The parts here of every step, by step and part; their bytes are not compared."""
    found = {}
    for folder in home.glob("part-*"):
        for step, path in StepFolders(folder).all().items():
            # What is damaged is not there.
            with contextlib.suppress(OSError, ValueError, TypeError):
                found[step, Part(**json.loads((path / PART).read_bytes()))] = path
    return found


def find_whole(home: Path) -> dict[tuple[int, Part], Path]:
    """Steps that are whole here, each as its only part: of an earlier start, on one host."""
    steps = StepFolders(home).all()
    return {(step, Part(0, of=1, save="")): path for step, path in steps.items()}


def to_json(here: dict[tuple[int, Part], Path]) -> str:
    """What `newest_first` reads of a process that has these."""
    return json.dumps([[step, *dataclasses.astuple(part)] for step, part in here])


def newest_first(said: list[str]) -> Iterator[tuple[int, dict[Part, int]]]:
    """Each save of a step of which somebody has a part, and which process is to copy each part.

    said: by each process, `to_json`.
    """
    saves: dict[tuple[int, int, str], dict[Part, int]] = {}
    for process, text in enumerate(said):
        for step, number, of, save in json.loads(text):
            holders = saves.setdefault((step, of, save), {})
            # All processes of a host see its parts: each copies its own, and the first the rest.
            if number == process or Part(number, of, save) not in holders:
                holders[Part(number, of, save)] = process
    for step, of, save in sorted(saves, reverse=True):
        yield step, saves[step, of, save]


def is_of_step(name: str, *, part: int) -> bool:
    """Whether the whole step needs this file of a part; what all parts have is the first's."""
    return name != PART and (part == 0 or bool(_OF_A_PROCESS.search(name)))


def copy_parts(parts: dict[int, Path], saving: Path) -> checksums.Files:
    """Copies what the whole step needs of these parts, by their number; returns its checksums.

    Raises OSError for a copy that is not what was saved.
    """
    copied: checksums.Files = {}
    for number, source in parts.items():
        try:
            files = checksums.read(source)
        except checksums.ChecksumError as error:
            raise OSError(f"{source}: {error}") from error
        files = {name: files[name] for name in files if is_of_step(name, part=number)}
        for name in files:
            (saving / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, saving / name)
            sync(saving / name)
        if defects := checksums.defects(saving, files, names=files):
            raise OSError(f"the copy of {source} is not what was saved: {defects[0]}")
        copied |= files
    return copied


def is_index(name: str, *, state: str) -> bool:
    """Whether it is a file of the index that is made of those of all parts."""
    return name == f"{state}/manifest.ocdbt" or name.startswith(f"{state}/d/")
