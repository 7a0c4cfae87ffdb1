"""Where the time of a training step goes, read from a trace that `jax.profiler` took of GPUs.

    step = anatomy(read("runs/x/profile"))
    print(table(step), step.exposed_communication_share)

The wall time of a step on one GPU is divided without remainder: each instant belongs to the kernels that compute then,
in equal parts if there are several; if none computes, to copies and zero fill; then to collectives; then to copies from
and to the host; else it is idle. Collectives behind computing or copies are hidden: they cost no time of their own, and
are given apart.

A step lasts from one kernel of the program to the same kernel of the next run, so the host's delays between runs count,
and runs that the trace holds in part do not. XLA runs no CUDA graphs while a profile is taken: a step whose kernels are
short can show more idle time than it has without one.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxscale.xplane import Events, Kernel, Trace
from jaxscale.xplane import read as read

# The rows of a table, in its order.
CATEGORIES = {
    "gemm": "matrix products",
    "attention": "attention",
    "elementwise": "element-wise, norms, the rest",
    "copy": "copies and zero fill",
    "embedding": "embedding",
    "loss_gemm": "loss: matrix products",
    "loss": "loss: the rest",
    "optimizer": "optimizer",
    "communication_exposed": "collectives, exposed",
    "transfer": "host copies, alone",
    "idle": "idle",
}
COMPUTE = ("gemm", "attention", "elementwise", "embedding", "loss_gemm", "loss", "optimizer")


def _scope(name: str) -> str:
    """Matches `jax.named_scope(name)` in an op name, also as transpose(jvp(name)) or merged with others by a colon."""
    return rf"(?:^|[/(:]){name}(?:$|[/):])"


_GEMM = r"nvjet|gemm|gemv|cutlass|xmma|cublas|splitk"
# Of fusions: those that XLA names after moving data alone. `wrapped_` ones are of a single operation.
_COPY = (
    r"^Mem(cpy|set)|^copy[._-]?\d*$"
    r"|^wrapped_(copy|slice|transpose|concatenate|pad|broadcast|dynamic_(update_)?slice)[._]?\d*$"
    r"|^(loop_|input_)?(copy|slice|transpose|broadcast|dynamic_(update_)?slice)_fusion[._]?\d*$"
)
# The first line that fits a kernel says what it is: a pattern of its name or its HLO operation, and one of its op name
# (the named scopes it was traced under, and the primitive); None fits all.
RULES: tuple[tuple[str, str | None, str | None], ...] = (
    ("communication", r"nccl|nvshmem|MemcpyP2P|all_?reduce_?kernel|MultiGpuBarrier", None),
    ("communication", r"^(ragged.)?all[-_](gather|reduce|to)|^reduce[-_]scatter|^collective[-_]|^psum", None),
    ("transfer", r"^Memcpy(H2D|D2H)", None),
    ("attention", r"sdpa|fmha|flash|dot_do_o|convert_dq|dot_product_attention", None),
    ("attention", None, rf"{_scope('attention')}|dot_product_attention"),
    ("loss_gemm", _GEMM, _scope("loss")),
    ("loss", None, _scope("loss")),
    ("optimizer", None, _scope("optimizer")),
    ("embedding", None, _scope("embedding")),
    ("gemm", _GEMM, None),
    ("copy", _COPY, None),
    ("elementwise", None, None),
)
# By the HLO operation, which may be named after the primitive; else by NCCL's kernel, where sends serve three kinds.
COLLECTIVE_KINDS = {
    "ragged-all-to-all": r"ragged.all.to.all",
    "all-to-all": r"all.to.all",
    "all-gather": r"all.?gather",
    "reduce-scatter": r"reduce.?scatter|psum.scatter",
    "all-reduce": r"all.?reduce|psum|pmax|pmin",
    "collective-permute": r"collective.permute|ppermute",
    "broadcast": r"broadcast",
    "send and receive": r"sendrecv|MemcpyP2P",
}


@dataclass(frozen=True)
class Collective:
    """Of one step: launches, their time, the part of it that nothing hid, bytes of whole messages (None: unknown)."""

    kind: str
    calls: float
    seconds: float
    exposed_seconds: float
    bytes: float | None


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
class Anatomy:
    """The mean step of one GPU. `seconds`: by key of CATEGORIES, adding up to step_seconds."""

    name: str
    module: str
    device: int
    num_devices: int
    num_steps: int
    step_seconds: float
    fastest_step_seconds: float
    slowest_step_seconds: float
    seconds: dict[str, float]
    hidden_communication_seconds: float
    unattributed_seconds: float  # of kernels whose op name the trace does not say: no scope can claim them
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
    if device is None:
        device = max(trace.devices, key=lambda number: _compute_time(trace.devices[number]))
    if device not in trace.devices:
        raise ValueError(f"device={device} is not in {trace.name}, which holds {', '.join(map(str, trace.devices))}")
    events = trace.devices[device]
    groups = [_group(kernel) for kernel in events.kernels]
    module, marks = find_steps(events)
    step_seconds = np.diff(marks) * 1e-9
    time, hidden, idle = partition(events, groups, begin=marks[0], end=marks[-1])
    scale = 1e-9 / len(step_seconds)  # nanoseconds of the whole to seconds of a step
    exposed = {group: value * scale for group, value in time.items() if group not in CATEGORIES}
    seconds = {category: time.get(category, 0.0) * scale for category in CATEGORIES}
    seconds |= {"communication_exposed": sum(exposed.values()), "idle": idle * scale}
    launches = _launches(events, groups, marks)
    return Anatomy(
        name=trace.name,
        module=module,
        device=device,
        num_devices=len(trace.devices),
        num_steps=len(step_seconds),
        step_seconds=float(step_seconds.mean()),
        fastest_step_seconds=float(step_seconds.min()),
        slowest_step_seconds=float(step_seconds.max()),
        seconds=seconds,
        hidden_communication_seconds=hidden * scale,
        unattributed_seconds=sum(x.seconds for x in launches if x.group in COMPUTE and not x.kernel.op_name),
        collectives=_collectives(launches, exposed, trace.message_bytes),
        kernels=_kernel_times(launches),
    )


@functools.cache
def classify(kernel: Kernel) -> str:
    """The category of the first of RULES that fits; "communication" where CATEGORIES tells exposed from hidden."""
    for category, pattern, op_pattern in RULES:
        fits = pattern is None or any(re.search(pattern, text, re.IGNORECASE) for text in (kernel.name, kernel.hlo_op))
        if fits and (op_pattern is None or re.search(op_pattern, kernel.op_name)):
            return category
    raise AssertionError("the last rule fits all")


def collective_kind(kernel: Kernel) -> str:
    """A key of COLLECTIVE_KINDS, or "other"."""
    for text in (kernel.hlo_op, kernel.name):
        for kind, pattern in COLLECTIVE_KINDS.items():
            if re.search(pattern, text, re.IGNORECASE):
                return kind
    return "other"


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
    return dict(zip(names.tolist(), time_G.tolist(), strict=True)), float(hidden), float(length_I[is_free_I].sum())


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
    keys, index_M = np.unique(events.index_E[is_main_E], return_inverse=True)
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
        _row("besides: collectives, hidden", anatomies, [each.hidden_communication_seconds for each in anatomies])
    )
    for number, each in enumerate(anatomies, 1):
        lines += ["", f"[{number}] {each.name}", *_notes(each), *_collective_lines(each), *_kernel_lines(each, top)]
    return "\n".join(lines)


def plot(anatomies: Anatomy | Sequence[Anatomy], path: str | Path) -> None:
    """Writes a PNG: for each trace a bar of the categories, and beside it one of the collectives, hidden ones hatched.

    Raises ValueError if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"drawing needs matplotlib ({error}): pip install 'jaxscale[plot]'") from None
    anatomies = _many(anatomies)
    figure = Figure(figsize=(4.5 + 2 * len(anatomies), 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors = {category: f"C{number}" for number, category in enumerate(CATEGORIES) if category != "idle"}
    # Matplotlib has ten colours; the eleventh row is nothing at all.
    colors |= {"idle": "whitesmoke"}
    highest = max(each.step_seconds for each in anatomies) * 1e3
    bottom = np.zeros(len(anatomies))
    places = np.arange(len(anatomies))
    for category, label in CATEGORIES.items():
        height = np.array([each.seconds[category] * 1e3 for each in anatomies])
        bars = axes.bar(places, height, 0.5, bottom, color=colors[category], edgecolor="white", label=label)
        # Thinner parts than 3% of the highest bar have no room for a number.
        axes.bar_label(
            bars, [f"{ms:,.1f}" if ms > 0.03 * highest else "" for ms in height], label_type="center", fontsize=8
        )
        bottom += height
    exposed = np.array([each.seconds["communication_exposed"] * 1e3 for each in anatomies])
    hidden = np.array([each.hidden_communication_seconds * 1e3 for each in anatomies])
    color = colors["communication_exposed"]
    axes.bar(places + 0.35, exposed, 0.12, color=color)
    axes.bar(
        places + 0.35, hidden, 0.12, exposed, color="white", edgecolor=color, hatch="///", label="collectives, hidden"
    )
    axes.set_xticks(places, [f"{each.name[-40:]}\n{each.step_seconds * 1e3:,.1f} ms" for each in anatomies])
    axes.set_ylabel("milliseconds of a step")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8)
    figure.savefig(path, format="png", dpi=150)


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


def _compute_time(events: Events) -> float:
    is_compute_K = np.array([_group(kernel) in COMPUTE for kernel in events.kernels])
    return float((events.end_E - events.start_E)[is_compute_K[events.index_E]].sum())


def _main_module(events: Events) -> tuple[str, np.ndarray]:
    """The program that takes most time and which kernels are its own; all, if most time is of kernels without one."""
    time = defaultdict(float)
    for index, value in enumerate(np.bincount(events.index_E, events.end_E - events.start_E)):
        time[events.kernels[index].module] += value
    module = max(time, key=lambda name: time[name])
    return module, np.array([not module or kernel.module == module for kernel in events.kernels])


def _launches(events: Events, groups: list[str], marks: np.ndarray) -> list[_Launches]:
    """Of a mean step: launches from the first mark until before the last, each with its whole length."""
    is_inside_E = (events.start_E >= marks[0]) & (events.start_E < marks[-1])
    index, num_steps = events.index_E[is_inside_E], len(marks) - 1
    calls = np.bincount(index, minlength=len(groups)) / num_steps
    seconds = np.bincount(index, (events.end_E - events.start_E)[is_inside_E], len(groups)) * (1e-9 / num_steps)
    rows = zip(events.kernels, groups, calls.tolist(), seconds.tolist(), strict=True)
    return [_Launches(*row) for row in rows if row[2]]


def _collectives(launches, exposed: dict[str, float], message_bytes: dict) -> tuple[Collective, ...]:
    found = []
    for kind in sorted(exposed):
        of_kind = [each for each in launches if each.group == kind]
        sizes = [message_bytes.get((each.kernel.module, each.kernel.hlo_op)) for each in of_kind]
        known = [each.calls * size for each, size in zip(of_kind, sizes, strict=True) if size is not None]
        found.append(
            Collective(
                kind,
                calls=sum(each.calls for each in of_kind),
                seconds=sum(each.seconds for each in of_kind),
                exposed_seconds=exposed[kind],
                bytes=sum(known) if len(known) == len(of_kind) else None,
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
            hlo_op=same[0].kernel.hlo_op,
            num_ops=len({each.kernel.hlo_op for each in same}),
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
    return f"{each.name}: {each.module or 'kernels'} on GPU {each.device} of {each.num_devices}, {steps} of {spread} ms"


def _heading(anatomies: Sequence[Anatomy]) -> str:
    heads = "".join(f"{f'[{number}] ms':>13}   share" for number in range(1, len(anatomies) + 1))
    return f"{'a step':30}{heads}" + (f"{'[2] - [1] ms':>15}  change" if len(anatomies) == 2 else "")


def _row(label: str, anatomies: Sequence[Anatomy], seconds: list[float]) -> str:
    cells = [
        f"{value * 1e3:13,.2f}{value / each.step_seconds:8.1%}" for value, each in zip(seconds, anatomies, strict=True)
    ]
    if len(seconds) == 2:
        before, after = seconds
        cells.append(f"{(after - before) * 1e3:+15,.2f}" + (f"{after / before - 1:+8.1%}" if before else ""))
    return f"{label:30}" + "".join(cells)


def _notes(each: Anatomy) -> Iterator[str]:
    if each.num_steps == 1:
        yield "one step only: trace more for a mean"
    if not any(each.seconds[category] for category in ("loss", "loss_gemm", "optimizer")):
        yield "no kernel is under a jax.named_scope 'loss' or 'optimizer': their time is in other rows"
    if each.unattributed_seconds > 0.02 * each.step_seconds:
        share = each.unattributed_seconds / each.step_seconds
        yield f"kernels of {share:.1%} of the step have no op name: they are in no scope's row, whatever they belong to"


def _collective_lines(each: Anatomy) -> Iterator[str]:
    if each.collectives:
        yield ""
        yield f"{'collectives of a step':24}{'calls':>9}{'ms':>11}{'exposed ms':>12}{'GB':>9}{'GB/s':>8}"
    for kind in each.collectives:
        size = (
            f"{'-':>9}{'-':>8}"
            if kind.bytes is None
            else f"{kind.bytes / 1e9:9.3f}{kind.bytes / 1e9 / kind.seconds:8.1f}"
        )
        yield f"{kind.kind:24}{kind.calls:9,.4g}{kind.seconds * 1e3:11,.2f}{kind.exposed_seconds * 1e3:12,.2f}{size}"


def _kernel_lines(each: Anatomy, top: int) -> Iterator[str]:
    yield ""
    yield f"{'ms':>9}{'calls':>8}  {'category':14}{'kernel':46}{'HLO operation':34}op name"
    for kernel in each.kernels[:top]:
        others = f" +{kernel.num_ops - 1}" if kernel.num_ops > 1 else ""
        yield (
            f"{kernel.seconds * 1e3:9,.2f}{kernel.calls:8,.4g}  {kernel.category:14}{kernel.name[:44]:46}"
            f"{kernel.hlo_op[:32] + others:34}{kernel.op_name[-60:]}"
        )
