"""Losses of runs beside each other: held-out losses as a table, and all of them as a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.perf.records import Record, steps_of

# Steps that a point of a curve is the mean of, as a share of the run's.
SMOOTHED = 0.01
# And of the differences between runs, which are small beside what batches differ by.
SMOOTHED_DIFFERENCE = 0.05


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

    Below them, by how much each is off the first run's. Raises ValueError if matplotlib is not
    installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"drawing needs matplotlib ({error}): pip install 'jaxscale[plot]'"
        ) from None
    figure = Figure(figsize=(9, 7))
    FigureCanvasAgg(figure)
    losses, differences = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    first = next(iter(runs.values()), [])
    for number, (name, records) in enumerate(runs.items()):
        of_run, color = training(records), f"C{number}"
        losses.plot(*_smooth(of_run, share=SMOOTHED), color=color, label=name)
        _points(losses, held_out(records), color=color)
        off = _off(of_run, training(first))
        differences.plot(*_smooth(off, share=SMOOTHED_DIFFERENCE), color=color)
        _points(differences, _off(held_out(records), held_out(first)), color=color)
    losses.set_yscale("log")
    losses.set_ylabel("loss, nats/token (points: held out)")
    losses.legend()
    differences.set_ylabel(f"% off {next(iter(runs), '')}")
    differences.set_xlabel("step")
    for axes in (losses, differences):
        axes.grid(alpha=0.3, which="both")
    figure.savefig(path, format="png", dpi=100, bbox_inches="tight")


def training(records: list[Record]) -> dict[int, float]:
    """Training losses by step, those that are finite."""
    steps = (record for record in steps_of(records) if np.isfinite(record["loss"]))
    return {record["step"]: record["loss"] for record in steps}


def _off(mine: Mapping[int, float], first: Mapping[int, float]) -> dict[int, float]:
    """By how many per cent, at the steps that both have."""
    return {step: 100 * (mine[step] / first[step] - 1) for step in mine if step in first}


def _smooth(values: Mapping[int, float], *, share: float) -> tuple[list[int], Any]:
    """The steps and running means over this share of them."""
    width = max(1, round(len(values) * share))
    if not values:
        return [], []
    means = np.convolve(list(values.values()), np.ones(width) / width, "valid")
    return list(values)[width - 1 :], means


def _points(axes: Any, values: Mapping[int, float], *, color: str) -> None:
    axes.plot(list(values), list(values.values()), "o", color=color, markersize=4)
