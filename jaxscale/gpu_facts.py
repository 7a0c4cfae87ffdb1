"""What nvidia-smi tells of this host's GPUs, without touching them: fields, and who uses them.

A host without a driver has no GPUs. Figures that a card has not ("[N/A]") are None.
"""

import csv
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# nvidia-smi takes 1 s a GPU where no daemon keeps the driver loaded.
PATIENCE_SECONDS = 60

Row = dict[str, str]

APPS = ("gpu_uuid", "pid", "process_name", "used_gpu_memory")


def query(fields: Sequence[str], *, of: str = "gpu") -> list[Row]:
    """A row for each GPU, {field: text}; with of="compute-apps" for each process that computes.

    A field that this driver does not know is left out of the rows. Empty without nvidia-smi.
    """
    known = list(fields)
    while known:
        said, text = _ask(f"--query-{of}={','.join(known)}", "--format=csv,noheader,nounits")
        if said:
            return parse(text, known)
        unknown = re.search(r'Field "([^"]+)" is not a valid field', text)
        if unknown is None or unknown[1] not in known:
            return []
        known.remove(unknown[1])
    return []


def parse(text: str, fields: Sequence[str]) -> list[Row]:
    """Rows of what nvidia-smi prints as csv; lines of another length are none of them."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [
        dict(zip(fields, map(str.strip, row), strict=True))
        for row in rows
        if len(row) == len(fields)
    ]


def number(text: str | None) -> float | None:
    """What a field says, also as 0x40; None for "[N/A]", "[Not Supported]" and no field."""
    text = (text or "").strip()
    try:
        return float(int(text, 16)) if text.startswith("0x") else float(text)
    except ValueError:
        return None


def apps() -> list[dict[str, Any]]:
    """The processes that compute: `gpu_uuid`, `pid`, `name`, `mib` (None where it is not told).

    In a container these may be none, or have the numbers that they have outside.
    """
    return [
        {
            "gpu_uuid": row["gpu_uuid"],
            "pid": int(row["pid"]),
            "name": Path(row["process_name"]).name or row["process_name"],
            "mib": number(row["used_gpu_memory"]),
        }
        for row in query(APPS, of="compute-apps")
        if len(row) == len(APPS) and row["pid"].isdigit()
    ]


def visible(
    rows: Sequence[Row],
    environ: Mapping[str, str] = os.environ,
    *,
    ordinals: Sequence[int] | None = None,
) -> list[Row]:
    """Those that a process sees, in CUDA's order. rows: with `index` and `uuid`.

    ordinals: which of them are its own; None: all. A slice of a card (MIG) is no row: the card is.
    """
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        seen = list(rows)
    else:
        names = [name.strip() for name in named.split(",") if name.strip()]
        found = [next((row for row in rows if _is(row, name)), None) for name in names]
        seen = [row for row in found if row is not None]
    return seen if ordinals is None else [seen[n] for n in ordinals if n < len(seen)]


def _is(row: Row, name: str) -> bool:
    """A number, or the beginning of a uuid, as CUDA takes it."""
    if name.isdigit():
        return row.get("index") == name
    return name.startswith("GPU-") and row.get("uuid", "").startswith(name)


def topology() -> str:
    """The matrix of `nvidia-smi topo -m`; empty where there is none."""
    said, text = _ask("topo", "-m")
    return text if said else ""


def _ask(*words: str) -> tuple[bool, str]:
    """Whether it could say, and what it printed."""
    command = ["nvidia-smi", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False, ""
    return done.returncode == 0, done.stdout + ("" if done.returncode == 0 else done.stderr)
