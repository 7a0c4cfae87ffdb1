"""Tiles dealt to programs that stay, one a multiprocessor, each with a list of its own.

A program of one tile waits for its first loads and its last stores; one that goes on to another
loads that one's beside them (docs/kernels.md). No program can ask here for what is left, so tiles
are dealt before a kernel runs, by how many they visit: most first, to the programs there and back.
The busiest has 0 to 4% more than the mean in simulation, of rows of one document and packed ones.

B rows, P programs.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.kernels import hopper
from jaxscale.kernels.flash_spans import Visits, Work

PROGRAMS = hopper.MULTIPROCESSORS
# Of its L2 cache, 50 MiB of which half is far from each multiprocessor.
L2_BYTES = 24 * 2**20


class Item(NamedTuple):
    """A tile of a row and a head, and what it visits."""

    row: Any
    head: Any
    tile: Any
    work: Work


@dataclasses.dataclass(frozen=True)
class Dealt:
    """What each program makes, in this order.

    table: int32 [P, n, 7], `Item`s, and another's behind a program's last; P are clusters where
    programs of one share a list. num_items: of all.
    """

    table: Any
    num_items: int

    @property
    def num_programs(self) -> int:
        return self.table.shape[0]

    @property
    def num_turns(self) -> int:
        """The most that a program makes."""
        return self.table.shape[1] - 1

    def num(self):
        """Of this program, inside a kernel: the items of its list."""
        return self.num_of(lax.axis_index("program"))

    def num_of(self, program):
        last_turn = (self.num_items - 1) // self.num_programs
        place = _place(program, last_turn, num_programs=self.num_programs)
        return last_turn + (place < self.num_items).astype(jnp.int32)

    def item(self, n) -> Item:
        """This program's nth, inside a kernel."""
        row, head, tile, *work = (self.table[lax.axis_index("program"), n, i] for i in range(7))
        return Item(row, head, tile, Work(*work))


def deal(
    visits: Visits,
    *,
    num_heads: int,
    head_bytes: int,
    masked_cost: float = 1.0,
    together: int = 1,
) -> Dealt:
    """Each program makes its tiles of a few heads after those of others: what these read is then
    in the L2 cache for all programs.

    head_bytes: what the programs of one head read, and add to, in all rows; its part of what heads
    share. masked_cost: of a visited tile with a mask; one without takes 1. together: the programs
    of a cluster, which have one list: of each item each of them makes one of so many heads, from
    `head` on.
    """
    num_heads, head_bytes = num_heads // together, head_bytes * together
    num_rows, num_tiles = visits.begin.shape
    num_items = num_rows * num_tiles * num_heads
    num_programs = min(PROGRAMS // together, num_items)
    begin, end, whole_begin, whole_end = (x.astype(jnp.float32) for x in visits)
    num_whole = whole_end - whole_begin
    cost = num_whole + masked_cost * (end - begin - num_whole)
    most_first = jnp.argsort(-cost.reshape(-1))
    program, turn = np.arange(num_programs)[:, None], np.arange(-(-num_items // num_programs) + 1)
    place = _place(program, turn, num_programs=num_programs)
    # All heads of a tile stand together, each time another first, so that a program gets all.
    head = (place + place // num_heads) % num_heads
    few = max(1, L2_BYTES // head_bytes)
    by_head = np.argsort(np.where(place < num_items, head // few, num_heads), kind="stable")
    place, head = (np.take_along_axis(x, by_head, axis=1) for x in (place, head))
    tile_of_row = most_first[np.minimum(place, num_items - 1) // num_heads]
    where = [tile_of_row // num_tiles, jnp.asarray(together * head), tile_of_row % num_tiles]
    work = [x.reshape(-1)[tile_of_row] for x in visits]
    return Dealt(jnp.stack(where + work, axis=-1).astype(jnp.int32), num_items)


def _place(program, turn, *, num_programs: int):
    """Among all items, of a program's in a turn."""
    there, back = turn * num_programs + program, (turn + 1) * num_programs - 1 - program
    return there + (turn % 2) * (back - there)
