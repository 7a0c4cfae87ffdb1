"""The matrices' gradient of grouped products: sums over each group's rows (Pallas Mosaic GPU).

The programs are those of `grouped_programs.py`, with tiles of each matrix in place of tiles of
rows. T rows (tokens), E groups (experts), K rows and N columns of a matrix.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxscale.kernels import grouped_programs, hopper, varying
from jaxscale.kernels.grouped_programs import (
    BLOCK,
    Program,
    Tiles,
    Work,
    kernel_of,
    own_lines,
    scratch_of,
    tiles_for,
)
from jaxscale.kernels.grouped_visits import ALIGNED, TILE_T, ends_of
from jaxscale.kernels.hopper import WARPGROUPS, run

TILE_K = TILE_T  # columns of x


def weight_gradient(x_TK, grad_TN, *, group_sizes_E, out_dtype, tiles: Tiles | None = None):
    """The sum over each group's rows of x^T grad: [E, K, N] of `out_dtype`, bfloat16 or float32.

    Rows behind the last group may hold anything. What is not finite in a group's rows spoils its
    own matrix, and perhaps those of the two beside it.
    """
    size, columns = x_TK.shape[1], grad_TN.shape[1]
    # A tile that is held in float32 takes more registers than there are.
    is_held = out_dtype == jnp.bfloat16
    tiles = (tiles or tiles_for(columns))._replace(is_held=is_held)
    num_groups = len(group_sizes_E)
    programs = min(
        grouped_programs.PROGRAMS, num_groups * -(-size // TILE_K) * -(-columns // tiles.columns)
    )

    def grouped_weight_gradient(*refs, **scratch):
        run(_WeightGradient(*refs, **scratch, tiles=tiles, programs=programs))

    operands = (BLOCK, TILE_K), (BLOCK, tiles.columns)
    kernel = kernel_of(
        grouped_weight_gradient,
        jax.ShapeDtypeStruct((num_groups, size, columns), out_dtype),
        scratch=dict(
            **scratch_of(tiles, operands, like=(x_TK, grad_TN), out_dtype=out_dtype),
            masked=plgpu.Barrier(num_arrivals=WARPGROUPS),
        ),
        programs=programs,
    )
    ends_E = ends_of(group_sizes_E)
    return varying.as_operands(kernel(x_TK, grad_TN, ends_E), x_TK, grad_TN, ends_E)


@dataclasses.dataclass(frozen=True)
class _WeightGradient(Program):
    """The program of `weight_gradient`. ends: of groups, int32 [E]."""

    x: Any
    grad: Any
    ends: Any
    out: Any
    _: dataclasses.KW_ONLY
    masked: Any

    @property
    def num_columns(self) -> int:
        return -(-self.out.shape[2] // self.tiles.columns)

    @property
    def num_in_group(self) -> int:
        return -(-self.out.shape[1] // TILE_K) * self.num_columns

    def num_tiles(self):
        return self.out.shape[0] * self.num_in_group

    def entries(self, i):
        group = lax.div(i, self.num_in_group)
        ends = jnp.maximum(group - 1, 0), group, self.ends.shape[0] - 1
        return tuple(self.ends[i] for i in ends)

    def work(self, i, entries) -> Work:
        group, tile = lax.div(i, self.num_in_group), lax.rem(i, self.num_in_group)
        *ends, num_rows = entries
        before, end = (jnp.minimum(row, self.x.shape[0]) for row in ends)
        begin = jnp.where(group > 0, before, 0)
        first = pl.multiple_of(lax.div(begin, ALIGNED) * ALIGNED, ALIGNED)
        return Work(
            group=group,
            first=first,
            begin=begin,
            end=end,
            column=lax.rem(tile, self.num_columns) * self.tiles.columns,
            line=lax.div(tile, self.num_columns) * TILE_K,
            stored=(0, 64),
            num_blocks=jnp.where(end > begin, lax.div(end - first + BLOCK - 1, BLOCK), 0),
            num_rows=num_rows,
        )

    def sources(self, work, i):
        rows = pl.ds(work.first + i * BLOCK, BLOCK)
        columns = pl.ds(work.column, self.tiles.columns)
        return self.x.at[rows, pl.ds(work.line, TILE_K)], self.grad.at[rows, columns]

    def operands(self, slot):
        x_tile = self.lhs_tiles.at[slot, :, own_lines()]
        return x_tile.transpose((1, 0)), self.rhs_tiles.at[slot]

    def mask(self, work, i, *, slot):
        """Zeros for the rows of other groups: of x, and of the gradient behind the last group.

        In a group's first tile and its last alone. Each warpgroup has its own columns of x; the
        gradient's are shared, and are left alone where another group's rows are as finite.
        """
        row = work.first + i * BLOCK
        rows = work.begin - row, work.end - row
        mine = self.lhs_tiles.at[slot, :, own_lines()]
        pl.when((rows[0] > 0) | (rows[1] < BLOCK))(lambda: _keep(mine, rows))

        @pl.when(row + BLOCK > work.num_rows)
        def mask_gradient():
            for number in range(self.tiles.columns // BLOCK):
                part = self.rhs_tiles.at[slot, :, pl.ds(number * BLOCK, BLOCK)]
                is_mine = lax.axis_index("warpgroup") == number % WARPGROUPS
                pl.when(is_mine)(functools.partial(_keep, part, rows))
            plgpu.barrier_arrive(self.masked)
            plgpu.barrier_wait(self.masked)

    def target(self, lines, columns, *, made):
        return self.out.at[made.group, lines, columns]


def _keep(tile, rows) -> None:
    """Zeros instead of all of a [64, 64] tile but the rows from rows[0] to rows[1]."""
    values = hopper.load(tile, layout=plgpu.Layout.WGMMA)
    row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
    is_kept = (row >= rows[0]) & (row < rows[1])
    tile[...] = jnp.where(is_kept, values, jnp.zeros_like(values))
    plgpu.commit_smem()
