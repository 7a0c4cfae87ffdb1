"""What an update sends between GPUs, and over which links, read out of its compiled module's text.

For any update of jax: `traffic_of(compiled.as_text(), mesh)`.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

OPERATIONS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
NOT_WRAPPED = ("all-gather", "collective-permute")

_BITS = re.compile(r"[a-z]+(\d+)")

_COLLECTIVE = re.compile(rf"%(\S+) = (.*?) ({'|'.join(OPERATIONS)})(-start)?\(")
_DONE = re.compile(rf" (?:{'|'.join(OPERATIONS)})-done\(%([^\s,)]+)")
# What takes a GPU's time: products, attention, loops of such.
_WORK = re.compile(r" (?:custom-call|while|call|conditional)\(")
# XLA puts a kernel whose operands are slices into a fusion with them, and its own products.
FUSION = re.compile(r" fusion\(.*calls=%([^\s,]+)")
_FUSED = re.compile(r" (?:custom-call|dot)\(")
_GROUPS = re.compile(r"replica_groups=(.*?), (?!device_ids)\w+=")
_PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")
_ARRAY = re.compile(r"\b([a-z]+\d\w*|pred)\[([\d,]*)\]")
_CALLS = re.compile(r"(?:calls|to_apply|body|condition)=%([^\s,]+)")
_BRANCHES = re.compile(r"branch_computations=\{(.*?)\}")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

Groups = frozenset[frozenset[int]]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction.

    groups: the devices that take part together, by their place in the mesh. num_bytes: what one of
    them sends each time. times: in an update. work_beside: products, kernels and loops that are
    scheduled between its start and its end; 0 where it is waited for.
    """

    operation: str
    computation: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    groups: Groups
    num_bytes: int
    times: int
    work_beside: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one kind over the same axes, in an update. Bytes are a GPU's.

    exposed_bytes: of those with no product, kernel or loop beside them.
    """

    axes: tuple[str, ...]
    operation: str
    is_between_hosts: bool
    times: int = 0
    num_bytes: int = 0
    exposed_bytes: int = 0


def traffic_of(hlo: str, mesh: Mesh) -> list[Traffic]:
    """What a GPU sends in an update; that between hosts first, then by bytes."""
    sizes = dict(mesh.shape)
    hosts = [device.process_index for device in mesh.devices.flat]
    found: dict[tuple, Traffic] = {}
    for each in collectives_of(hlo):
        is_between = any(len({hosts[number] for number in group}) > 1 for group in each.groups)
        key = axes_of(each.groups, sizes), each.operation, is_between
        sent = each.times * each.num_bytes
        before = found.get(key, Traffic(*key))
        found[key] = dataclasses.replace(
            before,
            times=before.times + each.times,
            num_bytes=before.num_bytes + sent,
            exposed_bytes=before.exposed_bytes + (0 if each.work_beside else sent),
        )
    return sorted(found.values(), key=lambda each: (not each.is_between_hosts, -each.num_bytes))


def table_of(traffic: Sequence[Traffic]) -> str:
    """For people to read."""
    lines = [f"{'over':24}{'link':15}{'collective':20}{'times':>7}{'GB':>9}{'exposed':>9}"]
    for each in traffic:
        link = "between hosts" if each.is_between_hosts else "inside a host"
        sent, exposed = each.num_bytes / 1e9, each.exposed_bytes / 1e9
        lines.append(
            f"{', '.join(each.axes):24}{link:15}{each.operation:20}"
            f"{each.times:7d}{sent:9.2f}{exposed:9.2f}"
        )
    return "\n".join(lines)


def collectives_of(hlo: str) -> list[Collective]:
    """Those between two devices or more, in the order of the module's text."""
    parts = computations(hlo)
    times = _times(parts)
    fused = {name for name, lines in parts.items() if any(map(_FUSED.search, lines))}
    found = []
    for name, lines in parts.items():
        beside = _work_beside(lines, fused)
        for line in lines:
            match = _COLLECTIVE.search(line)
            groups = _groups_of(line) if match else frozenset()
            if match is None or max(map(len, groups)) == 1:
                continue
            instruction, types, operation, start = match.groups()
            arrays = tuple(_results(types, operation=operation, is_started=bool(start)))
            found.append(
                Collective(
                    operation,
                    name,
                    arrays,
                    groups,
                    num_bytes=_sent(operation, arrays, size=max(map(len, groups))),
                    times=times[name],
                    work_beside=beside.get(instruction, 0),
                )
            )
    return found


def _groups_of(line: str) -> Groups:
    if pairs := _PAIRS.search(line):
        return frozenset(map(frozenset, _lists(pairs[1])))
    groups = _GROUPS.search(line)
    assert groups is not None, line
    return groups_in(groups[1])


def _results(
    types: str, *, operation: str, is_started: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of the arrays that it makes.

    What starts one has its operands first: in a tuple of their own, or as (operand, result, ...)
    for the two that jax 0.10.2 does not wrap.
    """
    is_wrapped = is_started and types.startswith("((")
    if is_wrapped:
        types = types.partition("), ")[2]
    arrays = [(dtype, _sizes(dims)) for dtype, dims in _ARRAY.findall(types)]
    is_pair = is_started and not is_wrapped and operation in NOT_WRAPPED
    yield from arrays[1:2] if is_pair else arrays


def _sent(operation: str, arrays: Iterable[tuple[str, tuple[int, ...]]], *, size: int) -> int:
    """Bytes that one of `size` devices sends at the least, from what it has afterwards."""
    made = sum(math.prod(shape) * _bits(dtype) // 8 for dtype, shape in arrays)
    match operation:
        case "reduce-scatter":
            return made * (size - 1)
        case "all-reduce":
            return 2 * made * (size - 1) // size
        case "collective-permute":
            return made
    return made * (size - 1) // size


def _bits(dtype: str) -> int:
    bits = _BITS.match(dtype)
    return int(bits[1]) if bits else 8


def _work_beside(lines: list[str], fused: set[str]) -> dict[str, int]:
    """Name of what starts a collective -> what is scheduled before its end.

    fused: computations that are work where they are a fusion's.
    """
    begun: dict[str, int] = {}
    found = {}
    work = 0
    for line in lines:
        if match := _COLLECTIVE.search(line):
            begun[match[1]] = work
        elif match := _DONE.search(line):
            found[match[1]] = work - begun[match[1]]
        elif _WORK.search(line):
            work += 1
        elif (fusion := FUSION.search(line)) and fusion[1] in fused:
            work += 1
    return found


def _times(parts: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs in an update; a loop without a known number of turns once."""
    times = dict.fromkeys(parts, 0)

    def run(name: str, number: int):
        times[name] += number
        for line in parts[name]:
            called = [*_CALLS.findall(line), *_branches(line)]
            turns = _TURNS.search(line)
            for each in called:
                if each in parts:
                    run(each, number * (int(turns[1]) if turns else 1))

    run(next(reversed(parts)), 1)  # XLA prints the entry last
    return times


def _branches(line: str) -> list[str]:
    branches = _BRANCHES.search(line)
    return re.findall(r"%([^\s,]+)", branches[1]) if branches else []


def computations(hlo: str) -> dict[str, list[str]]:
    """Name -> the lines of each computation, in the order of the text."""
    parts: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        if head := re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line):
            lines = parts[head[1]] = []
        else:
            lines.append(line)
    return parts


# Groups of devices.


def axes_of(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes in which the devices of a group differ."""
    shape = tuple(sizes.values())
    differs = np.zeros(len(shape), bool)
    for group in groups:
        places = np.array(np.unravel_index(sorted(group), shape))
        differs |= (places != places[:, :1]).any(axis=1)
    return tuple(axis for axis, found in zip(sizes, differs, strict=True) if found)


def groups_over(sizes: Mapping[str, int], axes: Sequence[str], *, ids=None) -> Groups:
    """The devices of a mesh that differ in these axes alone; ids: of all, in the mesh's order."""
    ids = np.arange(math.prod(sizes.values())) if ids is None else ids
    places = [list(sizes).index(axis) for axis in axes]
    ids = np.moveaxis(ids.reshape(tuple(sizes.values())), places, range(-len(places), 0))
    rows = ids.reshape(-1, math.prod(sizes[axis] for axis in axes))
    return frozenset(map(frozenset, rows.tolist()))


def groups_in(text: str) -> Groups:
    """Out of any of XLA's three notations."""
    if text.startswith("{{"):
        return frozenset(map(frozenset, _lists(text[1:-1])))
    if iota := re.fullmatch(r"\[([\d,]+)\]<=(.*)", text):
        return frozenset(map(frozenset, _ids(iota[2]).reshape(_sizes(iota[1])).tolist()))
    mesh = re.fullmatch(r"mesh\[([\w'=,]+)\](?:, device_ids=\((.*)\))? \{([\w',]+)\}", text)
    assert mesh is not None, text
    sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
    ids = _ids(mesh[2] or f"[{math.prod(sizes.values())}]")
    return groups_over(sizes, re.findall(r"'(\w+)'", mesh[3]), ids=ids)


def _ids(text: str) -> np.ndarray:
    """As `[2,4]T(1,0)` has them: numbered, shaped, transposed and flat."""
    iota = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert iota is not None, text
    sizes, order = _sizes(iota[1]), _sizes(iota[2]) if iota[2] else None
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(-1)


def _lists(text: str) -> list[tuple[int, ...]]:
    """`{0,1},{2,3}`."""
    return [_sizes(each) for each in re.findall(r"\{([\d,]*)\}", text)]


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()
