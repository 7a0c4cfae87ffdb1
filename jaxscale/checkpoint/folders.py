"""The folders of steps in a checkpoint folder: what their names mean, and every change of a name.

    1200/              a whole step; nothing in it changes after the rename
    1200.replaced/     the older save of a step that is saved again, until the new one has its name
    1300.saving/       in progress, or left by a kill: removed at the next save
    1100.corrupt/      failed its checksums at a restore
    1250.superseded/   newer than a save made after the run went back
    1000.deleting/     no longer kept
    1350.stray         a file, or a link to nothing, where a step goes

Those that are put aside, corrupt, superseded and stray, are never deleted here. A link to a folder
is read as that folder; where it would be deleted, the link is.
"""

import logging
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from jaxscale.checkpoint import checksums
from jaxscale.files import sync

log = logging.getLogger(__name__)


class StepFolders:
    """The steps in `folder`. Only the lead process may call what changes it."""

    def __init__(self, folder: Path):
        self._folder = folder

    def all(self) -> dict[int, Path]:
        """Steps that have a whole folder, as far as its name tells."""
        folders = {}
        # Shorter names first: `12.replaced` counts only where there is no `12`, because a
        # replacement was cut short.
        for path in sorted(self._folder.glob("[0-9]*"), key=lambda path: len(path.name)):
            match = re.fullmatch(r"(\d+)(\.replaced)?", path.name)
            if match and path.is_dir():
                folders.setdefault(int(match[1]), path)
        return folders

    def of(self, step: int) -> Path:
        """The folder of a step, or where it would be."""
        return self.all().get(step, self._folder / str(step))

    def saving(self, step: int) -> Path:
        """Where a step is written before it is whole."""
        return self._folder / f"{step}.saving"

    def clear(self) -> None:
        """Removes what a killed run or a failed save left behind. No save is in flight."""
        for path in self._folder.glob("[0-9]*"):
            if path.name.isdecimal() and not path.is_dir():
                self._put_aside(path, f"{path.name}.stray")
        for path in self._folder.glob("*.saving"):
            log.info("removing %s: that save was cut short", path)
            _remove(path)
        for path in self._folder.glob("*.replaced"):
            if path.with_suffix("").exists() or not path.is_dir():
                _remove(path)
            else:
                path.rename(path.with_suffix(""))

    def put_aside(self, step: int, why: str) -> None:
        """Renames a step so that no restore takes it; it is never deleted here."""
        source = self.of(step)
        if source.exists():
            self._put_aside(source, f"{step}.{why}")

    def _put_aside(self, source: Path, name: str) -> None:
        target, count = self._folder / name, 1
        while os.path.lexists(target):
            count += 1
            target = self._folder / f"{name}-{count}"
        source.rename(target)
        log.warning(
            "renamed checkpoint %s to %s; delete it when you no longer need it", source, target.name
        )

    def publish(self, step: int) -> None:
        """Gives a step that was written, all of it, its name."""
        final, replaced = self._folder / str(step), self._folder / f"{step}.replaced"
        if final.exists():
            _remove(replaced)
            final.rename(replaced)
        self.saving(step).rename(final)
        sync(self._folder)
        _remove(replaced)

    def retire(
        self, newest: int, *, keep_last: int, keep_every: int, pinned: Collection[int] = ()
    ) -> None:
        """Puts steps beyond the newest aside, and deletes older ones that are not to be kept."""
        whole = sorted(
            step for step, path in self.all().items() if (path / checksums.NAME).exists()
        )
        for step in whole:
            if step > newest:
                self.put_aside(step, "superseded")
        for step in [step for step in whole if step <= newest][:-keep_last]:
            if step not in pinned and (not keep_every or step % keep_every):
                # Renamed first: a kill in the middle leaves no half of a step under its name.
                self.of(step).rename(self._folder / f"{step}.deleting")
        for path in self._folder.glob("*.deleting"):
            # NFS keeps files that others hold open: what stays is tried again after the next save.
            _remove(path, ignore_errors=True)


def _remove(path: Path, *, ignore_errors: bool = False) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path, ignore_errors=ignore_errors)
