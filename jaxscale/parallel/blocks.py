"""An aligned table as straight blocks of ops, and the blocks as loops.

Ticks of a forward op and of the gradients' ops after it are one block. Blocks that do the same
things, though to other microbatches, are one loop over their rows; and loops that recur are a loop.
A row has, for each kind of op in the block, an array [P] of each of `columns`, and the microbatches
of what all stages do together. P stages. Nothing here imports jax but for its trees.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxscale.parallel.schedules import INBOXES, Kind, Table, buffers, is_last_part

GRADIENTS = (Kind.INPUT_GRADIENT, Kind.BACKWARD)


class Signature(NamedTuple):
    """What a block does; it is the same for all stages."""

    kinds: tuple[Kind, ...]
    has_head: bool
    has_embedding: bool
    has_embedding_gradient: bool
    receives: bool  # the gradients that the block before has to send


class Run(NamedTuple):
    """Equal blocks that follow each other. rows: leaves [repeats, length, P]."""

    signature: Signature
    length: int
    rows: dict[str, Any]


def program(table: Table) -> list[tuple[int, list[Run]]]:
    """[(repeats, runs)]: the table's blocks, in order."""
    blocks = list(_blocks(table))
    runs: list[tuple[Signature, list[dict[str, Any]]]] = []
    for signature, group in itertools.groupby(blocks, lambda block: block[0]):
        runs.append((signature, [row for _, row in group]))
    found = []
    for first, width, repeats in rolled([(signature, len(rows)) for signature, rows in runs]):
        window = []
        for place in range(first, first + width):
            signature, rows = runs[place]
            turns = [_stacked(runs[place + turn * width][1]) for turn in range(repeats)]
            window.append(Run(signature, len(rows), _stacked(turns)))
        found.append((repeats, window))
    return found


def rolled(items: list, *, start: int = 0) -> list[tuple[int, int, int]]:
    """[(first, width, repeats)] that cover the list, the longest part that recurs as one."""
    best = (0, 0, 0, 1)
    for width in range(1, len(items) // 2 + 1):
        for first in range(len(items) - 2 * width + 1):
            repeats, window = 1, items[first : first + width]
            while items[first + repeats * width : first + (repeats + 1) * width] == window:
                repeats += 1
            best = max(best, ((repeats - 1) * width, -width, -first, repeats))
    saved, width, first, repeats = best[0], -best[1], -best[2], best[3]
    if not saved:
        return [(start, len(items), 1)] if items else []
    end = first + width * repeats
    return [
        *rolled(items[:first], start=start),
        (start + first, width, repeats),
        *rolled(items[end:], start=start + end),
    ]


def _stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def _blocks(table: Table) -> Iterator[tuple[Signature, dict[str, Any]]]:
    """(what it does, its row) of each block."""
    kinds = [Kind(row.max()) for row in table.kind]
    starts = [t for t, kind in enumerate(kinds) if not t or kind <= kinds[t - 1]]
    shared, of_stages = together(table), columns(table)
    back = [t for t, kind in enumerate(kinds) if kind in GRADIENTS]
    nothing = np.full(table.shape.num_stages, buffers(table).depth["backward"], np.int32)
    for first, end in itertools.pairwise([*starts, len(kinds)]):
        ticks = range(first, end)
        found = {
            name: next((numbers[t] for t in ticks if t in numbers), None)
            for name, numbers in shared.items()
        }
        row: dict[str, Any] = {
            kinds[t].name: {name: column[t] for name, column in of_stages.items()} for t in ticks
        }
        for name, number in found.items():
            row[name] = np.full(table.shape.num_stages, number or 0, np.int32)
        before = [t for t in back if t < first]
        row["receives"] = of_stages["arrives_backward"][before[-1]] if before else nothing
        signature = Signature(
            kinds=tuple(kinds[t] for t in ticks),
            has_head=found["head"] is not None,
            has_embedding=found["embedding"] is not None,
            has_embedding_gradient=found["embedding_gradient"] is not None,
            receives=bool(back) and back[0] < end and back[-1] >= first,
        )
        yield signature, row


def together(table: Table) -> dict[str, dict[int, int]]:
    """Tick -> microbatch of what all stages do together.

    head: in the tick of the last part's forward op. embedding: in the forward tick, of a lean table
    the tick, before the first part's. embedding_gradient: in the tick of the first part's gradient.
    """
    found: dict[str, dict[int, int]] = {"head": {}, "embedding": {}, "embedding_gradient": {}}
    forwards = [t for t, row in enumerate(table.kind) if (row == Kind.FORWARD).any()]
    before = dict(zip(forwards, [-1, *forwards[:-1]], strict=True))
    for op, tick in table.ticks.items():
        is_first = op.stage == op.chunk == 0
        if op.kind == Kind.FORWARD and is_last_part(op, table.shape):
            found["head"][tick] = op.microbatch
        if op.kind == Kind.FORWARD and is_first and tick:
            ahead = tick - 1 if table.shape.is_lean else before[tick]
            found["embedding"][ahead] = op.microbatch
        if op.kind == Kind.INPUT_GRADIENT and is_first:
            found["embedding_gradient"][tick] = op.microbatch
    return found


def columns(table: Table) -> dict[str, np.ndarray]:
    """What each stage's op in each tick is about, and its slots: [T, P] of each."""
    slots = buffers(table)
    found = dict(microbatch=table.microbatch, chunk=table.chunk, is_active=table.kind != Kind.IDLE)
    found["is_other_chunk"] = _is_other_chunk(table)
    found |= {f"reads_{name}": column for name, column in slots.reads.items()}
    return found | {f"arrives_{name}": slots.arrives[name] for name in INBOXES}


def _is_other_chunk(table: Table) -> np.ndarray:
    """[T, P]: whether the stage's last op of the same kind was of another chunk, or none."""
    found = np.zeros(table.kind.shape, bool)
    for stage, kinds in enumerate(table.kind.T):
        for kind in table.shape.kinds:
            ticks = np.flatnonzero(kinds == kind)
            found[ticks, stage] = np.diff(table.chunk[ticks, stage], prepend=-1) != 0
    return found
