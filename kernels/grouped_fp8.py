"""Products of groups of rows, each with a matrix of its own, of operands in 8 bits, on Hopper.

As `grouped_programs.py` makes them in bfloat16, with half the bytes. Tensor cores take 8 bits with
what is summed last alone, so a matrix is needed both ways: for the product, and for x's gradient.
Each 128 of a sum leave their short accumulators, which costs nothing: memory is what is waited for
(docs/kernels.md). The matrices' own gradients are not made so: they sum over few rows.

T rows (tokens), E groups (experts), K what is summed, N columns of the result, V visits (tiles).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxscale.kernels import hopper
from jaxscale.kernels.grouped_programs import STAGES, Product, Tiles, launch, own_lines
from jaxscale.kernels.grouped_visits import ALIGNED, TILE_T, visits_of
from jaxscale.kernels.hopper import zeros

NAME = "the grouped product in 8 bits"
BLOCK = 128  # of what is summed, in one tile of an operand
DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
COLUMNS = (256, 128)
# 5% faster than 8 for x's gradient with 64 groups of 256 rows, 2048 x 768 (H200).
TOGETHER = 16
# Of a tile's columns those whose sums are on the tensor cores at once: 64 of a thread's registers,
# beside 128 of all its sums.
PART = 128
PER_ROW = plgpu.Layout.WGMMA.reduce(1)


def supported(x_TK, w_ENK, *, platform: str, compute_capability: str = "9.0") -> str | None:
    """None if `multiply` can run these shapes on this platform ("gpu"), else the reason."""
    if reason := hopper.objection(NAME, platform=platform, compute_capability=compute_capability):
        return reason
    return _objection(x_TK, w_ENK)


def _objection(x_TK, w_ENK) -> str | None:
    """What is wrong with arrays that fit each other, if anything."""
    for name, operand in dict(x=x_TK, w=w_ENK).items():
        if operand.dtype not in DTYPES:
            return f"{NAME} takes {name} of float8_e4m3fn or float8_e5m2, not {operand.dtype}"
    if not x_TK.shape[0] or x_TK.shape[0] % ALIGNED:
        return f"{NAME} takes x of a multiple of {ALIGNED} rows, not {x_TK.shape[0]}"
    if odd := objection(w_ENK.shape):
        return f"{NAME} takes w {odd}"
    return None


def objection(shape) -> str | None:
    """What is wrong with matrices of this shape [E, ., .], if anything."""
    odd = [size for size in shape[1:] if not size or size % BLOCK]
    return f"of multiples of {BLOCK}, not {odd[0]}" if odd else None


def reference(x_TK, w_ENK, *, x_scale_T, w_scale_E, group_sizes_E, out_dtype):
    """The same by XLA, out of wide operands: bfloat16 holds a value times a power of two."""
    x_TK = x_TK.astype(jnp.bfloat16) * x_scale_T.astype(jnp.bfloat16)[:, None]
    w_ENK = w_ENK.astype(jnp.bfloat16) * w_scale_E.astype(jnp.bfloat16)[:, None, None]
    y_TN = lax.ragged_dot(
        x_TK,
        w_ENK.transpose(0, 2, 1),
        group_sizes_E.astype(jnp.int32),
        preferred_element_type=jnp.float32,
    )
    return y_TN.astype(out_dtype)


def multiply(
    x_TK,
    w_ENK,
    *,
    x_scale_T,
    w_scale_E,
    group_sizes_E,
    out_dtype,
    tiles: Tiles | None = None,
):
    """The rows of group e times w[e], scaled: [T, N] of `out_dtype`, bfloat16 or float32.

    Both e4m3 or e5m2, with scales that are float32 powers of two: one for each row of x, and one
    for each group's matrix. Rows behind the last group may hold anything, and give zeros. Raises
    ValueError, which names the array, for what does not fit or `supported` would refuse.
    """
    _check(x_TK, w_ENK, x_scale=x_scale_T, w_scale=w_scale_E, group_sizes=group_sizes_E)
    columns = w_ENK.shape[1]
    visits = visits_of(group_sizes_E.astype(jnp.int32), num_rows=len(x_TK))
    # A tile's rows may go on behind the last.
    x_scale_T = jnp.pad(x_scale_T, (0, TILE_T))

    def program(*refs, **scratch):
        x, w, visits, counts, x_scale, w_scale, out = refs
        scales = dict(x_scale=x_scale, w_scale=w_scale)
        return _Scaled(x, w, visits, counts, out, is_transposed=True, **scales, **scratch)

    return launch(
        program,
        (x_TK, w_ENK, *visits, x_scale_T, w_scale_E),
        tiles=tiles or tiles_for(columns),
        columns=columns,
        out_dtype=out_dtype,
        is_transposed=True,
    )


def _check(x_TK, w_ENK, *, x_scale, w_scale, group_sizes) -> None:
    if x_TK.ndim != 2 or w_ENK.ndim != 3 or x_TK.shape[1] != w_ENK.shape[2]:
        raise ValueError(
            f"x has the shape {x_TK.shape} and w {w_ENK.shape}; they must be [T, K] and [E, N, K]"
        )
    if reason := _objection(x_TK, w_ENK):
        raise ValueError(reason)
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes must be integers, not {group_sizes.dtype}")
    one_each = {
        "x_scale": (x_scale, len(x_TK)),
        "w_scale": (w_scale, len(w_ENK)),
        "group_sizes": (group_sizes, len(w_ENK)),
    }
    for name, (array, number) in one_each.items():
        if array.shape != (number,):
            raise ValueError(f"{name} has the shape {array.shape}; it must be {(number,)}")


def tiles_for(columns: int) -> Tiles:
    """Those for results of so many columns, as in `grouped_programs.tiles_for`."""
    width = min(COLUMNS, key=lambda width: -(-columns // width) * width)
    return Tiles(columns=width, stages=STAGES[width], together=TOGETHER)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scaled(Product):
    """x_scale: float32 [T + 128]; w_scale: [E]."""

    x_scale: Any
    w_scale: Any

    def sums(self, work, count, *, before):
        assert before is None, "its sums leave no registers to hold a tile"
        width = min(PART, self.tiles.columns)
        nothing = zeros(width, jnp.float32)
        # Asked for before the sum, and not waited for until it is made.
        # Nobody's rows, which may hold anything, have the zeros behind the last.
        is_nobodys = work.group == self.w.shape[0]
        first = jnp.where(is_nobodys, self.x.shape[0], work.line)
        rows = pl.ds(first + own_lines().start, 64)
        of_rows = hopper.load(self.x_scale.at[rows], layout=PER_ROW, optimized=False)
        of_matrix = self.w_scale[jnp.where(is_nobodys, 0, work.group)]

        def with_block(i, sums):
            slot = self.slot(count + i)
            plgpu.barrier_wait(self.loaded.at[slot])
            made = [
                total + self.product(slot, pl.ds(number * width, width))
                for number, total in enumerate(sums)
            ]
            plgpu.barrier_arrive(self.used.at[slot])
            return made

        num_parts = self.tiles.columns // width
        sums = lax.fori_loop(0, work.num_blocks, with_block, [nothing] * num_parts)
        scale = of_rows * jnp.where(is_nobodys, 0.0, of_matrix)
        return [part * hopper.by_row(scale, part) for part in sums]

    def product(self, slot, columns):
        """Of one block and some of the tile's columns: float32 [64, columns]."""

        def multiply(sums):
            rhs = self.rhs_tiles.at[slot, columns].transpose((1, 0))
            plgpu.wgmma(sums, self.lhs_tiles.at[slot, own_lines()], rhs)
            return sums[...]

        return pl.run_scoped(multiply, plgpu.ACC((64, columns.size), jnp.float32))
