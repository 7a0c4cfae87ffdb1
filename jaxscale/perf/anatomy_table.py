"""Anatomies of a step as text, side by side."""

from collections.abc import Iterator, Sequence

from jaxscale.perf.anatomy import Anatomy, Collective
from jaxscale.perf.categories import CATEGORIES


def table(anatomies: Anatomy | Sequence[Anatomy], *, top: int = 20) -> str:
    """Steps by category, of two traces the difference too; then of each collectives and launches.

    top: so many launches.
    """
    anatomies = [anatomies] if isinstance(anatomies, Anatomy) else anatomies
    lines = [f"[{number}] {_title(each)}" for number, each in enumerate(anatomies, 1)]
    lines += ["", _heading(anatomies), *_rows(anatomies)]
    for number, each in enumerate(anatomies, 1):
        lines += ["", f"[{number}] {each.name}"]
        lines += [*_notes(each), *_collective_lines(each), *_launch_lines(each, top)]
    return "\n".join(lines)


def _title(each: Anatomy) -> str:
    steps = "1 step" if each.num_steps == 1 else f"{each.num_steps} steps"
    spread = f"{each.fastest_step_seconds * 1e3:,.2f} to {each.slowest_step_seconds * 1e3:,.2f}"
    return (
        f"{each.name}: {each.module or 'kernels'} on GPU {each.device} of {len(each.loads)}, "
        f"{steps} of {spread} ms"
    )


# Steps by category.


def _heading(anatomies: Sequence[Anatomy]) -> str:
    heads = "".join(f"{f'[{number}] ms':>13}   share" for number in range(1, len(anatomies) + 1))
    difference = f"{'[2] - [1] ms':>15}  change" if len(anatomies) == 2 else ""
    return f"{'a step':30}{heads}{difference}"


def _rows(anatomies: Sequence[Anatomy]) -> Iterator[str]:
    for category, label in CATEGORIES.items():
        yield _row(label, anatomies, seconds=[each.seconds[category] for each in anatomies])
    yield _row("the step", anatomies, seconds=[each.step_seconds for each in anatomies])
    hidden = [each.hidden_communication_seconds for each in anatomies]
    yield _row("besides: collectives, hidden", anatomies, seconds=hidden)


def _row(label: str, anatomies: Sequence[Anatomy], *, seconds: list[float]) -> str:
    cells = [
        f"{value * 1e3:13,.2f}{value / each.step_seconds:8.1%}"
        for value, each in zip(seconds, anatomies, strict=True)
    ]
    if len(seconds) == 2:
        before, after = seconds
        change = f"{after / before - 1:+8.1%}" if before else ""
        cells.append(f"{(after - before) * 1e3:+15,.2f}{change}")
    return f"{label:30}" + "".join(cells)


# What is told of one.


def _notes(each: Anatomy) -> Iterator[str]:
    if len(each.loads) > 1:
        loads = "; ".join(
            f"{load.device}: {load.compute_seconds * 1e3:,.2f} + "
            f"{load.exposed_communication_seconds * 1e3:,.2f}"
            for load in each.loads
        )
        yield f"computing + exposed collectives on each GPU, ms: {loads}"
    if each.num_steps == 1:
        yield "one step only: trace more for a mean"
    if not any(each.seconds[category] for category in ("loss", "loss_gemm", "optimizer")):
        yield (
            "no kernel is under a jax.named_scope 'loss' or 'optimizer': their time is in other "
            "rows"
        )
    if (share := each.graph_seconds / each.step_seconds) > 0.02:
        yield (
            f"kernels of {share:.1%} of the step are of CUDA graphs: their names are those of the "
            "program's schedule"
        )
    if (share := each.unattributed_seconds / each.step_seconds) > 0.02:
        yield (
            f"kernels of {share:.1%} of the step have no op name: they are in no scope's row, "
            "whatever they belong to"
        )


_COLUMNS = {"calls": 9, "ms": 11, "exposed ms": 12, "GB": 9, "GB/s": 8}
# Columns that need the other GPUs.
_WAITING_COLUMNS = {"transfer ms": 13, "waiting ms": 12}


def _collective_lines(each: Anatomy) -> Iterator[str]:
    widths = _COLUMNS if len(each.loads) == 1 else _COLUMNS | _WAITING_COLUMNS
    if each.collectives:
        yield ""
        yield _aligned("collectives of a step", widths, cells=list(widths))
    for collective in each.collectives:
        cells = _collective_cells(collective)[: len(widths)]
        yield _aligned(collective.kind, widths, cells=cells)


def _aligned(label: str, widths: dict[str, int], *, cells: list[str]) -> str:
    right = (f"{cell:>{width}}" for cell, width in zip(cells, widths.values(), strict=True))
    return f"{label:24}" + "".join(right)


def _collective_cells(each: Collective) -> list[str]:
    size, transfer = each.bytes, each.transfer_seconds
    sizes = transfers = ["-", "-"]
    if size is not None:
        sizes = [f"{size / 1e9:.3f}", f"{size / 1e9 / each.seconds:.1f}"]
    if transfer is not None:
        transfers = [f"{value * 1e3:,.2f}" for value in (transfer, each.seconds - transfer)]
    times = [f"{value * 1e3:,.2f}" for value in (each.seconds, each.exposed_seconds)]
    return [f"{each.calls:,.4g}", *times, *sizes, *transfers]


def _launch_lines(each: Anatomy, top: int) -> Iterator[str]:
    yield ""
    yield f"{'ms':>9}{'calls':>8}  {'category':14}{'kernel':46}{'HLO operation':34}op name"
    for launch in each.launches[:top]:
        others = f" +{launch.num_ops - 1}" if launch.num_ops > 1 else ""
        yield (
            f"{launch.seconds * 1e3:9,.2f}{launch.calls:8,.4g}  {launch.category:14}"
            f"{launch.name[:44]:46}{launch.hlo_op[:32] + others:34}{launch.op_name[-60:]}"
        )
