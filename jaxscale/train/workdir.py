"""Whose workdir it is."""

import json
import os
from pathlib import Path
from typing import Any

from jaxscale import config as run_config
from jaxscale.checkpoint import different_keys
from jaxscale.config import Config

# What makes a run this run: a workdir that has other values belongs to another one.
IDENTITY = ("model", "seed", "seq_len", "batch_size", "data.tokenizer", "data.eval_fraction", "data.shuffle")


def check_workdir(workdir: Path, config: Config) -> None:
    """Raises ValueError if the workdir cannot be written to, or holds a run of other identity, naming the keys."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe = workdir / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"--workdir={workdir} cannot be written to ({error.strerror}); choose another folder"
        ) from None
    path = workdir / "config.json"
    if not path.exists():
        return
    try:
        saved = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); move it away if the workdir is to be used again") from None
    lines = different_keys(identity(saved), identity(json.loads(json.dumps(run_config.to_json(config)))))
    if lines:
        raise ValueError(
            f"--workdir={workdir} holds another run. Differing keys:\n  "
            + "\n  ".join(f"config.{line}" for line in lines)
            + "\nChoose another --workdir, or set these keys back"
        )


def identity(config: dict) -> dict:
    """The part of a JSON config that a workdir cannot change."""
    parts = {"optim.type": config.get("optim", {}).get("type")}
    for key in IDENTITY:
        value: Any = config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        parts[key] = value
    return parts
