"""Sums of dq, to which programs of flash attention's backward pass add (Pallas Mosaic GPU, Hopper).

A warpgroup's part is of 64 queries and C columns, 32 or 64, in float32. In shared memory and in the
sums it lies as its threads hold it: four numbers of each thread, then the next four of each. So
threads store without conflicts of banks what they have, where rows of columns want registers
exchanged first, and TMA adds one run of memory to another. At head size 128 both passes take up to
3.2% less so on an H200 (docs/kernels_record.md). Columns come back in order as sums are read.

B rows, S queries, N query heads, H head size, C columns of a part.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu

NUM_QUERIES = 64  # of a part
LINE = 256  # numbers: the longest inner dimension of a copy of TMA's
# Where a part's query 16 * warp + 8 * half + row and column 16 * i + 8 * block + 2 * lane + c lie
# in an accumulator: i and half tell which four numbers of a thread, block and c which of the four.
WARPS, HALVES, ROWS, BLOCKS, LANES, COLUMNS = 4, 2, 8, 2, 4, 2


def shape_of(shape_BSNH: tuple[int, ...], *, num_columns: int) -> tuple[int, ...]:
    """Of the sums: [B, N, S / 64, H / C, C / 4, 256]."""
    rows, seq, num_heads, head_size = shape_BSNH
    parts = seq // NUM_QUERIES, head_size // num_columns
    return rows, num_heads, *parts, *part_shape(num_columns)


def part_shape(num_columns: int) -> tuple[int, int]:
    return NUM_QUERIES * num_columns // LINE, LINE


def as_held(values: Any) -> jax.Array:
    """A part, [64, C] of a warpgroup's accumulators, as [C / 4, 256]: the same registers."""
    shape = part_shape(values.shape[1])
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=BLOCKS * COLUMNS)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout),
    )
    def renamed(_, held):
        pairs = held.registers.reshape(-1, BLOCKS, HALVES).swapaxes(1, 2).reshape(-1, BLOCKS)
        fours = np.array([utils.vector_concat(list(pair)) for pair in pairs], dtype=object)
        return FragmentedArray(_registers=fours, _layout=layout.to_mgpu(), _is_signed=None)

    return renamed(values)


def in_order(sums: jax.Array) -> jax.Array:
    """[B, S, N, H] of sums of that shape."""
    rows, num_heads, num_tiles, num_parts, *part = sums.shape
    num_columns = part[0] * LINE // NUM_QUERIES
    groups = num_columns // (BLOCKS * LANES * COLUMNS)
    tiles = rows, num_heads, num_tiles, num_parts
    x = sums.reshape(*tiles, groups, HALVES, WARPS, ROWS, LANES, BLOCKS, COLUMNS)
    # To row, tile, warp, half, row of a half; head, part, group, block, lane, column.
    x = x.transpose(0, 2, 6, 5, 7, 1, 3, 4, 9, 8, 10)
    return x.reshape(rows, num_tiles * NUM_QUERIES, num_heads, num_parts * num_columns)
