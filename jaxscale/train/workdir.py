"""Whose workdir it is."""

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxscale import config as run_config
from jaxscale.checkpoint.leaves import different_keys
from jaxscale.config import Config
from jaxscale.files import require_writable, telling, write_atomically

log = logging.getLogger(__name__)

# What makes a run this run: a workdir that has other values belongs to another one.
IDENTITY = (
    "model",
    "seed",
    "seq_len",
    "batch_size",
    "data.tokenizer",
    "data.eval_fraction",
    "data.shuffle",
    "optim.block",
)


def check_workdir(workdir: Path, config: Config) -> None:
    """Raises ValueError if the workdir cannot be written to, or holds a run of other identity.

    The message names the keys that differ.
    """
    try:
        require_writable(workdir)
    except OSError as error:
        raise ValueError(
            f"--workdir={workdir} cannot be written to ({error.strerror}); choose another folder"
        ) from None
    path = workdir / "config.json"
    if not os.path.lexists(path):
        return
    saved = _read_config(path)
    # A run that saved nothing has nothing to lose.
    if any((workdir / "checkpoints").glob("[0-9]*")):
        check_same_run(workdir, config, saved=saved)


def _read_config(path: Path) -> dict:
    """The config of a run, of this version or another. Raises ValueError, naming the file."""
    try:
        saved = dict(json.loads(path.read_text()))
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    except (ValueError, TypeError, RecursionError) as error:
        what = f"is not a JSON object ({error})"
    else:
        odd = [part for part in ("model", "optim", "data") if not isinstance(saved.get(part), dict)]
        if not odd:
            return saved
        what = f"is no config of a run: {odd[0]} is {run_config.shown(saved.get(odd[0]))}"
    raise ValueError(f"{path} {what}; move it away if the workdir is to be used again")


def check_same_run(workdir: Path, config: Config, *, saved: dict) -> None:
    """Raises ValueError, naming the keys, if `saved` is of a run of other identity.

    saved: a config as JSON. Keys that this version has not are compared as they are.
    """
    with contextlib.suppress(ValueError):
        # A setting that came with a newer version has its default in an older run.
        saved = run_config.to_json(run_config.from_json(saved))
    lines = different_keys(identity(saved), identity(run_config.to_json(config)))
    if lines:
        raise ValueError(
            f"--workdir={workdir} holds another run. Differing keys:\n  "
            + "\n  ".join(f"config.{line}" for line in lines)
            + "\nChoose another --workdir, or set these keys back"
        )


@contextlib.contextmanager
def only_run(workdir: Path) -> Iterator[None]:
    """Raises ValueError while another process trains in the workdir.

    Two would delete each other's checkpoints. At its end a folder for checkpoints that has none
    goes.
    """
    folder = os.open(workdir, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise ValueError(
            f"--workdir={workdir} is in use by another run; wait for its end or choose another "
            "folder"
        ) from None
    except OSError as error:  # some network file systems lock no folders
        log.warning(
            "%s cannot be locked (%s): see to it that no other run uses it", workdir, error.strerror
        )
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it holds something, unless the run was refused
            (workdir / "checkpoints").rmdir()
        os.close(folder)


def tell_changes(config: Config, *, saved: dict, step: int) -> None:
    """Every setting that is not as it was, and what follows for the learning rate.

    saved: the config, as JSON, of the checkpoint of that step.
    """
    try:
        before = run_config.from_json(saved)
    except ValueError:  # of another version
        return
    lines = different_keys(run_config.to_json(before), run_config.to_json(config))
    if not lines:
        return
    lines = [f"config.{line}" for line in lines]
    if step < config.steps:
        now, then = (float(c.schedule.build(c.steps)(step)) for c in (config, before))
        last = float(config.schedule.build(config.steps)(config.steps - 1))
        if now != then:
            lines.append(
                f"the learning rate of step {step + 1} becomes {now:.3g}, and would have been "
                f"{then:.3g}; that of the last step, {config.steps}, is {last:.3g}"
            )
    log.info("going on from step %d with other settings:\n  %s", step, "\n  ".join(lines))


def write_config(workdir: Path, config: Config, *, saved_step: int | None) -> None:
    """Writes config.json whole or not at all: a run must be able to go on after a kill.

    saved_step: the newest that is saved. The config.json that led there stays beside the new one,
    as config.stepN.json, if they differ.
    """
    path, text = workdir / "config.json", json.dumps(run_config.to_json(config), indent=2) + "\n"
    with telling(f"{path} cannot be written", "make room, or choose another --workdir"):
        old = path.read_bytes() if path.exists() else b""
        kept = workdir / f"config.step{saved_step}.json"
        if old and saved_step is not None and old != text.encode() and not kept.exists():
            write_atomically(kept, old)
        write_atomically(path, text.encode())


# Files of the model that a run began with; an export has them again.
COMPANIONS = "hugging_face"


def keep_companions(workdir: Path, paths: list[Path]) -> None:
    """Keeps config.json and the tokenizer's files of a model folder beside the run."""
    folder = workdir / COMPANIONS
    folder.mkdir(exist_ok=True)
    for path in paths:
        write_atomically(folder / path.name, path.read_bytes())


def identity(config: dict) -> dict:
    """The part of a JSON config that a workdir cannot change."""
    parts = {"optim.type": config.get("optim", {}).get("type")}
    for key in IDENTITY:
        value: Any = config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        parts[key] = value
    return parts
