"""Traces that `jax.profiler` took of GPUs: the kernels with their times, and the sizes of the collectives' messages."""

import re
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import jax
import numpy as np

from jaxscale.perf.categories import COMPUTE, Kernel, classify
from jaxscale.perf.graph_names import Program, owners, programs, with_names


@dataclass(frozen=True)
class Events:
    """The launches on one GPU by their start: kernels[index_E[i]] ran from start_E[i] to end_E[i], nanoseconds."""

    kernels: tuple[Kernel, ...]
    index_E: np.ndarray
    start_E: np.ndarray
    end_E: np.ndarray

    def of(self, kernel: Kernel) -> tuple[np.ndarray, np.ndarray]:
        """Start and end of a kernel's launches."""
        is_it_E = self.index_E == self._numbers.get(kernel, -1)
        return self.start_E[is_it_E], self.end_E[is_it_E]

    @cached_property
    def _numbers(self) -> dict[Kernel, int]:
        return {kernel: number for number, kernel in enumerate(self.kernels)}


@dataclass(frozen=True)
class Trace:
    """One process's GPUs by their number; message_bytes: {(module, hlo_op): bytes} of its collectives, where known."""

    name: str
    devices: dict[int, Events]
    message_bytes: dict[tuple[str, str], int]


def read(path: str | Path) -> Trace:
    """The newest trace in a folder, or the one in an .xplane.pb file. About a second for 100,000 launches.

    Raises ValueError if there is none, or if it holds no kernels of a GPU.
    """
    file = _newest(Path(path))
    data = file.read_bytes()
    with warnings.catch_warnings():
        # Python 3.12 deprecates how jaxlib makes its types on first use; with warnings as errors, the process aborts.
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
        launches = {device: found for device, plane in gpus.items() if (found := _launches(plane))}
    if not launches:
        why = (
            "no kernels: CUPTI recorded none" if gpus else "no GPU: a CPU's trace cannot be divided"
        )
        raise ValueError(
            f"{file} has {why}; trace some steps on a GPU, by --config.profile.steps=3 or under "
            "jax.profiler.trace(folder)"
        )
    compiled = programs(data, {launch.program for each in launches.values() for launch in each})
    labels = _labels(compiled)
    return Trace(
        str(path),
        {device: _events(_named(each, compiled, labels)) for device, each in launches.items()},
        {
            (labels[number], op): size
            for number, each in compiled.items()
            for op, size in each.message_bytes.items()
        },
    )


def _labels(compiled: dict[int, Program]) -> dict[int, str]:
    """Their names; with their numbers where a trace has two of a name, as of a step that was compiled anew."""
    count = Counter(each.name for each in compiled.values())
    return {
        number: each.name if count[each.name] == 1 else f"{each.name}({number})"
        for number, each in compiled.items()
    }


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
class _Launch:
    kernel: Kernel
    program: int
    stream: str
    start: float
    end: float


def _launches(plane) -> list[_Launch]:
    """By their start, of the lines that are streams; other lines show the same time again."""
    found = []
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            if event.duration_ns <= 0:  # allocations and the like
                continue
            stats = dict(event.stats)
            op_name, hlo_op = (
                str(stats.get("name") or stats.get("tf_op") or ""),
                str(stats.get("hlo_op", "")),
            )
            in_graph = hlo_op.startswith("command_buffer")
            kernel = Kernel(
                event.name,
                hlo_op="" if in_graph else hlo_op,
                op_name=op_name if "/" in op_name else "",
                module=str(stats.get("hlo_module", "")),
                graph=hlo_op if in_graph else "",
            )
            start = event.start_ns
            program = int(stats.get("program_id", -1))
            found.append(_Launch(kernel, program, line.name, start, start + event.duration_ns))
    return sorted(found, key=lambda launch: launch.start)


def _named(
    launches: list[_Launch], compiled: dict[int, Program], labels: dict[int, str]
) -> list[_Launch]:
    """With what the programs tell of the kernels."""
    launches = list(launches)
    for number, program in compiled.items():
        places = [at for at, launch in enumerate(launches) if launch.program == number]
        stream = _computing_stream([launches[at] for at in places])
        computing = [at for at in places if launches[at].stream == stream]
        owner = {
            computing[at]: op
            for at, op in owners(program, [launches[at].kernel for at in computing])
        }
        for at in places:
            kernel = with_names(program, launches[at].kernel, owner.get(at))
            launches[at] = replace(launches[at], kernel=replace(kernel, module=labels[number]))
    return launches


def _computing_stream(launches: list[_Launch]) -> str:
    time: defaultdict[str, float] = defaultdict(float)
    for launch in launches:
        if classify(launch.kernel) in COMPUTE:
            time[launch.stream] += launch.end - launch.start
    return max(time, key=lambda stream: time[stream], default="")


def _events(launches: list[_Launch]) -> Events:
    kernels: dict[Kernel, int] = {}
    index = [kernels.setdefault(launch.kernel, len(kernels)) for launch in launches]
    start, end = ([getattr(launch, key) for launch in launches] for key in ("start", "end"))
    return Events(tuple(kernels), np.array(index), np.array(start), np.array(end))
