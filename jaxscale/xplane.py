"""Traces that `jax.profiler` took of GPUs: the kernels with their times, and the sizes of the collectives' messages."""

import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np


@dataclass(frozen=True)
class Kernel:
    """What is launched again and again; an empty string is what the trace does not say.

    name: the kernel's. hlo_op: XLA's instruction, "loop_add_fusion.3". op_name: what was traced,
    "jit(train_step)/transpose(jvp(loss))/mul". module: the program, "jit_train_step".
    """

    name: str
    hlo_op: str
    op_name: str
    module: str


@dataclass(frozen=True)
class Events:
    """The launches on one GPU by their start: kernels[index_E[i]] ran from start_E[i] to end_E[i], nanoseconds."""

    kernels: tuple[Kernel, ...]
    index_E: np.ndarray
    start_E: np.ndarray
    end_E: np.ndarray


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
        gpus = {int(match[1]): plane for plane in planes if (match := re.fullmatch(r"/device:GPU:(\d+)", plane.name))}
        devices = {device: events for device, plane in gpus.items() if len((events := _events(plane)).index_E)}
    if not devices:
        why = "no kernels: CUPTI recorded none" if gpus else "no GPU: a CPU's trace cannot be divided"
        raise ValueError(
            f"{file} has {why}; trace some steps on a GPU, by --config.profile.steps=3 or under "
            "jax.profiler.trace(folder)"
        )
    return Trace(str(path), devices, _message_bytes(data))


def _newest(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    files = sorted(path.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ValueError(f"{path} holds no *.xplane.pb, in which jax.profiler writes a trace")
    return files[-1]


def _events(plane) -> Events:
    """Of the lines that are streams; other lines show the same time again."""
    kernels: dict[Kernel, int] = {}
    rows = []
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            if event.duration_ns <= 0:  # allocations and the like
                continue
            stats = dict(event.stats)
            op_name = str(stats.get("name") or stats.get("tf_op") or "")
            kernel = Kernel(
                event.name,
                str(stats.get("hlo_op", "")),
                op_name if "/" in op_name else "",
                str(stats.get("hlo_module", "")),
            )
            start = event.start_ns
            rows.append((kernels.setdefault(kernel, len(kernels)), start, start + event.duration_ns))
    rows.sort(key=lambda row: row[1])
    index_E, start_E, end_E = np.array(rows, float).reshape(-1, 3).T
    return Events(tuple(kernels), index_E.astype(int), start_E, end_E)


# The compiled programs stand in the trace as protobuf messages, which no public class of jax reads. The numbers below
# are those of the fields in xplane.proto, hlo.proto and xla_data.proto.
_COLLECTIVE = re.compile(rb"(ragged-)?all-|reduce-scatter|collective-|async-start")
_ELEMENT_BYTES = {3: 2, 4: 4, 5: 8, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 15: 8, 16: 2, 18: 16}


def _message_bytes(space: bytes) -> dict[tuple[str, str], int]:
    """The bytes of a collective's larger side: the gathered array, what is to be scattered, or what is reduced."""
    found = {}
    for plane in _fields(space, 1):
        if next(_fields(plane, 2), b"") != b"/host:metadata":
            continue
        for module in _fields(plane, 4, 2, 5, 6, 1):
            name = next(_fields(module, 1), b"").decode()
            for computation in _fields(module, 3):
                instructions = {next(_fields(each, 35), 0): each for each in _fields(computation, 2)}
                for each in instructions.values():
                    if _COLLECTIVE.match(next(_fields(each, 2), b"")):
                        found[name, next(_fields(each, 1), b"").decode()] = _larger_side(each, instructions)
    return found


def _larger_side(instruction: bytes, instructions: dict[int, bytes]) -> int:
    shape = next(_fields(instruction, 3))
    operands = sum(
        _shape_bytes(next(_fields(instructions[i], 3)))
        for i in _varints(next(_fields(instruction, 36), b""))
        if i in instructions
    )
    # What starts a collective returns (operands, results).
    is_start = next(_fields(instruction, 2)).endswith(b"-start")
    sides = [_shape_bytes(part) for part in _fields(shape, 4)] if is_start else [_shape_bytes(shape)]
    return max(operands, *sides)


def _shape_bytes(shape: bytes) -> int:
    if parts := list(_fields(shape, 4)):
        return sum(map(_shape_bytes, parts))
    size: int = math.prod(_varints(next(_fields(shape, 3), b"")))
    return size * _ELEMENT_BYTES.get(next(_fields(shape, 2), 0), 1)


def _fields(message, number: int, *inner: int) -> Iterator:
    """The values of a field, or of a field of its messages: int, or bytes if it is no varint."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value: int | bytes
        if key & 7 == 0:
            value, at = _varint(message, at)
        else:
            size, at = _varint(message, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            value, at = message[at : at + size], at + size
        if key >> 3 == number:
            yield from _fields(value, *inner) if inner else [value]


def _varints(packed: bytes) -> Iterator[int]:
    at = 0
    while at < len(packed):
        value, at = _varint(packed, at)
        yield value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
