"""A pipeline's timetable as a picture."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.parallel.schedules import LETTERS, Kind, Table

NAMES = {
    Kind.FORWARD: "forward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
    Kind.BACKWARD: "both gradients",
}


def plot(table: Table, path: str | Path) -> None:
    """Writes a PNG: a row a stage, ops as long as they take, chunks in shades.

    Raises ValueError if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"drawing needs matplotlib ({error}): pip install 'jaxscale[plot]'"
        ) from None
    shape = table.shape
    figure = Figure(figsize=(max(8, len(table.kind) / 3), 1.5 + shape.num_stages / 2))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for stage in range(shape.num_stages):
        _draw_stage(axes, table, stage=stage)
    axes.set_yticks(range(shape.num_stages), [f"stage {s}" for s in range(shape.num_stages)])
    axes.invert_yaxis()
    axes.set_xlabel("time, in forward passes of a stage")
    axes.set_title(f"{shape.name}: bubble {table.bubble():.1%}")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), ncols=4, fontsize=8, loc="upper right")
    figure.savefig(path, format="png", dpi=150, bbox_inches="tight")


def _draw_stage(axes: Any, table: Table, *, stage: int) -> None:
    begin, lengths = table.times()
    for tick in np.nonzero(table.kind[:, stage])[0]:
        kind, chunk = Kind(table.kind[tick, stage]), int(table.chunk[tick, stage])
        shade = 1 - 0.6 * chunk / table.shape.num_chunks
        length = lengths[tick, stage]
        axes.barh(
            stage,
            length,
            left=begin[tick, stage],
            height=0.9,
            color=f"C{int(kind)}",
            alpha=shade,
            edgecolor="white",
            label=NAMES[kind],
        )
        text = f"{LETTERS[kind]}{table.microbatch[tick, stage]}"
        place = begin[tick, stage] + length / 2
        axes.text(place, stage, text, ha="center", va="center", fontsize=6)
