"""Traces that `jax.profiler` took of GPUs: what was launched when, and the sizes of messages.

E calls on one GPU.
"""

import re
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxscale.perf.categories import COMPUTE, Launch, classify
from jaxscale.perf.graph_names import owners, with_names
from jaxscale.perf.programs import Program, programs
from jaxscale.train.profile import STEP


@dataclass(frozen=True)
class Events:
    """The calls on one GPU by their start, nanoseconds.

    launches[index_E[i]] ran from start_E[i] to end_E[i]. num_marked: steps that the host says it
    started, if it says so.
    """

    launches: tuple[Launch, ...]
    index_E: np.ndarray
    start_E: np.ndarray
    end_E: np.ndarray
    num_marked: int = 0

    def of(self, launch: Launch) -> tuple[np.ndarray, np.ndarray]:
        """Start and end of a launch's calls."""
        is_it_E = self.index_E == self._numbers.get(launch, -1)
        return self.start_E[is_it_E], self.end_E[is_it_E]

    @cached_property
    def _numbers(self) -> dict[Launch, int]:
        return {launch: number for number, launch in enumerate(self.launches)}


@dataclass(frozen=True)
class Trace:
    """One process's GPUs by their number.

    message_bytes: {(module, hlo_op): bytes} of its collectives, where known.
    """

    name: str
    devices: dict[int, Events]
    message_bytes: dict[tuple[str, str], int]


def read(path: str | Path) -> Trace:
    """The newest trace in a folder, or the one in an .xplane.pb file; a second for 100,000 calls.

    Raises ValueError if there is none, or if it holds no launches of a GPU.
    """
    file = _newest(Path(path))
    data = file.read_bytes()
    calls, num_marked = _calls_of_gpus(data, file)
    compiled = programs(data, {call.program for each in calls.values() for call in each})
    labels = _labels(compiled)
    sizes = {
        (labels[number], op): size
        for number, each in compiled.items()
        for op, size in each.message_bytes.items()
    }
    named = {device: _named(each, compiled, labels=labels) for device, each in calls.items()}
    devices = {device: _events(each, num_marked) for device, each in named.items()}
    return Trace(str(path), devices, sizes)


def _newest(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    files = sorted(path.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ValueError(f"{path} holds no *.xplane.pb, in which jax.profiler writes a trace")
    return files[-1]


@dataclass(frozen=True)
class _Call:
    launch: Launch
    program: int
    stream: str
    start: float
    end: float


def _calls_of_gpus(data: bytes, file: Path) -> tuple[dict[int, list[_Call]], int]:
    """By GPU; and the number of steps that the host marked."""
    with warnings.catch_warnings():
        # Ignored here, as an error it would abort the process: Python 3.12 deprecates how jaxlib
        # makes its types on first use.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            planes = list(jax.profiler.ProfileData.from_serialized_xspace(data).planes)
        except RuntimeError as error:
            raise ValueError(f"{file} is not a profile: {error}") from None
        gpus = {
            int(match[1]): plane
            for plane in planes
            if (match := re.fullmatch(r"/device:GPU:(\d+)", plane.name))
        }
        calls = {device: found for device, plane in gpus.items() if (found := _calls(plane))}
        num_marked = sum(map(_num_marked, planes))
    if calls:
        return calls, num_marked
    why = "no GPU: a CPU's trace cannot be divided"
    if gpus:
        why = "no kernels: CUPTI recorded none"
    raise ValueError(
        f"{file} has {why}; trace some steps on a GPU, by --config.profile.steps=3 or under "
        "jax.profiler.trace(folder)"
    )


def _num_marked(plane: Any) -> int:
    """Calls of `jax.profiler.StepTraceAnnotation` as our loops make them."""
    if not plane.name.startswith("/host:"):
        return 0
    return sum(
        event.name == STEP and any(key == "step_num" for key, _ in event.stats)
        for line in plane.lines
        for event in line.events
    )


def _calls(plane: Any) -> list[_Call]:
    """By their start, of the lines that are streams; other lines show the same time again."""
    found = [
        _call(event, line.name)
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
        if event.duration_ns > 0  # not allocations and the like
    ]
    return sorted(found, key=lambda call: call.start)


def _call(event: Any, stream: str) -> _Call:
    stats = dict(event.stats)
    op_name = str(stats.get("name") or stats.get("tf_op") or "")
    hlo_op = str(stats.get("hlo_op", ""))
    in_graph = hlo_op.startswith("command_buffer")
    launch = Launch(
        event.name,
        hlo_op="" if in_graph else hlo_op,
        op_name=op_name if "/" in op_name else "",
        module=str(stats.get("hlo_module", "")),
        graph=hlo_op if in_graph else "",
    )
    start, program = event.start_ns, int(stats.get("program_id", -1))
    return _Call(launch, program, stream, start, start + event.duration_ns)


def _labels(compiled: dict[int, Program]) -> dict[int, str]:
    """Their names; with their numbers where a trace has two of a name, as after a recompilation."""
    count = Counter(each.name for each in compiled.values())
    return {
        number: each.name if count[each.name] == 1 else f"{each.name}({number})"
        for number, each in compiled.items()
    }


def _named(
    calls: list[_Call], compiled: dict[int, Program], *, labels: dict[int, str]
) -> list[_Call]:
    """With what the programs tell of the launches."""
    calls = list(calls)
    for number, program in compiled.items():
        places = [at for at, call in enumerate(calls) if call.program == number]
        stream = _computing_stream([calls[at] for at in places])
        computing = [at for at in places if calls[at].stream == stream]
        owner = {
            computing[at]: op for at, op in owners(program, [calls[at].launch for at in computing])
        }
        for at in places:
            launch = with_names(program, calls[at].launch, owner=owner.get(at))
            calls[at] = replace(calls[at], launch=replace(launch, module=labels[number]))
    return calls


def _computing_stream(calls: list[_Call]) -> str:
    time: defaultdict[str, float] = defaultdict(float)
    for call in calls:
        if classify(call.launch) in COMPUTE:
            time[call.stream] += call.end - call.start
    return max(time, key=lambda stream: time[stream], default="")


def _events(calls: list[_Call], num_marked: int) -> Events:
    launches: dict[Launch, int] = {}
    index = [launches.setdefault(call.launch, len(launches)) for call in calls]
    start, end = ([getattr(call, key) for call in calls] for key in ("start", "end"))
    return Events(tuple(launches), np.array(index), np.array(start), np.array(end), num_marked)
