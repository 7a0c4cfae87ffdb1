"""Runs of several processes on this machine, through scripts/launch_local.py, seen from outside."""

import re
import sys
from pathlib import Path

from jaxscale.perf.records import read_records

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def command(num: int, *words: str) -> list[str]:
    """What starts scripts/train.py with these words in so many processes."""
    launcher, train = SCRIPTS / "launch_local.py", SCRIPTS / "train.py"
    return [sys.executable, str(launcher), "-n", str(num), "--", str(train), *words]


def losses(workdir: Path) -> dict[int, float]:
    """By step, as far as they are written."""
    records = read_records(workdir / "metrics.jsonl")
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def resumed(output: Path) -> int:
    """The step that a run says it went on from; 0 if it began anew."""
    found = re.search(r"continuing from the checkpoint of step (\d+)", output.read_text())
    return int(found[1]) if found else 0


def difference(found: dict[int, float], wanted: dict[int, float]) -> float:
    """The largest relative one between the losses of the same steps."""
    return max(abs(found[step] - loss) / abs(loss) for step, loss in wanted.items())
