"""The choice of remat="auto", kept in the user's cache folder for the next start."""

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import jaxscale
from jaxscale import config as run_config
from jaxscale import distributed, files
from jaxscale.config import Remat
from jaxscale.step.plan import Plan

log = logging.getLogger(__name__)

# A kept choice holds as long as its memory is within this of what it was: another XLA or another
# model code is chosen for anew.
TOLERANCE = 0.01
# Parts of the config that do not change how much memory an update takes.
NO_MEMORY = (
    "steps",
    "seed",
    "schedule",
    "data",
    "checkpoint",
    "evaluation",
    "sample",
    "log",
    "profile",
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A policy that was chosen before, and the GiB that it took."""

    remat: Remat
    leaner_layers: int
    memory_gib: float

    def holds(self, memory_gib: float) -> bool:
        return abs(memory_gib / self.memory_gib - 1) <= TOLERANCE


def read(plan: Plan, policies: Sequence[Remat], *, pool_gib: float) -> Choice | None:
    """What was chosen for the same update and devices; the lead process's choice counts for all."""
    index, leaner_layers, memory = -1.0, 0.0, 0.0
    if math.isfinite(pool_gib) and distributed.is_lead():
        try:
            record = json.loads(_path(plan, pool_gib).read_text())
            index = float(policies.index(record["remat"]))
            leaner_layers = float(record["leaner_layers"])
            memory = float(record["predicted_memory_gib"])
        except (OSError, ValueError, KeyError, TypeError):  # none kept, or damaged: chosen anew
            index, leaner_layers, memory = -1.0, 0.0, 0.0
    index, leaner_layers, memory = distributed.largest([index, leaner_layers, memory])
    if index < 0 or leaner_layers < 0 or memory <= 0:
        return None
    return Choice(policies[int(index)], int(leaner_layers), memory)


def keep(plan: Plan, *, memory_gib: float, pool_gib: float) -> None:
    """Keeps the plan's policy; a folder that cannot be written to is told and stops nothing."""
    if not distributed.is_lead():
        return
    record = {
        "remat": plan.execution.remat.value,
        "leaner_layers": plan.execution.leaner_layers,
        "predicted_memory_gib": memory_gib,
        "key": _key(plan, pool_gib),
    }
    path = _path(plan, pool_gib)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(path, _to_json(record))
    except OSError as error:
        log.warning(
            "the choice of remat is not kept for the next start: %s (%s)", path, error.strerror
        )


def _path(plan: Plan, pool_gib: float) -> Path:
    name = hashlib.sha256(_to_json(_key(plan, pool_gib))).hexdigest()[:32]
    return files.cache_folder() / "remat" / f"{name}.json"


def _to_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _key(plan: Plan, pool_gib: float) -> dict[str, Any]:
    """All that the memory depends on, but for the code, whose changes TOLERANCE finds."""
    config = run_config.to_json(plan.config)
    return {
        "config": {key: value for key, value in config.items() if key not in NO_MEMORY},
        "max_documents_per_row": plan.config.data.max_documents_per_row,
        "compiler_options": plan.compiler_options,
        "mesh": dict(plan.mesh.shape),
        "device_kind": plan.mesh.devices.flat[0].device_kind,
        "pool_gib": pool_gib,
        "jax": jax.__version__,
        "jaxscale": jaxscale.__version__,
    }
