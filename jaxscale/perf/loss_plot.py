"""Losses of runs beside each other: held-out losses as a table, and all of them as a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.perf.records import Record, steps_of

# Steps that a point of a curve is the mean of, as a share of the run's.
SMOOTHED = 0.01


def held_out(records: list[Record]) -> dict[int, float]:
    """Held-out losses by step, in nats a token."""
    return {record["step"]: record["eval_loss"] for record in records if "eval_loss" in record}


def table(runs: Mapping[str, list[Record]]) -> str:
    """The last held-out loss that all runs have, and by how much each is off the first run's.

    Raises ValueError where no step has been evaluated in all of them.
    """
    losses = {name: held_out(records) for name, records in runs.items()}
    common = set.intersection(*(set(of_run) for of_run in losses.values()))
    if not common:
        raise ValueError("no step was evaluated in all of these runs")
    step = max(common)
    first = next(iter(losses.values()))[step]
    lines = [f"held-out loss at step {step}, nats/token"]
    width = max(map(len, losses))
    for name, of_run in losses.items():
        skipped = sum(record.get("skipped", 0) for record in steps_of(runs[name]))
        lines.append(
            f"{name:{width}}  {of_run[step]:.5f}  {of_run[step] / first - 1:+.3%}"
            + f"  {skipped:.0f} steps skipped" * bool(skipped)
        )
    return "\n".join(lines)


def plot(runs: Mapping[str, list[Record]], path: str | Path) -> None:
    """Writes a PNG: training losses as lines, held-out ones as points, a colour a run.

    Raises ValueError if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"drawing needs matplotlib ({error}): pip install 'jaxscale[plot]'"
        ) from None
    figure = Figure(figsize=(9, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (name, records) in enumerate(runs.items()):
        _draw(axes, records, name=name, color=f"C{number}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats/token (points: held out)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150, bbox_inches="tight")


def _draw(axes: Any, records: list[Record], *, name: str, color: str) -> None:
    steps = [record for record in steps_of(records) if np.isfinite(record["loss"])]
    width = max(1, round(len(steps) * SMOOTHED))
    means = np.convolve([record["loss"] for record in steps], np.ones(width) / width, "valid")
    axes.plot([record["step"] for record in steps[width - 1 :]], means, color=color, label=name)
    of_run = held_out(records)
    axes.plot(list(of_run), list(of_run.values()), "o", color=color, markersize=4)
