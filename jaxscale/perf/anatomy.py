"""Where the time of a training step goes, read from a trace that `jax.profiler` took of GPUs.

    step = anatomy(read("runs/x/profile"))
    print(table(step), step.exposed_communication_share)

The wall time of a step on one GPU is divided without remainder: each instant belongs to what
computes then, in equal parts if there are several; if nothing computes, to copies and zero fill;
then to collectives; then to copies from and to the host; else it is idle. Collectives behind
computing or copies are hidden: they cost no time of their own, and are given apart.

A step lasts from one launch of the program to the same launch in the next run, so the host's delays
between runs count, and runs that the trace holds in part do not. XLA uses CUDA graphs also while a
profile is taken; the trace does not say what their launches belong to, jaxscale/perf/graph_names.py
finds it.

E all calls on a GPU. C the calls of one launch, X those of it on another GPU, G a row for each GPU.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np

from jaxscale.perf.categories import COMPUTE, Launch, classify
from jaxscale.perf.division import Division, divide
from jaxscale.perf.trace import Events, Trace


@dataclass(frozen=True)
class Collective:
    """Of one step: calls, their time, the part that nothing hid, bytes of whole messages.

    transfer_seconds: for each call the time of the GPU that took least, which waited least for the
    others; the rest of `seconds` is waiting. None if the trace has one GPU, or not the same calls
    of all. bytes: None if not known.
    """

    kind: str
    calls: float
    seconds: float
    exposed_seconds: float
    bytes: float | None
    transfer_seconds: float | None


@dataclass(frozen=True)
class LaunchTime:
    """Of one step.

    num_ops: how many HLO instructions have this launch under this op name, hlo_op being one.
    """

    name: str
    hlo_op: str
    num_ops: int
    op_name: str
    category: str
    calls: float
    seconds: float


@dataclass(frozen=True)
class Load:
    """Of one GPU in a step: the time in which it computes, or does nothing but communicate."""

    device: int
    compute_seconds: float
    exposed_communication_seconds: float


@dataclass(frozen=True)
class Anatomy:
    """The mean step of one GPU.

    loads: of all GPUs. seconds: by key of CATEGORIES, adding up to step_seconds. graph_seconds: of
    computing launches in CUDA graphs. unattributed_seconds: of computing launches whose op name is
    not known, so that no scope can claim them. launches: longest first.
    """

    name: str
    module: str
    device: int
    loads: tuple[Load, ...]
    num_steps: int
    step_seconds: float
    fastest_step_seconds: float
    slowest_step_seconds: float
    seconds: dict[str, float]
    hidden_communication_seconds: float
    graph_seconds: float
    unattributed_seconds: float
    collectives: tuple[Collective, ...]
    launches: tuple[LaunchTime, ...]

    @property
    def exposed_communication_share(self) -> float:
        """The part of the step in which collectives run and nothing computes."""
        return self.seconds["communication_exposed"] / self.step_seconds


def anatomy(trace: Trace, device: int | None = None) -> Anatomy:
    """Divides the mean step of one GPU.

    device: the GPU; by default the one that computes longest, for which the others wait. A matrix
    product of the loss is "loss_gemm"; all that is under the scope "optimizer" is that. Raises
    ValueError for a device that the trace does not hold.
    """
    divisions = {number: divide(events) for number, events in trace.devices.items()}
    if device is None:
        device = max(divisions, key=lambda number: divisions[number].compute)
    if device not in trace.devices:
        held = ", ".join(map(str, trace.devices))
        raise ValueError(f"device={device} is not in {trace.name}, which holds {held}")
    division = divisions[device]
    step_seconds = np.diff(division.marks) * 1e-9
    parts = _parts(trace.devices[device], division)
    computing = [part for part in parts if part.group in COMPUTE]
    return Anatomy(
        name=trace.name,
        module=division.module,
        device=device,
        loads=_loads(divisions),
        num_steps=division.num_steps,
        step_seconds=float(step_seconds.mean()),
        fastest_step_seconds=float(step_seconds.min()),
        slowest_step_seconds=float(step_seconds.max()),
        seconds=division.seconds,
        hidden_communication_seconds=division.hidden,
        graph_seconds=sum(part.seconds for part in computing if part.launch.graph),
        unattributed_seconds=sum(part.seconds for part in computing if not part.launch.op_name),
        collectives=_collectives(parts, trace, device=device, division=division),
        launches=_launch_times(parts),
    )


def _loads(divisions: Mapping[int, Division]) -> tuple[Load, ...]:
    return tuple(
        Load(number, each.compute, sum(each.exposed.values())) for number, each in divisions.items()
    )


@dataclass(frozen=True)
class _Part:
    """What a launch is of a mean step; group: a category, or a kind of collective."""

    launch: Launch
    group: str
    calls: float
    seconds: float


def _parts(events: Events, division: Division) -> list[_Part]:
    """Of calls from the first mark until before the last, each with its whole length."""
    groups, num_steps = division.groups, division.num_steps
    is_inside_E = division.are_inside(events.start_E)
    index, length = events.index_E[is_inside_E], (events.end_E - events.start_E)[is_inside_E]
    calls = np.bincount(index, minlength=len(groups)) / num_steps
    seconds = np.bincount(index, length, len(groups)) * (1e-9 / num_steps)
    rows = zip(events.launches, groups, calls.tolist(), seconds.tolist(), strict=True)
    return [_Part(*row) for row in rows if row[2]]


def _collectives(
    parts: list[_Part], trace: Trace, *, device: int, division: Division
) -> tuple[Collective, ...]:
    transfers = _transfers(trace, device, division=division)
    found = []
    for kind in sorted(division.exposed):
        of_kind = [part for part in parts if part.group == kind]
        found.append(
            Collective(
                kind,
                calls=sum(part.calls for part in of_kind),
                seconds=sum(part.seconds for part in of_kind),
                exposed_seconds=division.exposed[kind],
                bytes=_bytes_of(of_kind, trace.message_bytes),
                transfer_seconds=transfers[kind],
            )
        )
    return tuple(found)


def _bytes_of(parts: Iterable[_Part], message_bytes: Mapping[tuple[str, str], int]) -> float | None:
    """Of a step; None if the size of one is not known."""
    total = 0.0
    for part in parts:
        size = message_bytes.get((part.launch.module, part.launch.hlo_op))
        if size is None:
            return None
        total += part.calls * size
    return total


def _transfers(trace: Trace, device: int, *, division: Division) -> dict[str, float | None]:
    """By kind of collective, as Collective has it."""
    events = trace.devices[device]
    nothing = 0.0 if len(trace.devices) > 1 else None
    found: dict[str, float | None] = dict.fromkeys(division.exposed, nothing)
    for launch, kind in zip(events.launches, division.groups, strict=True):
        if (before := found.get(kind)) is None:
            continue
        start_C, end_C = events.of(launch)
        is_inside_C = division.are_inside(start_C)
        lengths_GC = [
            _lengths_of_same((start_C[is_inside_C], end_C[is_inside_C]), each.of(launch))
            for each in trace.devices.values()
        ]
        time = float(np.min(lengths_GC, axis=0).sum()) * 1e-9 / division.num_steps
        found[kind] = None if np.isnan(time) else before + time
    return found


def _lengths_of_same(
    calls_C: tuple[np.ndarray, np.ndarray], others_X: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Of a collective's calls C the lengths on another GPU, which made calls X; start and end each.

    No call begins before all have ended the last.
    """
    (start_C, end_C), (start_X, end_X) = calls_C, others_X
    same_C = np.searchsorted(end_X, start_C, side="right")
    # Beyond the last: a call that never begins.
    length_X, start_X = np.append(end_X - start_X, np.nan), np.append(start_X, np.inf)
    return np.where(start_X[same_C] < end_C, length_X[same_C], np.nan)


def _launch_times(parts: list[_Part]) -> tuple[LaunchTime, ...]:
    """One for each launch and op name: the same place of unrolled layers counts together."""
    places = defaultdict(list)
    for part in parts:
        places[part.launch.name, part.launch.op_name, classify(part.launch)].append(part)
    times = (
        LaunchTime(
            name,
            hlo_op=same[0].launch.hlo_op or same[0].launch.graph,
            num_ops=len({part.launch.hlo_op or part.launch.graph for part in same}),
            op_name=op_name,
            category=category,
            calls=sum(part.calls for part in same),
            seconds=sum(part.seconds for part in same),
        )
        for (name, op_name, category), same in places.items()
    )
    return tuple(sorted(times, key=lambda each: -each.seconds))


def to_json(step: Anatomy, *, top: int) -> str:
    """In seconds and bytes; "kernels" holds the `top` longest launches."""
    record = asdict(replace(step, launches=step.launches[:top]))
    record["kernels"] = record.pop("launches")
    return json.dumps(record | {"exposed_communication_share": step.exposed_communication_share})
