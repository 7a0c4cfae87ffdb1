"""What a machine says of itself, for scripts/doctor.py: libraries, cards, links, network, cores.

Nothing here needs root, and nothing fails where something is not there: it is left out, or None.
"""

import importlib.metadata
import os
import platform
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxscale import gpu_facts, launch
from jaxscale.xla.environment import host_memory_gib

Facts = dict[str, Any]

CARD_FIELDS = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "vbios_version",
    "persistence_mode",
    "mig.mode.current",
    "ecc.mode.current",
    "ecc.errors.corrected.volatile.total",
    "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.uncorrected.aggregate.total",
    "power.limit",
    "power.default_limit",
    "clocks.max.sm",
    "pcie.link.gen.max",
    "pcie.link.width.max",
)
# Of a card that works: idle, it lowers clocks and links.
LOAD_FIELDS = (
    "uuid",
    "clocks.sm",
    "power.draw",
    "temperature.gpu",
    "pcie.link.gen.current",
    "pcie.link.width.current",
    # The name since driver 535, and the one before.
    "clocks_event_reasons.active",
    "clocks_throttle_reasons.active",
)
REMAPPED_FIELDS = (
    "gpu_uuid",
    "remapped_rows.correctable",
    "remapped_rows.uncorrectable",
    "remapped_rows.pending",
    "remapped_rows.failure",
)
PACKAGES = re.compile(
    r"(jax|jaxlib|flax|optax|orbax-checkpoint|jax-cuda\d+-plugin"
    r"|nvidia-(cudnn|nccl|cublas|cuda-runtime)(-cu\d+)?)$"
)
# As nvml.h has them.
REASONS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}


def cards() -> list[Facts]:
    """This process's cards in CUDA's order: nvidia-smi's fields, remapped rows, and `links`."""
    joined = launch.detect()
    ordinals = None if joined is None else launch.gpus_of(joined)
    rows = [row for row in gpu_facts.query(CARD_FIELDS) if {"index", "uuid"} <= row.keys()]
    own = gpu_facts.visible(rows, ordinals=ordinals)
    if not own:
        return []
    histories = gpu_facts.query(REMAPPED_FIELDS, of="remapped-rows")
    remapped = {row.get("gpu_uuid"): row for row in histories}
    matrix = links(gpu_facts.topology())
    return [
        {**row, **remapped.get(row["uuid"], {}), "links": matrix.get(f"GPU{row['index']}", {})}
        for row in own
    ]


def links(topology: str) -> dict[str, dict[str, str]]:
    """{GPU0: {GPU1: "NV18", NIC0: "PXB", "NUMA Affinity": "0", ...}} of `nvidia-smi topo -m`."""
    lines = re.sub(r"\x1b\[[\d;]*m", "", topology).splitlines()
    header: list[str] = []
    found = {}
    for line in lines:
        cells = [cell.strip() for cell in line.split("\t")]
        if not header and "GPU0" in cells:
            header = cells
        elif header and re.fullmatch(r"GPU\d+", cells[0]):
            pairs = zip(header[1:], cells[1:], strict=False)
            found[cells[0]] = {name: cell for name, cell in pairs if name and cell}
    return found


def reasons(mask: float | None) -> list[str]:
    """Why a card does not run at its highest clock, of nvidia-smi's mask."""
    return [name for bit, name in REASONS.items() if int(mask or 0) & bit]


class Load:
    """Context: what the cards say while something runs, by uuid; of several readings the worst.

    `clock_mhz`, `power_w`: the median; `temperature_c`: the highest; `reasons`: all that came up.
    """

    def __init__(self) -> None:
        self._rows: list[list[gpu_facts.Row]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="doctor", daemon=True)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        # Warm first: the clocks of the first moment are none of the load's.
        while not self._stop.wait(0.5):
            rows = gpu_facts.query(LOAD_FIELDS)
            if not rows:
                return
            if not self._stop.is_set():
                self._rows.append(rows)

    def of(self, uuid: str) -> Facts:
        """{} where nothing was read."""
        rows = [row for reading in self._rows for row in reading if row.get("uuid") == uuid]
        return summary(rows)


def summary(rows: Sequence[gpu_facts.Row]) -> Facts:
    """Several readings of one card as one."""
    if not rows:
        return {}

    def values(field: str) -> list[float]:
        found = [gpu_facts.number(row.get(field)) for row in rows]
        return sorted(value for value in found if value is not None)

    def middle(field: str) -> float | None:
        return found[len(found) // 2] if (found := values(field)) else None

    masks = [
        int(mask)
        for name in ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
        for mask in values(name)
    ]
    active = {name for mask in masks for name in reasons(mask)}
    return {
        "clock_mhz": middle("clocks.sm"),
        "power_w": middle("power.draw"),
        "temperature_c": max(values("temperature.gpu"), default=None),
        "pcie_gen": max(values("pcie.link.gen.current"), default=None),
        "pcie_width": max(values("pcie.link.width.current"), default=None),
        "reasons": [name for name in REASONS.values() if name in active],
    }


def libraries() -> dict[str, str]:
    """Name: version, of what a run compiles with and calls."""
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    found = {name: version for name, version in sorted(installed.items()) if PACKAGES.match(name)}
    return {"python": platform.python_version()} | found | dict(_loaded())


def _loaded() -> Iterator[tuple[str, str]]:
    """What the CUDA plugin has loaded, which need not be what was installed beside it."""
    if jax.default_backend() != "gpu":
        return
    try:
        from jax._src.lib import cuda_versions  # not public; only what it tells is lost without
    except ImportError:
        return
    for name, call in (
        ("CUDA driver API", "cuda_driver_get_version"),
        ("CUDA", "cuda_runtime_get_version"),
        ("cuDNN", "cudnn_get_version"),
        ("cuBLAS", "cublas_get_version"),
        ("NCCL", "nccl_get_version"),
    ):
        try:
            yield name, str(getattr(cuda_versions, call)())
        except Exception:  # a library that is not there, or an older plugin without the call
            continue


def host(root: Path = Path("/sys")) -> Facts:
    """Cores, NUMA nodes, memory, network cards and limits of this process's host."""
    return {
        "cores": os.cpu_count(),
        "own_cores": len(os.sched_getaffinity(0)),
        "numa_nodes": len(list((root / "devices/system/node").glob("node[0-9]*"))),
        "memory_gib": host_memory_gib(),
        "kernel": platform.release(),
        "nics": nics(root),
    }


def nics(root: Path) -> list[Facts]:
    """The RDMA ports that are up: `name`, `gbps` (Gb/s), `layer` (InfiniBand or Ethernet)."""
    found = []
    for port in sorted((root / "class/infiniband").glob("*/ports/*")):
        try:
            rate = re.match(r"([\d.]+) Gb/sec", (port / "rate").read_text())
            is_up = "ACTIVE" in (port / "state").read_text()
            layer = (port / "link_layer").read_text().strip()
        except OSError:
            continue
        if is_up and rate:
            name = f"{port.parents[1].name}:{port.name}"
            found.append({"name": name, "gbps": float(rate[1]), "layer": layer})
    return found
