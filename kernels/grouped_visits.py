"""Where groups of rows are, in tiles: tables that are made before grouped products run.

XLA makes each with one sum, and so in one launch, of some 2 us: the ends of groups, which are all
that the gradient of weights reads; the tiles up to each end; the tiles. Products of the same groups
in one program, or in one loop, share them.

T rows (tokens), E groups (experts), V visits (tiles).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxscale.kernels.hopper import WARPGROUPS

TILE_T = 64 * WARPGROUPS  # rows of a tile: 64 a warpgroup
ALIGNED = 8  # rows at a multiple of which a tile begins


def ends_of(group_sizes_E):
    """The row behind each group's last: int32 [E]; sizes may come to more than there are rows."""
    return _sums_up_to_each(group_sizes_E)


class Visits(NamedTuple):
    """The tiles of rows: a group, the first row, and the rows begin <= row < end to be stored.

    tiles: int32 [V, 4], of which the last of `counts` are there; counts: of tiles up to each
    group's end, int32 [E + 1]. The group E is nobody's: its rows, behind the last group, become
    zeros.
    """

    tiles: Any
    counts: Any


def visits_of(group_sizes_E, *, num_rows: int) -> Visits:
    """At most T / 128 + 134 / 128 for each group and for nobody; half of it for each on average."""
    # Sizes that come to more than there are rows must not lead out of the tables.
    ends_E = jnp.minimum(ends_of(group_sizes_E), num_rows)
    begin, end = _before(ends_E), jnp.pad(ends_E, (0, 1), constant_values=num_rows)
    first = lax.div(begin, ALIGNED) * ALIGNED
    tiles = jnp.where(end > begin, lax.div(end - first + TILE_T - 1, TILE_T), 0)
    counts = _sums_up_to_each(tiles)
    most = (num_rows + len(counts) * (TILE_T + ALIGNED - 2)) // TILE_T
    tile = jnp.arange(most, dtype=jnp.int32)[:, None]
    # Not `counts - tiles`: then XLA would keep `tiles`, by a launch.
    before = _before(counts[:-1])
    first += (tile - before) * TILE_T
    group = jnp.arange(len(counts), dtype=jnp.int32)
    entries = group, first, jnp.maximum(begin, first), jnp.minimum(end, first + TILE_T)
    # Sums of one value and zeros: to look for a tile's group, and then for what it has there, are
    # two launches.
    is_its = (before <= tile) & (tile < counts)
    in_groups = jnp.stack([jnp.where(is_its, entry, 0) for entry in entries], axis=1)
    return Visits(in_groups.sum(2, dtype=jnp.int32), counts)


def _before(x):
    """0 and those but the last."""
    return jnp.pad(x, (1, 0))


def _sums_up_to_each(x):
    # Not jnp.cumsum, which is a launch or two more than a sum that XLA can fuse.
    i = jnp.arange(len(x), dtype=jnp.int32)
    return jnp.where(i <= i[:, None], x, 0).sum(1, dtype=jnp.int32)
