"""Tiles dealt to programs that stay, one a multiprocessor, each with a list of its own.

A program of one tile waits for its first loads and its last stores; one that goes on to another
loads that one's beside them. Tiles of head size 64 are short enough for it to count: 10% forward,
7 to 13% backward (docs/kernels.md). No program can ask here for what is left, so all is dealt
beforehand, by what each tile takes. That is known of rows of one document; of packed ones, dealt
like this, the busiest program would have 11 to 17% more than the mean.

B rows, P programs.
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.kernels.flash_spans import Visits, Work

PROGRAMS = 132  # multiprocessors of an H100 or H200


class Item(NamedTuple):
    """A tile of a row and a head, and what it visits."""

    row: Any
    head: Any
    tile: Any
    work: Work


class Dealt(NamedTuple):
    """What each program makes, in this order.

    table: int32 [P, n + 1, 7], `Item`s, with zeros behind a program's last; counts: int32 [P].
    """

    table: Any
    counts: Any

    def num(self):
        """Of this program, inside a kernel."""
        return self.counts[lax.axis_index("program")]

    def item(self, n) -> Item:
        """This program's nth, inside a kernel; behind the last one zeros."""
        row, head, tile, *work = (self.table[lax.axis_index("program"), n, i] for i in range(7))
        return Item(row, head, tile, Work(*work))


def deal(visits: Visits, *, num_heads: int, steps: Sequence[int], overhead: int) -> Dealt:
    """The longest tiles of a row first, each to who is free first.

    steps: what each tile takes in a row of one document; overhead: what a tile takes besides.
    """
    num_rows = visits.begin.shape[0]
    longest_first = sorted(range(len(steps)), key=lambda tile: -steps[tile])
    places: list[list] = [[] for _ in range(PROGRAMS)]
    free = [(0, program) for program in range(PROGRAMS)]
    for row, tile, head in itertools.product(range(num_rows), longest_first, range(num_heads)):
        busy, program = free[0]
        places[program].append((row, head, tile))
        heapq.heapreplace(free, (busy + steps[tile] + overhead, program))
    counts = np.array([len(own) for own in places], np.int32)
    table = np.zeros((PROGRAMS, counts.max() + 1, 3), np.int32)
    for own, rows in zip(places, table, strict=True):
        rows[: len(own)] = np.reshape(own, (-1, 3))
    is_there = np.arange(table.shape[1]) < counts[:, None]
    work = visits.stacked()[table[..., 0], table[..., 2]] * is_there[..., None].astype(np.int32)
    return Dealt(jnp.concatenate([table, work], axis=-1), jnp.asarray(counts))
