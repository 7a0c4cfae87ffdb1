"""Pipeline schedules as data: what each stage does in each tick, and where it finds its operands.

A stage holds `num_chunks` chunks of consecutive layers; chunk v of stage s is the model's part
number v * P + s. An op is one chunk's forward pass, input gradient or weight gradient for one
microbatch, or both gradients at once. `timetable` lists ops greedily: a stage goes on with the next
forward or backward op of its order as soon as its operand is there, and holds no more microbatches
than a bound, the least with which no schedule of this kind is shorter.

Aligned tables (the default): in a tick all stages do ops of one kind, or nothing. Lean tables: each
stage does its own, which takes fewer microbatches in flight, and control flow on the devices.

Sources: GPipe (arXiv:1811.06965), 1F1B (PipeDream-flush, arXiv:2006.09503), interleaved 1F1B
(arXiv:2104.04473), ZB-H1 (arXiv:2401.10241).

P stages, M microbatches, V chunks a stage, T ticks. Nothing here imports jax.
"""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jaxscale.config import PipelineSchedule


class Kind(enum.IntEnum):
    """BACKWARD is both gradients in one op: nothing has to be kept between them."""

    IDLE = 0
    FORWARD = 1
    INPUT_GRADIENT = 2
    WEIGHT_GRADIENT = 3
    BACKWARD = 4


class Op(NamedTuple):
    """What a stage does with one of its chunks and a microbatch."""

    kind: Kind
    microbatch: int
    chunk: int
    stage: int


LETTERS = ".FBWX"
# Of one chunk's ops, relative to its forward pass: 8 layers of Llama-3-8B at 8192 tokens, products
# at 700 TFLOP/s and cuDNN's attention (81 ms backward for 28 ms forward).
COSTS = {Kind.FORWARD: 1.0, Kind.INPUT_GRADIENT: 1.26, Kind.WEIGHT_GRADIENT: 0.865}
COSTS[Kind.BACKWARD] = COSTS[Kind.INPUT_GRADIENT] + COSTS[Kind.WEIGHT_GRADIENT]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a table is for. is_training=False: forward ops alone."""

    schedule: PipelineSchedule
    num_stages: int
    num_microbatches: int
    num_chunks: int = 1
    is_lean: bool = False
    is_training: bool = True

    @property
    def name(self) -> str:
        return self.schedule.value + (f" x{self.num_chunks}" if self.num_chunks > 1 else "")

    @property
    def splits_gradients(self) -> bool:
        """Whether input and weight gradients are ops of their own."""
        return self.is_training and self.schedule == PipelineSchedule.ZB_H1

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """In the order in which aligned tables take turns."""
        if not self.is_training:
            return (Kind.FORWARD,)
        if self.splits_gradients:
            return (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
        return (Kind.FORWARD, Kind.BACKWARD)


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """kind, microbatch and chunk [T, P], int32; IDLE where a stage does nothing."""

    shape: Shape
    kind: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray

    @functools.cached_property
    def ticks(self) -> dict[Op, int]:
        """The tick of each op; BACKWARD counts as both gradients too."""
        found = {}
        for tick, stage in zip(*np.nonzero(self.kind), strict=True):
            kind, microbatch, chunk = (int(column[tick, stage]) for column in self._columns)
            for each in _counts_as(Kind(kind)):
                found[Op(each, microbatch, chunk, int(stage))] = int(tick)
        return found

    @property
    def _columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.kind, self.microbatch, self.chunk

    def bubble(self) -> float:
        """The share of the devices' time in which they do nothing of use, messages not counted."""
        useful = self.shape.num_microbatches * sum(COSTS[kind] for kind in self.shape.kinds)
        begin, lengths = self.times()
        return 1 - useful / float((begin + lengths).max())

    def times(self) -> tuple[np.ndarray, np.ndarray]:
        """When each op begins and how long it takes, [T, P], in forward passes of a whole stage.

        Aligned ticks begin together; a lean stage waits for its two neighbours, as messages close a
        tick.
        """
        of_kind = np.array([COSTS.get(kind, 0.0) for kind in Kind]) / self.shape.num_chunks
        lengths = of_kind[self.kind]
        if not self.shape.is_lean:
            longest = lengths.max(1)
            return np.broadcast_to((np.cumsum(longest) - longest)[:, None], lengths.shape), lengths
        begin, end = np.zeros_like(lengths), np.zeros(self.shape.num_stages)
        for tick, row in enumerate(lengths):
            begin[tick] = np.maximum(end, np.maximum(np.roll(end, 1), np.roll(end, -1)))
            end = begin[tick] + row
        return begin, lengths

    def most_in_flight(self) -> int:
        """Chunks' forward passes of which a stage keeps the residuals, at most."""
        return buffers(self).depth["residuals"]


def _counts_as(kind: Kind) -> tuple[Kind, ...]:
    both = (kind, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
    return both if kind == Kind.BACKWARD else (kind,)


# Orders.


def _groups(shape: Shape) -> list[range]:
    """Microbatches that go through a chunk together: P of them, and the last group up to 2P - 1."""
    num, size = shape.num_microbatches, shape.num_stages
    if shape.num_chunks == 1 or num < 2 * size:
        return [range(num)]
    starts = [*range(0, num - 2 * size + 1, size)]
    starts.append(starts[-1] + size)
    return [range(a, b) for a, b in itertools.pairwise([*starts, num])]


def _forward_order(shape: Shape) -> list[tuple[int, int]]:
    """(microbatch, chunk), the same on every stage."""
    chunks = range(shape.num_chunks)
    return [(m, v) for group in _groups(shape) for v in chunks for m in group]


def _backward_order(shape: Shape) -> list[tuple[int, int]]:
    chunks = range(shape.num_chunks - 1, -1, -1)
    return [(m, v) for group in _groups(shape) for v in chunks for m in group]


def source(op: Op, shape: Shape) -> Op | None:
    """The op whose message this one reads.

    None where what it reads is made by all stages together: embeddings, and the loss's gradient.
    """
    last = shape.num_stages - 1
    if op.kind == Kind.FORWARD:
        if op.stage:
            return op._replace(stage=op.stage - 1)
        return op._replace(chunk=op.chunk - 1, stage=last) if op.chunk else None
    if op.kind in (Kind.INPUT_GRADIENT, Kind.BACKWARD) and not is_last_part(op, shape):
        read = op._replace(kind=Kind.INPUT_GRADIENT)
        if op.stage < last:
            return read._replace(stage=op.stage + 1)
        return read._replace(chunk=op.chunk + 1, stage=0)
    return None


def is_last_part(op: Op, shape: Shape) -> bool:
    """Whether the loss is made of this chunk's output."""
    return op.stage == shape.num_stages - 1 and op.chunk == shape.num_chunks - 1


@functools.cache
def timetable(shape: Shape) -> Table:
    """The table of a shape."""
    unbound = _listed(shape, bound=None)
    assert unbound is not None
    if shape.schedule == PipelineSchedule.GPIPE or not shape.is_training:
        return unbound
    for slack in itertools.count():
        bound = [n + slack for n in _least_in_flight(shape)]
        table = _listed(shape, bound=bound)
        if table is not None and len(table.kind) <= len(unbound.kind):
            return table
    raise AssertionError


def _least_in_flight(shape: Shape) -> list[int]:
    """Of each stage, from a forward op to its last gradient; more are added if they are too few."""
    last, chunks = shape.num_stages - 1, shape.num_chunks
    steps = 1 if shape.is_lean and chunks == 1 else 2
    if shape.splits_gradients:
        return [steps * last - (steps - 1) * stage + 1 for stage in range(shape.num_stages)]
    more = (chunks - 1) * shape.num_stages + 1
    return [steps * (last - stage) + more for stage in range(shape.num_stages)]


def _listed(shape: Shape, *, bound: list[int] | None) -> Table | None:
    """The greedy table; None if the bounds leave every stage waiting for another."""
    progress = _Progress(shape, bound)
    rows: list[list[Op | None]] = []
    waited = 0
    for turn in itertools.cycle(shape.kinds):
        if progress.is_done():
            break
        kinds = _by_urgency(shape) if shape.is_lean else (turn,)
        row = [progress.next_op(stage, kinds) for stage in range(shape.num_stages)]
        waited = 0 if any(row) else waited + 1
        if waited > len(shape.kinds):
            return None
        if any(row):
            rows.append(row)
            progress.did(row)
    cells = [[op[:3] if op else (0, 0, 0) for op in row] for row in rows]
    kind, microbatch, chunk = np.array(cells, np.int32).transpose(2, 0, 1)
    return Table(shape, kind, microbatch, chunk)


def _by_urgency(shape: Shape) -> tuple[Kind, ...]:
    first, *others = shape.kinds
    return (*others[:1], first, *others[1:])


class _Progress:
    """What has been done, and what each stage would do next."""

    def __init__(self, shape: Shape, bound: list[int] | None):
        self._shape, self._bound = shape, bound
        self._orders = {kind: _backward_order(shape) for kind in shape.kinds}
        self._orders[Kind.FORWARD] = _forward_order(shape)
        self._next = {kind: [0] * shape.num_stages for kind in shape.kinds}
        self._done: set[Op] = set()

    def is_done(self) -> bool:
        return all(
            number == len(self._orders[kind])
            for kind, numbers in self._next.items()
            for number in numbers
        )

    def next_op(self, stage: int, kinds: Iterable[Kind]) -> Op | None:
        """What the stage can do now, of the first such kind."""
        for kind in kinds:
            number = self._next[kind][stage]
            if number < len(self._orders[kind]):
                op = Op(kind, *self._orders[kind][number], stage)
                if self._is_ready(op) and self._may(op):
                    return op
        return None

    def did(self, row: Iterable[Op | None]) -> None:
        """One tick."""
        for op in filter(None, row):
            self._next[op.kind][op.stage] += 1
            self._done |= {op._replace(kind=kind) for kind in _counts_as(op.kind)}

    def _is_ready(self, op: Op) -> bool:
        if op.kind == Kind.WEIGHT_GRADIENT:
            # Aligned: all stages at once, as stage 0 does, which is the last to have it. Those
            # before it fill the drain, and no tick is spent on fewer of them.
            stage = op.stage if self._shape.is_lean else 0
            return op._replace(kind=Kind.INPUT_GRADIENT, stage=stage) in self._done
        if op.kind != Kind.FORWARD and is_last_part(op, self._shape):
            return op._replace(kind=Kind.FORWARD) in self._done
        read = source(op, self._shape)
        return read is None or read in self._done

    def _may(self, op: Op) -> bool:
        forwards = self._next[Kind.FORWARD][op.stage]
        if op.kind != Kind.FORWARD:
            is_gpipe = self._shape.schedule == PipelineSchedule.GPIPE
            return not is_gpipe or forwards == len(self._orders[Kind.FORWARD])
        released = self._next[self._shape.kinds[-1]][op.stage]
        return self._bound is None or forwards - released < self._bound[op.stage]


# Buffers.


@dataclasses.dataclass(frozen=True, eq=False)
class Buffers:
    """Slots, as a compiler gives out registers.

    depth: slots of the buffers "forward", "backward" (inboxes), "loss" (its gradients), "residuals"
    (from forward op to last gradient) and "crossing" (from input to weight gradient). reads: [T, P]
    the slot that a tick's op reads or writes. arrives: [T, P] the slot for what the neighbours, or
    all together, have sent by the end of a tick; `depth` where that is of no use.
    """

    depth: dict[str, int]
    reads: dict[str, np.ndarray]
    arrives: dict[str, np.ndarray]


INBOXES = {"forward": Kind.FORWARD, "backward": Kind.INPUT_GRADIENT, "loss": Kind.INPUT_GRADIENT}


@functools.cache
def buffers(table: Table) -> Buffers:
    """Where each op of the table finds its operands."""
    depth, reads, arrives = {}, {}, {}
    for name in INBOXES:
        messages = list(_messages(table, name))
        slot_of, depth[name] = _allocate(
            (first + 1, last, stage) for stage, first, last in messages
        )
        reads[name] = np.zeros(table.kind.shape, np.int32)
        arrives[name] = np.full(table.kind.shape, depth[name], np.int32)
        for stage, first, last in messages:
            slot = slot_of[first + 1, last, stage]
            reads[name][last, stage] = arrives[name][first, stage] = slot
    held = {"residuals": Kind.FORWARD, "crossing": Kind.INPUT_GRADIENT}
    for name, first in held.items():
        depth[name], reads[name] = _held(table, first)
    return Buffers(depth, reads, arrives)


def _messages(table: Table, inbox: str) -> Iterator[tuple[int, int, int]]:
    """(stage, tick that sends, tick that reads) of what goes into an inbox."""
    for op, tick in table.ticks.items():
        if op.kind != INBOXES[inbox]:
            continue
        if op.kind != Kind.FORWARD and is_last_part(op, table.shape):
            if inbox == "loss":
                yield op.stage, table.ticks[op._replace(kind=Kind.FORWARD)], tick
        elif inbox != "loss" and (read := source(op, table.shape)):
            yield op.stage, table.ticks[read], tick


def _held(table: Table, first: Kind) -> tuple[int, np.ndarray]:
    """(slots, slot of each tick) of what a kind of op leaves for the last gradient.

    A stage that does nothing in an aligned tick computes on stale numbers. It writes them to a free
    slot, and reads from where its first op has written: nothing else need be in a slot before.
    """
    lives: dict[tuple[int, int, int], Op] = {}
    for op, begin in table.ticks.items():
        end = table.ticks.get(op._replace(kind=Kind.WEIGHT_GRADIENT), begin)
        if op.kind == first and (end > begin or first == Kind.FORWARD):
            lives[begin, end, op.stage] = op
    slot_of, depth = _allocate(lives)
    slots = np.full(table.kind.shape, -1, np.int32)
    for (begin, end, stage), op in lives.items():
        ticks = {table.ticks.get(op._replace(kind=kind), -1) for kind in Kind}
        for tick in ticks & {*range(begin, end + 1)}:
            slots[tick, stage] = slot_of[begin, end, stage]
    if not depth or table.shape.is_lean:  # a lean stage that does nothing computes nothing
        return depth, np.maximum(slots, 0)
    for stage, column in enumerate(slots.T):
        mine = {life[:2]: slot for life, slot in slot_of.items() if life[2] == stage}
        for tick in np.flatnonzero(column < 0).tolist():
            live = {slot for (begin, end), slot in mine.items() if begin <= tick <= end}
            free = next(slot for slot in itertools.count() if slot not in live)
            column[tick] = free if table.kind[tick].max() == first else mine[min(mine)]
    return int(slots.max()) + 1, slots


def _allocate(lives: Iterable[tuple[int, int, int]]) -> tuple[dict[tuple[int, int, int], int], int]:
    """{(first tick, last tick, stage): slot}, and how many slots the fullest stage has.

    A slot is free again in the tick after its last.
    """
    where: dict[tuple[int, int, int], int] = {}
    busy: dict[int, dict[int, int]] = {}
    for first, last, stage in sorted(lives):
        mine = busy.setdefault(stage, {})
        slot = next(slot for slot in itertools.count() if mine.get(slot, -1) < first)
        mine[slot] = last
        where[first, last, stage] = slot
    return where, max(where.values(), default=-1) + 1


# Shown.


def explain(shape: Shape) -> str:
    """The timetable as text, a line a stage; bubble, stash and messages above it.

    F forward, B input gradient, W weight gradient, X both gradients, with the microbatch and, of
    several, the chunk.
    """
    table = timetable(shape)
    depth = buffers(table).depth
    head = (
        f"{shape.name}{', lean' if shape.is_lean else ''}: {shape.num_stages} stages, "
        f"{shape.num_microbatches} microbatches, {len(table.kind)} ticks\n"
        f"bubble {table.bubble():.1%}; residuals of {depth['residuals'] / shape.num_chunks:g} "
        f"microbatches a stage; inboxes {depth['forward']} + {depth['backward']}"
    )
    lines = []
    for stage in range(shape.num_stages):
        cells = zip(*(column[:, stage] for column in table._columns), strict=True)
        texts = [_cell(Kind(kind), m, chunk=v, of=shape) for kind, m, v in cells]
        lines.append(f"stage {stage}  " + " ".join(texts).rstrip())
    return "\n".join([head, *lines])


def _cell(kind: Kind, microbatch: int, *, chunk: int, of: Shape) -> str:
    width = 1 + len(str(of.num_microbatches - 1)) + (of.num_chunks > 1)
    letter = chr(ord("a") + chunk) if of.num_chunks > 1 else ""
    return (f"{LETTERS[kind]}{microbatch}{letter}" if kind else ".").ljust(width)
