"""Where the time of a training step goes, read from a trace that `jax.profiler` took of GPUs.

    step = anatomy(read("runs/x/profile"))
    print(table(step), step.exposed_communication_share)

The wall time of a step on one GPU is divided without remainder: each instant belongs to the kernels that compute then,
in equal parts if there are several; if none computes, to copies and zero fill; then to collectives; then to copies from
and to the host; else it is idle. Collectives behind computing or copies are hidden: they cost no time of their own, and
are given apart.

A step lasts from one kernel of the program to the same kernel of the next run, so the host's delays between runs count,
and runs that the trace holds in part do not. XLA launches kernels from CUDA graphs while a profile is taken, too; the
trace does not say what those belong to, jaxscale/hlo_names.py finds it.
"""

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxscale.perf.categories import CATEGORIES, COMPUTE, Kernel, classify, collective_kind
from jaxscale.perf.trace import Events, Trace
from jaxscale.perf.trace import read as read


@dataclass(frozen=True)
class Collective:
    """Of one step: launches, their time, the part of it that nothing hid, bytes of whole messages (None: unknown).

    transfer_seconds: for each call the time of the GPU that took least, which waited least for the others; the rest of
    `seconds` is waiting. None if the trace has one GPU, or not the same calls of all.
    """

    kind: str
    calls: float
    seconds: float
    exposed_seconds: float
    bytes: float | None
    transfer_seconds: float | None


@dataclass(frozen=True)
class KernelTime:
    """Of one step; num_ops: how many HLO instructions launch this kernel under this op name, hlo_op being one."""

    name: str
    hlo_op: str
    num_ops: int
    op_name: str
    category: str
    calls: float
    seconds: float


@dataclass(frozen=True)
class Load:
    """Of one GPU in a step: the time in which it computes, and that in which it does nothing but communicate."""

    device: int
    compute_seconds: float
    exposed_communication_seconds: float


@dataclass(frozen=True)
class Anatomy:
    """The mean step of one GPU. `seconds`: by key of CATEGORIES, adding up to step_seconds."""

    name: str
    module: str
    device: int
    loads: tuple[Load, ...]  # of all GPUs
    num_steps: int
    step_seconds: float
    fastest_step_seconds: float
    slowest_step_seconds: float
    seconds: dict[str, float]
    hidden_communication_seconds: float
    graph_seconds: float  # of computing kernels that CUDA graphs launched
    unattributed_seconds: (
        float  # of computing kernels whose op name is not known: no scope can claim them
    )
    collectives: tuple[Collective, ...]
    kernels: tuple[KernelTime, ...]  # longest first

    @property
    def exposed_communication_share(self) -> float:
        """The part of the step in which collectives run and nothing computes."""
        return self.seconds["communication_exposed"] / self.step_seconds


def anatomy(trace: Trace, device: int | None = None) -> Anatomy:
    """Divides the mean step of one GPU: `device`, or the one that computes longest, for which the others wait.

    A matrix product of the loss is "loss_gemm"; what is under the scope "optimizer" is that, a matrix product too.
    Raises ValueError for a device that the trace does not hold.
    """
    divisions = {number: _divide(events) for number, events in trace.devices.items()}
    loads = tuple(
        Load(number, each.compute, sum(each.exposed.values())) for number, each in divisions.items()
    )
    if device is None:
        device = max(loads, key=lambda load: load.compute_seconds).device
    if device not in trace.devices:
        raise ValueError(
            f"device={device} is not in {trace.name}, which holds {', '.join(map(str, trace.devices))}"
        )
    division = divisions[device]
    step_seconds = np.diff(division.marks) * 1e-9
    launches = _launches(trace.devices[device], division)
    computing = [each for each in launches if each.group in COMPUTE]
    return Anatomy(
        name=trace.name,
        module=division.module,
        device=device,
        loads=loads,
        num_steps=len(step_seconds),
        step_seconds=float(step_seconds.mean()),
        fastest_step_seconds=float(step_seconds.min()),
        slowest_step_seconds=float(step_seconds.max()),
        seconds=division.seconds,
        hidden_communication_seconds=division.hidden,
        graph_seconds=sum(each.seconds for each in computing if each.kernel.graph),
        unattributed_seconds=sum(each.seconds for each in computing if not each.kernel.op_name),
        collectives=_collectives(
            launches, division.exposed, trace.message_bytes, _transfers(trace, device, division)
        ),
        kernels=_kernel_times(launches),
    )


def partition(
    events: Events, groups: Sequence[str], *, begin: float, end: float
) -> tuple[dict[str, float], float, float]:
    """Divides the time from `begin` to `end` among the groups of kernels, as the module's docstring says; nanoseconds.

    groups: for each of events.kernels one of COMPUTE, "copy", "transfer", or else a kind of collective. Returns the
    time of each group, the time of hidden collectives, and the idle time; the first and the last add up to end - begin.
    Sorts the launches' ends once: 0.1 s for 100,000 of them.
    """
    names, group_K = np.unique(np.array(groups), return_inverse=True)
    tier_G = np.array([_tier(name) for name in names], dtype=int)
    start_E, end_E = np.clip(events.start_E, begin, end), np.clip(events.end_E, begin, end)
    times = np.concatenate([[begin], start_E, end_E, [end]])
    change = np.zeros((len(times), len(names)), np.int32)
    which = np.arange(1, len(start_E) + 1)
    change[which, group_K[events.index_E]] = 1
    change[which + len(start_E), group_K[events.index_E]] = -1
    order = np.argsort(times, kind="stable")
    # Between neighbours of the ordered times the same events run throughout.
    length_I, running_IG = np.diff(times[order]), np.cumsum(change[order], axis=0)[:-1]
    running_IT = np.stack([running_IG[:, tier_G == tier].sum(1) for tier in range(4)], axis=1)
    time_G, is_free_I = np.zeros(len(names)), np.ones(len(length_I), bool)
    for tier in range(4):
        share_I = np.where(is_free_I, length_I, 0) / np.maximum(running_IT[:, tier], 1)
        time_G[tier_G == tier] = share_I @ running_IG[:, tier_G == tier]
        is_free_I &= running_IT[:, tier] == 0
    hidden = length_I[(running_IT[:, 2] > 0) & (running_IT[:, :2].sum(1) > 0)].sum()
    return (
        dict(zip(names.tolist(), time_G.tolist(), strict=True)),
        float(hidden),
        float(length_I[is_free_I].sum()),
    )


def _tier(group: str) -> int:
    """An instant belongs to the lowest tier that runs."""
    return 0 if group in COMPUTE else {"copy": 1, "transfer": 3}.get(group, 2)


def find_steps(events: Events) -> tuple[str, np.ndarray]:
    """The program that takes most of the GPU's time; where its complete steps begin and the last one ends, nanoseconds.

    Steps are told apart by a kernel that runs once in each: between any two of its launches lie all of the program's
    kernels. If there is none, the trace holds one run, and the step lasts from its first kernel to the end of its last.
    """
    module, is_main_K = _main_module(events)
    is_main_E = is_main_K[events.index_E]
    keys, index_M = np.unique(_recorded_K(events)[events.index_E[is_main_E]], return_inverse=True)
    start_M = events.start_E[is_main_E]
    # A few that the profiler dropped may be missing; not so many that a microbatch passes for a step.
    enough = len(keys) - min(4, len(keys) // 50)
    best = np.empty(0)
    for key in np.unique(index_M, return_index=True)[1].argsort():
        is_mark_M = index_M == key
        num_windows = int(is_mark_M.sum()) - 1
        if num_windows < max(1, len(best)) or num_windows * enough > len(index_M):
            continue
        window_M = np.cumsum(is_mark_M) - 1
        is_inside_M = (window_M >= 0) & (window_M < num_windows)
        has_WK = np.zeros((num_windows, len(keys)), bool)
        has_WK[window_M[is_inside_M], index_M[is_inside_M]] = True
        if has_WK.sum(1).min() >= enough:
            best = start_M[is_mark_M]
    return module, best if len(best) else np.array([start_M.min(), events.end_E[is_main_E].max()])


def table(anatomies: Anatomy | Sequence[Anatomy], *, top: int = 20) -> str:
    """Text: steps by category, of two traces the difference too; then collectives and the `top` kernels of each."""
    anatomies = _many(anatomies)
    lines = [f"[{number}] {_title(each)}" for number, each in enumerate(anatomies, 1)]
    lines += ["", _heading(anatomies)]
    for category, label in CATEGORIES.items():
        lines.append(_row(label, anatomies, [each.seconds[category] for each in anatomies]))
    lines.append(_row("the step", anatomies, [each.step_seconds for each in anatomies]))
    lines.append(
        _row(
            "besides: collectives, hidden",
            anatomies,
            [each.hidden_communication_seconds for each in anatomies],
        )
    )
    for number, each in enumerate(anatomies, 1):
        lines += [
            "",
            f"[{number}] {each.name}",
            *_notes(each),
            *_collective_lines(each),
            *_kernel_lines(each, top),
        ]
    return "\n".join(lines)


def plot(anatomies: Anatomy | Sequence[Anatomy], path: str | Path) -> None:
    """Writes a PNG: for each trace a bar of the categories, and beside it one of the collectives, hidden ones hatched.

    Raises ValueError if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"drawing needs matplotlib ({error}): pip install 'jaxscale[plot]'"
        ) from None
    anatomies = _many(anatomies)
    figure = Figure(figsize=(4.5 + 2 * len(anatomies), 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors = {
        category: f"C{number}" for number, category in enumerate(CATEGORIES) if category != "idle"
    }
    # Matplotlib has ten colours; the eleventh row is nothing at all.
    colors |= {"idle": "whitesmoke"}
    highest = max(each.step_seconds for each in anatomies) * 1e3
    bottom = np.zeros(len(anatomies))
    places = np.arange(len(anatomies))
    for category, label in CATEGORIES.items():
        height = np.array([each.seconds[category] * 1e3 for each in anatomies])
        bars = axes.bar(
            places, height, 0.5, bottom, color=colors[category], edgecolor="white", label=label
        )
        # Thinner parts than 3% of the highest bar have no room for a number.
        axes.bar_label(
            bars,
            [f"{ms:,.1f}" if ms > 0.03 * highest else "" for ms in height],
            label_type="center",
            fontsize=8,
        )
        bottom += height
    exposed = np.array([each.seconds["communication_exposed"] * 1e3 for each in anatomies])
    hidden = np.array([each.hidden_communication_seconds * 1e3 for each in anatomies])
    color = colors["communication_exposed"]
    axes.bar(places + 0.35, exposed, 0.12, color=color)
    axes.bar(
        places + 0.35,
        hidden,
        0.12,
        exposed,
        color="white",
        edgecolor=color,
        hatch="///",
        label="collectives, hidden",
    )
    axes.set_xticks(
        places, [f"{each.name[-40:]}\n{each.step_seconds * 1e3:,.1f} ms" for each in anatomies]
    )
    axes.set_ylabel("milliseconds of a step")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8)
    figure.savefig(path, format="png", dpi=150)


@dataclass(frozen=True)
class _Division:
    """Of one GPU, in seconds of a step; exposed: by kind of collective."""

    module: str
    marks: np.ndarray
    groups: list[str]
    seconds: dict[str, float]
    exposed: dict[str, float]
    hidden: float

    @property
    def compute(self) -> float:
        return sum(self.seconds[category] for category in COMPUTE)


def _divide(events: Events) -> _Division:
    groups = [_group(kernel) for kernel in events.kernels]
    module, marks = find_steps(events)
    time, hidden, idle = partition(events, groups, begin=marks[0], end=marks[-1])
    scale = 1e-9 / (len(marks) - 1)  # nanoseconds of the whole to seconds of a step
    exposed = {group: value * scale for group, value in time.items() if group not in CATEGORIES}
    seconds = {category: time.get(category, 0.0) * scale for category in CATEGORIES}
    seconds |= {"communication_exposed": sum(exposed.values()), "idle": idle * scale}
    return _Division(module, marks, groups, seconds, exposed, hidden * scale)


@dataclass(frozen=True)
class _Launches:
    kernel: Kernel
    group: str  # a category, or a kind of collective
    calls: float  # of a step
    seconds: float


@functools.cache
def _group(kernel: Kernel) -> str:
    category = classify(kernel)
    return collective_kind(kernel) if category == "communication" else category


def _main_module(events: Events) -> tuple[str, np.ndarray]:
    """The program that takes most time and which kernels are its own; all, if most time is of kernels without one."""
    time = defaultdict(float)
    for index, value in enumerate(np.bincount(events.index_E, events.end_E - events.start_E)):
        time[events.kernels[index].module] += value
    module = max(time, key=lambda name: time[name])
    return module, np.array([not module or kernel.module == module for kernel in events.kernels])


def _recorded_K(events: Events) -> np.ndarray:
    """Numbers of the kernels, the same for those that differ in names which were found: not each run finds all."""
    recorded = [
        replace(kernel, hlo_op="", op_name="") if kernel.graph else kernel
        for kernel in events.kernels
    ]
    numbers = {kernel: number for number, kernel in enumerate(recorded)}
    return np.array([numbers[kernel] for kernel in recorded])


def _are_inside(start_E: np.ndarray, marks: np.ndarray) -> np.ndarray:
    return (start_E >= marks[0]) & (start_E < marks[-1])


def _launches(events: Events, division: _Division) -> list[_Launches]:
    """Of a mean step: launches from the first mark until before the last, each with its whole length."""
    groups, marks = division.groups, division.marks
    is_inside_E = _are_inside(events.start_E, marks)
    index, num_steps = events.index_E[is_inside_E], len(marks) - 1
    calls = np.bincount(index, minlength=len(groups)) / num_steps
    seconds = np.bincount(index, (events.end_E - events.start_E)[is_inside_E], len(groups)) * (
        1e-9 / num_steps
    )
    rows = zip(events.kernels, groups, calls.tolist(), seconds.tolist(), strict=True)
    return [_Launches(*row) for row in rows if row[2]]


def _transfers(trace: Trace, device: int, division: _Division) -> dict[str, float | None]:
    """By kind of collective, as Collective has it."""
    events, marks = trace.devices[device], division.marks
    found: dict[str, float | None] = dict.fromkeys(
        division.exposed, 0.0 if len(trace.devices) > 1 else None
    )
    for kernel, kind in zip(events.kernels, division.groups, strict=True):
        if (before := found.get(kind)) is None:
            continue
        start_C, end_C = (
            time_C[_are_inside(events.of(kernel)[0], marks)] for time_C in events.of(kernel)
        )
        lengths_GC = [
            _lengths_of_same(start_C, end_C, *each.of(kernel)) for each in trace.devices.values()
        ]
        time = float(np.min(lengths_GC, axis=0).sum()) * 1e-9 / (len(marks) - 1)
        found[kind] = None if np.isnan(time) else before + time
    return found


def _lengths_of_same(start_C, end_C, start_X, end_X) -> np.ndarray:
    """Of a collective's calls C the lengths on another GPU, of calls X: no call begins before all have ended the last."""
    same_C = np.searchsorted(end_X, start_C, side="right")
    # Beyond the last: a call that never begins.
    length_X, start_X = np.append(end_X - start_X, np.nan), np.append(start_X, np.inf)
    return np.where(start_X[same_C] < end_C, length_X[same_C], np.nan)


def _collectives(
    launches, exposed: dict[str, float], message_bytes, transfers
) -> tuple[Collective, ...]:
    found = []
    for kind in sorted(exposed):
        of_kind = [each for each in launches if each.group == kind]
        sizes = [message_bytes.get((each.kernel.module, each.kernel.hlo_op)) for each in of_kind]
        known = [
            each.calls * size for each, size in zip(of_kind, sizes, strict=True) if size is not None
        ]
        found.append(
            Collective(
                kind,
                calls=sum(each.calls for each in of_kind),
                seconds=sum(each.seconds for each in of_kind),
                exposed_seconds=exposed[kind],
                bytes=sum(known) if len(known) == len(of_kind) else None,
                transfer_seconds=transfers[kind],
            )
        )
    return tuple(found)


def _kernel_times(launches) -> tuple[KernelTime, ...]:
    """One for each kernel and op name: the same place of unrolled layers counts together."""
    places = defaultdict(list)
    for each in launches:
        places[each.kernel.name, each.kernel.op_name, classify(each.kernel)].append(each)
    times = (
        KernelTime(
            name,
            hlo_op=same[0].kernel.hlo_op or same[0].kernel.graph,
            num_ops=len({each.kernel.hlo_op or each.kernel.graph for each in same}),
            op_name=op_name,
            category=category,
            calls=sum(each.calls for each in same),
            seconds=sum(each.seconds for each in same),
        )
        for (name, op_name, category), same in places.items()
    )
    return tuple(sorted(times, key=lambda each: -each.seconds))


def _many(anatomies: Anatomy | Sequence[Anatomy]) -> Sequence[Anatomy]:
    return [anatomies] if isinstance(anatomies, Anatomy) else anatomies


def _title(each: Anatomy) -> str:
    steps = "1 step" if each.num_steps == 1 else f"{each.num_steps} steps"
    spread = f"{each.fastest_step_seconds * 1e3:,.2f} to {each.slowest_step_seconds * 1e3:,.2f}"
    return f"{each.name}: {each.module or 'kernels'} on GPU {each.device} of {len(each.loads)}, {steps} of {spread} ms"


def _heading(anatomies: Sequence[Anatomy]) -> str:
    heads = "".join(f"{f'[{number}] ms':>13}   share" for number in range(1, len(anatomies) + 1))
    return f"{'a step':30}{heads}" + (
        f"{'[2] - [1] ms':>15}  change" if len(anatomies) == 2 else ""
    )


def _row(label: str, anatomies: Sequence[Anatomy], seconds: list[float]) -> str:
    cells = [
        f"{value * 1e3:13,.2f}{value / each.step_seconds:8.1%}"
        for value, each in zip(seconds, anatomies, strict=True)
    ]
    if len(seconds) == 2:
        before, after = seconds
        cells.append(
            f"{(after - before) * 1e3:+15,.2f}" + (f"{after / before - 1:+8.1%}" if before else "")
        )
    return f"{label:30}" + "".join(cells)


def _notes(each: Anatomy) -> Iterator[str]:
    if len(each.loads) > 1:
        loads = (
            f"{load.device}: {load.compute_seconds * 1e3:,.2f} + {load.exposed_communication_seconds * 1e3:,.2f}"
            for load in each.loads
        )
        yield f"computing + exposed collectives on each GPU, ms: {'; '.join(loads)}"
    if each.num_steps == 1:
        yield "one step only: trace more for a mean"
    if not any(each.seconds[category] for category in ("loss", "loss_gemm", "optimizer")):
        yield "no kernel is under a jax.named_scope 'loss' or 'optimizer': their time is in other rows"
    if each.graph_seconds > 0.02 * each.step_seconds:
        share = each.graph_seconds / each.step_seconds
        yield f"kernels of {share:.1%} of the step are of CUDA graphs: their names are those of the program's schedule"
    if each.unattributed_seconds > 0.02 * each.step_seconds:
        share = each.unattributed_seconds / each.step_seconds
        yield f"kernels of {share:.1%} of the step have no op name: they are in no scope's row, whatever they belong to"


def _collective_lines(each: Anatomy) -> Iterator[str]:
    heads = {
        "calls": 9,
        "ms": 11,
        "exposed ms": 12,
        "GB": 9,
        "GB/s": 8,
        "transfer ms": 13,
        "waiting ms": 12,
    }
    if len(each.loads) == 1:
        del heads["transfer ms"], heads["waiting ms"]
    if each.collectives:
        yield ""
        yield f"{'collectives of a step':24}" + "".join(
            f"{head:>{width}}" for head, width in heads.items()
        )
    for kind in each.collectives:
        cells = [
            f"{kind.calls:,.4g}",
            f"{kind.seconds * 1e3:,.2f}",
            f"{kind.exposed_seconds * 1e3:,.2f}",
        ]
        size, transfer = kind.bytes, kind.transfer_seconds
        cells += (
            ["-", "-"]
            if size is None
            else [f"{size / 1e9:.3f}", f"{size / 1e9 / kind.seconds:.1f}"]
        )
        cells += (
            ["-", "-"]
            if transfer is None
            else [f"{x * 1e3:,.2f}" for x in (transfer, kind.seconds - transfer)]
        )
        # Of one GPU the last two have no head.
        yield f"{kind.kind:24}" + "".join(
            f"{cell:>{width}}" for cell, width in zip(cells, heads.values(), strict=False)
        )


def _kernel_lines(each: Anatomy, top: int) -> Iterator[str]:
    yield ""
    yield f"{'ms':>9}{'calls':>8}  {'category':14}{'kernel':46}{'HLO operation':34}op name"
    for kernel in each.kernels[:top]:
        others = f" +{kernel.num_ops - 1}" if kernel.num_ops > 1 else ""
        yield (
            f"{kernel.seconds * 1e3:9,.2f}{kernel.calls:8,.4g}  {kernel.category:14}{kernel.name[:44]:46}"
            f"{kernel.hlo_op[:32] + others:34}{kernel.op_name[-60:]}"
        )
