"""Whether the GPUs of a run are free: other processes on them, and the memory that JAX will take.

As nvidia-smi tells it, on each host of its own cards. Nothing where there is no GPU, or no CUDA
plugin of JAX.
"""

import importlib.metadata
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax._src import xla_bridge  # whether devices are in use: what is public would touch them

from jaxscale import gpu_facts, launch
from jaxscale.xla.environment import MEMORY_FRACTION

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
FIELDS = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "mig.mode.current",
    "memory.total",
    "memory.free",
)
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
# Of the run before, or of a job that is being cancelled: it may take so long to leave a GPU.
LEAVING_SECONDS = 10.0
# Another process that holds less is one that watches, not one that computes.
SMALL_MIB = 1024.0
# Beside JAX's pool: the context, cuDNN and NCCL take 3 to 5 GB, 1 GiB or so of it at the start.
BESIDE_POOL_MIB, AT_START_MIB = 3072.0, 1024.0

log = logging.getLogger(__name__)

Facts = dict[str, Any]


def own_gpus() -> list[Facts]:
    """This process's cards as JSON, and who else uses them; those that are leaving get a moment.

    `pool_mib` is what JAX has taken so far: 0.0 before it begins, None where it does not say.
    """
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu") or not launch.num_gpus():
        return []
    if not any(installed(name) for name in PLUGINS):
        return []
    pools = _pools() if xla_bridge.backends_are_initialized() else None
    deadline, is_told = time.monotonic() + LEAVING_SECONDS, False
    while True:
        found = _read(pools)
        others = [app for gpu in found for app in gpu["apps"] if app["pid"] != os.getpid()]
        is_held = any((app["mib"] or 0) >= SMALL_MIB and app["is_here"] for app in others)
        if not is_held or time.monotonic() > deadline:
            return found
        if not is_told:
            log.info("waiting %g s for others to leave the GPUs", LEAVING_SECONDS)
            is_told = True
        time.sleep(1.0)


def installed(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(pools: dict[int, float | None] | None) -> list[Facts]:
    joined = launch.detect()
    ordinals = None if joined is None else launch.gpus_of(joined)
    rows = [row for row in gpu_facts.query(FIELDS) if {"index", "uuid", "name"} <= row.keys()]
    own = gpu_facts.visible(rows, ordinals=ordinals)
    apps = gpu_facts.apps() if own else []
    for app in apps:
        # In a container numbers may be those outside: this very process's, once it has begun.
        app["is_here"] = Path(f"/proc/{app['pid']}").exists() or pools is None
    numbers = range(len(own)) if ordinals is None else ordinals
    return [
        {
            "index": row["index"],
            "name": row["name"],
            "driver": row.get("driver_version"),
            "is_cut": row.get("mig.mode.current") == "Enabled",
            "total_mib": gpu_facts.number(row.get("memory.total")),
            "free_mib": gpu_facts.number(row.get("memory.free")),
            "pool_mib": 0.0 if pools is None else pools.get(number),
            "fraction": os.environ.get(FRACTION, MEMORY_FRACTION),
            "grows": os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"),
            "apps": [app for app in apps if app["gpu_uuid"] == row["uuid"]],
        }
        for number, row in zip(numbers, own, strict=False)
    ]


def _pools() -> dict[int, float | None]:
    """MiB that JAX has taken of each local card, by the card's number in CUDA."""
    pools: dict[int, float | None] = {}
    for device in jax.local_devices():
        num_bytes = (device.memory_stats() or {}).get("pool_bytes")
        pools[device.local_hardware_id] = None if num_bytes is None else num_bytes / 2**20
    return pools


def remarks(gpu: Facts, *, own_pids: Sequence[int]) -> tuple[str, str]:
    """What speaks against this card, and what is only to be known of it; "" for nothing.

    own_pids: of the run's processes on this host.
    """
    others = [app for app in gpu["apps"] if app["pid"] not in own_pids and app["is_here"]]
    is_large = any((app["mib"] or 0) >= SMALL_MIB for app in others)
    short = _is_short(gpu)
    if not others:
        return (_no_room(gpu), "") if short else ("", "")
    named = ", ".join(
        f"pid {app['pid']} ({app['name']}{_mib(app['mib'], before=', ')})" for app in others
    )
    if short or (is_large and not _is_to_be_shared(gpu)):
        text = (
            f"GPU {gpu['index']} is in use by {named}: end that, leave the GPU out of "
            "CUDA_VISIBLE_DEVICES, or share it: "
        )
        return text + _smaller_share(gpu), ""
    return "", f"GPU {gpu['index']} is also used by {named}: steps may take longer"


def _wanted_mib(gpu: Facts) -> float | None:
    """None where that cannot be known: JAX takes what it needs, or the card is cut (MIG)."""
    fraction = gpu_facts.number(gpu["fraction"])
    if gpu["grows"] or gpu["is_cut"] or not fraction or not gpu["total_mib"]:
        return None
    return fraction * gpu["total_mib"]


def _is_short(gpu: Facts) -> bool:
    wanted, free, pool = _wanted_mib(gpu), gpu["free_mib"], gpu["pool_mib"]
    if wanted is None or free is None or pool is None:
        return False
    # A pool that is there already has had the rest beside it.
    beside = 0.0 if pool else (gpu["total_mib"] - wanted) / 2 - AT_START_MIB
    slack = AT_START_MIB if pool else 0.0
    return free + pool + slack < wanted + min(max(beside, 0.0), BESIDE_POOL_MIB)


def _is_to_be_shared(gpu: Facts) -> bool:
    """The user has made room for others."""
    fraction = gpu_facts.number(gpu["fraction"])
    return gpu["grows"] or (fraction is not None and fraction < float(MEMORY_FRACTION))


def _no_room(gpu: Facts) -> str:
    return (
        f"GPU {gpu['index']} has {gpu['free_mib']:,.0f} of {gpu['total_mib']:,.0f} MiB free, and "
        f"JAX takes {_wanted_mib(gpu):,.0f} ({FRACTION}={gpu['fraction']}). Who uses it nvidia-smi "
        f"does not tell, as from inside a container; end that, or {_smaller_share(gpu)}"
    )


def _smaller_share(gpu: Facts) -> str:
    free, total = gpu["free_mib"], gpu["total_mib"]
    if not free or not total or free < 2 * BESIDE_POOL_MIB:
        return f"set {FRACTION} lower"
    return f"set {FRACTION}={int(100 * (free - BESIDE_POOL_MIB) / total) / 100}"


def _mib(value: float | None, *, before: str) -> str:
    return "" if value is None else f"{before}{value:,.0f} MiB"
