"""Where groups of rows are, in tiles: tables that are made before grouped products run.

T rows (tokens), E groups (experts).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxscale.kernels.hopper import WARPGROUPS

TILE_T = 64 * WARPGROUPS  # rows of a tile: 64 a warpgroup
ALIGNED = 8  # rows at a multiple of which a tile begins


class Groups(NamedTuple):
    """Rows begin <= row < end of each group, and `first`: begin, or up to 7 rows before it, where
    its tiles begin. int32 [E]."""

    first: Any
    begin: Any
    end: Any


def groups_of(group_sizes_E, *, num_rows: int) -> Groups:
    # Not jnp.cumsum, which is a launch or two more than a sum that XLA can fuse.
    group = jnp.arange(len(group_sizes_E), dtype=jnp.int32)
    end_E = jnp.where(group <= group[:, None], group_sizes_E, 0).sum(1, dtype=jnp.int32)
    # Sizes that come to more than there are rows must not lead out of the tables.
    begin_E, end_E = (jnp.clip(x, 0, num_rows) for x in (end_E - group_sizes_E, end_E))
    return Groups(begin_E // ALIGNED * ALIGNED, begin_E, end_E)


class Visits(NamedTuple):
    """The tiles of rows: a group, the first row, and the rows begin <= row < end to be stored.

    int32 [tiles, 4] and [1]: so many of them there are. The group E is nobody's: its rows, behind
    the last group, become zeros.
    """

    tiles: Any
    num: Any


def visits_of(group_sizes_E, *, num_rows: int) -> Visits:
    """At most T / 128 + 134 / 128 for each group and for nobody; half of it for each on average."""
    nobody = num_rows - group_sizes_E.sum(dtype=jnp.int32)[None]
    groups = groups_of(jnp.concatenate([group_sizes_E, nobody]), num_rows=num_rows)
    num_groups = len(groups.end)
    group = jnp.arange(num_groups, dtype=jnp.int32)
    is_there = groups.end > groups.begin
    tiles = jnp.where(is_there, -(-(groups.end - groups.first) // TILE_T), 0)
    last = jnp.where(group <= group[:, None], tiles, 0).sum(1, dtype=jnp.int32)
    most = (num_rows + num_groups * (TILE_T + ALIGNED - 2)) // TILE_T
    tile = jnp.arange(most, dtype=jnp.int32)
    group = (last <= tile[:, None]).sum(1, dtype=jnp.int32)
    group = jnp.minimum(group, num_groups - 1)
    first = groups.first[group] + (tile - (last - tiles)[group]) * TILE_T
    begin = jnp.maximum(groups.begin[group], first)
    end = jnp.minimum(groups.end[group], first + TILE_T)
    return Visits(jnp.stack([group, first, begin, end], axis=1), last[-1:])
