"""Names of what CUDA graphs launched, found by the schedule of the compiled program.

XLA launches most of a step from CUDA graphs, also while a profile is taken. Of such a launch the
trace says its own name, not the instruction that it belongs to. But a program is a sequence of
instructions which one stream runs in order, and a fusion's launch is named after the fusion. So the
fusions among the launches are followed through the program's schedule, and with them the launches
outside graphs, of which the instruction is known. Between two neighbours of those, the calls of
cuBLAS and of cuDNN's attention own the launches of their kind in order, if these are the same kinds
one by one. What does not match stays without a name.

Of 26,352 launches outside graphs in two traces (8B on 4 H200), whose names were hidden, 26,328 got
them again, 24 none and none a wrong one. Where a trace lost launches, layers may be mistaken for
one another.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jaxscale.perf.categories import GEMM, Launch, classify
from jaxscale.perf.programs import Instruction, Program

# How far apart schedule and launches may get and still be matched again, and how many must agree.
_REACH, _IN_STEP = 64, 4


def with_names(program: Program, launch: Launch, *, owner: Instruction | None) -> Launch:
    """The launch with what the program says of its hlo_op and op_name; owner: see `owners`."""
    if not launch.graph:
        # The program's name comes first: the trace cuts an op name at its first comma, and of a
        # fusion's it has what all operations in it share.
        return replace(launch, op_name=program.op_names.get(launch.hlo_op) or launch.op_name)
    if owner:
        return replace(launch, hlo_op=owner.name, op_name=owner.op_name)
    shared = program.shared_op_names.get(program.keys.get(launch.name, ""), "")
    return replace(launch, op_name=shared)


def owners(program: Program, launches: Sequence[Launch]) -> Iterator[tuple[int, Instruction]]:
    """Numbers of launches, with the instructions they belong to.

    launches: all those of the stream that computes, in order.
    """
    seen = list(_seen(program, launches))
    keys = {key for _, key in seen}
    # Landmarks are the instructions whose launches are told by their names; calls of libraries and
    # copies are not.
    landmarks = [at for at, each in enumerate(program.schedule) if each.key in keys]
    for stretch in follow([program.schedule[at].key for at in landmarks], [key for _, key in seen]):
        before: tuple[int, int] | None = None
        for i, j in stretch:
            turn, landmark = divmod(i, len(landmarks))
            here = turn * len(program.schedule) + landmarks[landmark], seen[j][0]
            if before:
                ops = [
                    program.schedule[at % len(program.schedule)]
                    for at in range(before[0] + 1, here[0])
                ]
                unknown = [at for at in range(before[1] + 1, here[1]) if not launches[at].hlo_op]
                between = [(at, launches[at]) for at in unknown]
                yield from _owners_between(program, ops, launches=between)
            yield here[1], program.schedule[landmarks[landmark]]
            before = here


def _seen(program: Program, launches: Sequence[Launch]) -> Iterator[tuple[int, str]]:
    """Numbers of launches with the keys of their instructions, where trace or name tells."""
    last = ""
    for at, launch in enumerate(launches):
        name = launch.hlo_op or launch.name
        # One instruction may launch several times.
        if name in program.keys and not (launch.hlo_op and name == last):
            yield at, program.keys[name]
        last = launch.hlo_op


# Following a cycle, which goes on for ever.


def follow(cycle: Sequence[str], seen: Sequence[str]) -> Iterator[list[tuple[int, int]]]:
    """Stretches of pairs (place in the cycle, place in `seen`) of equal items, both rising.

    A stretch starts where an item of `seen` is but once in the cycle, and ends where the next
    _REACH items do not match.
    """
    number = Counter(cycle)
    singles = {item: place for place, item in enumerate(cycle) if number[item] == 1}
    start = 0
    while meeting := _meet_at_single(cycle, seen, singles=singles, start=start):
        stretch = []
        while meeting:
            i, j = meeting
            while j < len(seen) and cycle[i % len(cycle)] == seen[j]:
                stretch.append((i, j))
                i, j = i + 1, j + 1
            meeting = _meet_near(cycle, seen, place=(i, j))
        start = j
        yield stretch


def _meet_at_single(
    cycle: Sequence[str], seen: Sequence[str], *, singles: dict[str, int], start: int
) -> tuple[int, int] | None:
    for at in range(start, len(seen)):
        i = singles.get(seen[at])
        if i is not None and _is_in_step(cycle, seen, place=(i, at)):
            # What was in step before the single item belongs to the stretch as well.
            while at > start and cycle[(i - 1) % len(cycle)] == seen[at - 1]:
                i, at = i - 1, at - 1
            return i, at
    return None


def _meet_near(
    cycle: Sequence[str], seen: Sequence[str], *, place: tuple[int, int]
) -> tuple[int, int] | None:
    i, j = place
    for apart in range(1, _REACH):
        for ahead in range(apart + 1):
            near = i + ahead, j + apart - ahead
            if _is_in_step(cycle, seen, place=near):
                return near
    return None


def _is_in_step(cycle: Sequence[str], seen: Sequence[str], *, place: tuple[int, int]) -> bool:
    i, j = place
    items = seen[j : j + _IN_STEP]
    return bool(items) and all(cycle[(i + k) % len(cycle)] == item for k, item in enumerate(items))


# What a launch is to the instruction that it belongs to; the first line that matches.
_PARTS = (
    ("fill", r"^Memset"),
    ("attention begins", r"simple_memset|tma_setup|dot_do_o"),
    ("attention ends", r"convert_dq|reduce_head"),
    ("gemm ends", r"splitk"),
    ("attention", r"sdpa|flash|fmha"),
    ("gemm", GEMM),
    ("other", ""),
)
_LIBRARIES = ("gemm", "attention")
_KINDS = (*_LIBRARIES, "other")
# To the call of which kinds the rest belongs: to the next (1), or to the one before (-1).
_HELPS = {
    "fill": (1, _LIBRARIES),
    "attention begins": (1, ("attention",)),
    "attention ends": (-1, ("attention",)),
    "gemm ends": (-1, ("gemm",)),
}


def _part(program: Program, launch: Launch) -> str:
    if classify(launch) in ("communication", "transfer"):
        return ""
    if launch.name in program.keys:
        return "other"
    return next(part for part, pattern in _PARTS if re.search(pattern, launch.name, re.IGNORECASE))


def _owners_between(
    program: Program, ops: list[Instruction], *, launches: list[tuple[int, Launch]]
) -> Iterator[tuple[int, Instruction]]:
    """Of `launches`, which are all between two known ones, as are `ops`."""
    parts = [(at, _part(program, launch)) for at, launch in launches]
    found: dict[int, Instruction] = {}
    is_complete = False
    # Calls of libraries get their launches if these match by themselves; the rest, such as copies,
    # if everything does.
    for together in (_LIBRARIES, _KINDS):
        calls = [op for op in ops if op.kind in together]
        matching = [(at, part) for at, part in parts if part in together]
        is_complete = [op.kind for op in calls] == [part for _, part in matching]
        if is_complete:
            found |= zip([at for at, _ in matching], calls, strict=True)
    yield from found.items()
    for number, (at, part) in enumerate(parts):
        # A fill may be all that an instruction launches.
        if part in _HELPS and (is_complete or part != "fill"):
            call = _helped(parts, number)
            if call in found:
                yield at, found[call]


def _helped(parts: list[tuple[int, str]], number: int) -> int | None:
    direction, kinds = _HELPS[parts[number][1]]
    others = parts[number + 1 :] if direction > 0 else parts[:number][::-1]
    call, kind = next(((call, kind) for call, kind in others if kind in _KINDS), (None, ""))
    return call if kind in kinds else None
