"""Anatomies of a step as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.perf.anatomy import Anatomy
from jaxscale.perf.categories import CATEGORIES

# Matplotlib has ten colours; the eleventh row is nothing at all.
_COLORS = {category: f"C{number}" for number, category in enumerate(CATEGORIES)}
_COLORS["idle"] = "whitesmoke"
# Thinner parts of the highest bar have no room for a number.
_LEAST_LABELLED = 0.03


def plot(anatomies: Anatomy | Sequence[Anatomy], path: str | Path) -> None:
    """Writes a PNG: for each trace a bar of the categories, and beside it one of the collectives.

    Hidden collectives are hatched. Raises ValueError if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"drawing needs matplotlib ({error}): pip install 'jaxscale[plot]'"
        ) from None
    anatomies = [anatomies] if isinstance(anatomies, Anatomy) else anatomies
    figure = Figure(figsize=(4.5 + 2 * len(anatomies), 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_categories(axes, anatomies)
    _draw_collectives(axes, anatomies)
    labels = [f"{each.name[-40:]}\n{each.step_seconds * 1e3:,.1f} ms" for each in anatomies]
    axes.set_xticks(np.arange(len(anatomies)), labels)
    axes.set_ylabel("milliseconds of a step")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8)
    figure.savefig(path, format="png", dpi=150)


def _draw_categories(axes: Any, anatomies: Sequence[Anatomy]) -> None:
    highest = max(each.step_seconds for each in anatomies) * 1e3
    places, bottom = np.arange(len(anatomies)), np.zeros(len(anatomies))
    for category, label in CATEGORIES.items():
        height = np.array([each.seconds[category] * 1e3 for each in anatomies])
        look = {"color": _COLORS[category], "edgecolor": "white", "label": label}
        bars = axes.bar(places, height, 0.5, bottom, **look)
        labels = [f"{ms:,.1f}" if ms > _LEAST_LABELLED * highest else "" for ms in height]
        axes.bar_label(bars, labels, label_type="center", fontsize=8)
        bottom += height


def _draw_collectives(axes: Any, anatomies: Sequence[Anatomy]) -> None:
    exposed = np.array([each.seconds["communication_exposed"] * 1e3 for each in anatomies])
    hidden = np.array([each.hidden_communication_seconds * 1e3 for each in anatomies])
    places, color = np.arange(len(anatomies)) + 0.35, _COLORS["communication_exposed"]
    axes.bar(places, exposed, 0.12, color=color)
    look = {"color": "white", "edgecolor": color, "hatch": "///", "label": "collectives, hidden"}
    axes.bar(places, hidden, 0.12, exposed, **look)
