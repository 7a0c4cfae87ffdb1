"""The product of two matrices in 8 bits, each 128 of whose summed values have a scale of their own.

For Hopper (Pallas Mosaic GPU). cuBLASLt can scale so since CUDA 12.9, but XLA cannot ask it to.
Each 128 of the sum are added up on the tensor cores, which keep 13 bits below its largest term,
then scaled and added in float32: the remedy for those few bits, too (DeepSeek-V3,
arXiv:2412.19437, 3.3).

M rows, N columns of the result, K what is summed; L is M or M / 128, R is N or N / 128.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxscale.kernels import hopper, varying
from jaxscale.kernels.hopper import WARPGROUPS, by_column, by_row, load, run, wait_if, zeros

# Of the sum, of a weight's rows and of its columns: what has one scale.
BLOCK = 128
TILE = 128  # rows, and columns, of a program's part of the result
STAGES = 4  # tiles of both operands in shared memory: 33 KiB each, beside 64 KiB of results
# Tiles of columns that are made one after the other for one tile of rows, for the L2 cache.
TOGETHER = 8
# Of 65,536 a multiprocessor has; 128 threads a warpgroup.
REGISTERS, REGISTERS_TO_COPY = 232, 40

PER_ROW, PER_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def device_supported(platform: str, compute_capability: str) -> str | None:
    """None if `multiply` can run on this platform ("gpu"), else the reason."""
    return hopper.objection(
        "the block-scaled product", platform=platform, compute_capability=compute_capability
    )


def supported(lhs_MK, rhs_NK, *, platform: str, compute_capability: str = "9.0") -> str | None:
    """None if `multiply` can run these shapes on this platform ("gpu"), else the reason."""
    if reason := device_supported(platform, compute_capability):
        return reason
    return _objection(lhs_MK) or _objection(rhs_NK)


def _objection(operand) -> str | None:
    """What is wrong with an operand by itself, if anything."""
    products = "block-scaled products are of"
    if operand.ndim != 2:
        return f"{products} matrices, not of the shape {operand.shape}"
    if operand.dtype not in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        return f"{products} float8_e4m3fn or float8_e5m2, not {operand.dtype}"
    if odd := [size for size in operand.shape if not size or size % TILE]:
        return f"{products} multiples of {TILE}, not {odd[0]}"
    return None


def reference(lhs_MK, rhs_NK, *, lhs_scale, rhs_scale, out_dtype):
    """The same in plain jnp, out of wide operands."""
    wide = _wide(lhs_MK, lhs_scale), _wide(rhs_NK, rhs_scale)
    sums = jnp.einsum("MK,NK->MN", *wide, preferred_element_type=jnp.float32)
    return sums.astype(out_dtype)


def multiply(lhs_MK, rhs_NK, *, lhs_scale, rhs_scale, out_dtype):
    """lhs times rhs, both scaled: [M, N] of `out_dtype` (bfloat16 or float32).

    lhs_scale: float32 [L, K / 128], and rhs_scale [R, K / 128]: one for each 128 of the sum, and
    for each row or each 128 rows of the operand. Both with the summed dimension last, e4m3 or
    e5m2. Raises ValueError, which names the array, for what `supported` would refuse and where
    sizes do not fit.
    """
    _check(lhs_MK, rhs_NK, lhs=lhs_scale, rhs=rhs_scale)
    (num_rows, size), num_columns = lhs_MK.shape, rhs_NK.shape[0]
    tiled = plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128)

    def tiles_of(operand, *shape):
        return plgpu.SMEM((STAGES, *shape, BLOCK), operand.dtype, transforms=tiled)

    # A weight's are one number a tile, which threads read themselves.
    is_by_tile = len(rhs_scale) < num_columns
    scales = plgpu.SMEM((STAGES, TILE), jnp.float32)
    out_lanes = 128 // jnp.dtype(out_dtype).itemsize
    out_tiled = plgpu.TilingTransform((8, out_lanes)), plgpu.SwizzleTransform(128)

    # Its name is the kernel's, in programs and traces.
    def block_scaled_matmul(*refs, **scratch):
        run(_Program(*refs, **scratch))

    kernel = plgpu.kernel(
        block_scaled_matmul,
        out_type=jax.ShapeDtypeStruct((num_rows, num_columns), out_dtype),
        scratch_types=dict(
            lhs_tiles=tiles_of(lhs_MK, WARPGROUPS, 64),
            rhs_tiles=tiles_of(rhs_NK, TILE),
            lhs_scales=scales,
            **({} if is_by_tile else dict(rhs_scales=scales)),
            out_tile=plgpu.SMEM((WARPGROUPS, 64, TILE), out_dtype, transforms=out_tiled),
            loaded=plgpu.Barrier(num_arrivals=4 - is_by_tile, num_barriers=STAGES),
            used=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
        ),
        grid=(num_rows // TILE * (num_columns // TILE),),
        grid_names=("tile",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
    )
    lhs_by_block = lhs_MK.reshape(num_rows // 64, 64, size)
    lhs_scale = _by_line(lhs_scale, num_lines=num_rows)
    y_MN = kernel(lhs_by_block, rhs_NK, lhs_scale.T, rhs_scale.T)
    return varying.as_operands(y_MN, lhs_MK, rhs_NK)


def _check(lhs_MK, rhs_NK, **scales) -> None:
    for name, operand in dict(lhs=lhs_MK, rhs=rhs_NK).items():
        if reason := _objection(operand):
            raise ValueError(f"{name}: {reason}")
    if lhs_MK.shape[1] != rhs_NK.shape[1]:
        raise ValueError(
            f"lhs has {lhs_MK.shape[1]} columns and rhs {rhs_NK.shape[1]}; they must be as many"
        )
    for (name, scale), operand in zip(scales.items(), (lhs_MK, rhs_NK), strict=True):
        num_lines, size = operand.shape
        by_line, by_tile = ((lines, size // BLOCK) for lines in (num_lines, num_lines // TILE))
        if scale.shape not in (by_line, by_tile):
            raise ValueError(
                f"{name}_scale has the shape {scale.shape}; it must be {by_line} or {by_tile}"
            )


def _by_line(scale, *, num_lines: int):
    """One for each line of an operand."""
    return scale if len(scale) == num_lines else jnp.repeat(scale, num_lines // len(scale), axis=0)


def _wide(values, scale):
    """bfloat16, which holds a value times a power of two without rounding."""
    scale = jnp.repeat(_by_line(scale, num_lines=len(values)), BLOCK, axis=1)
    return values.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class _Program:
    """The references of the kernel's operands, its shared memory and its barriers.

    lhs: [M / 64, 64, K]. Scales: [K / 128, M] and [K / 128, R]; without rhs_scales R is N / 128.
    """

    lhs: Any
    rhs: Any
    lhs_scale: Any
    rhs_scale: Any
    out: Any
    _: dataclasses.KW_ONLY
    lhs_tiles: Any
    rhs_tiles: Any
    lhs_scales: Any
    rhs_scales: Any = None
    out_tile: Any
    loaded: Any
    used: Any

    @property
    def num_blocks(self) -> int:
        return self.rhs.shape[1] // BLOCK

    def place(self):
        """(row, column) of the tile, so ordered that those made at once share operands."""
        tiles = self.out.shape[0] // TILE, self.out.shape[1] // TILE
        return plgpu.planar_snake(lax.axis_index("tile"), tiles, 1, TOGETHER)

    def copy(self):
        """Loads the tiles and their scales, `STAGES` ahead at most."""
        plgpu.set_max_registers(REGISTERS_TO_COPY, action="decrease")
        row, column = self.place()
        groups = pl.ds(row * WARPGROUPS, WARPGROUPS)
        rows, columns = pl.ds(row * TILE, TILE), pl.ds(column * TILE, TILE)

        @pl.loop(0, self.num_blocks)
        def load_block(i):
            slot = lax.rem(i, STAGES)
            summed, loaded = pl.ds(i * BLOCK, BLOCK), self.loaded.at[slot]
            wait_if(i >= STAGES, self.used.at[slot])
            copies = [
                (self.lhs.at[groups, :, summed], self.lhs_tiles),
                (self.rhs.at[columns, summed], self.rhs_tiles),
                (self.lhs_scale.at[i, rows], self.lhs_scales),
            ]
            if self.rhs_scales is not None:
                copies.append((self.rhs_scale.at[i, columns], self.rhs_scales))
            for source, target in copies:
                plgpu.copy_gmem_to_smem(source, target.at[slot], loaded)

        # Nothing of a barrier may be left to wait for: the interpreter says so.
        @pl.loop(max(0, self.num_blocks - STAGES), self.num_blocks)
        def wait_for_block(i):
            plgpu.barrier_wait(self.used.at[lax.rem(i, STAGES)])

    def compute(self):
        plgpu.set_max_registers(REGISTERS, action="increase")
        row, column = self.place()
        warpgroup = lax.axis_index("warpgroup")
        nothing = zeros(TILE, jnp.float32)
        sums = lax.fori_loop(0, self.num_blocks, self.with_block, nothing)
        tile = self.out_tile.at[warpgroup]
        tile[...] = sums.astype(self.out.dtype)
        plgpu.commit_smem()
        rows = pl.ds(row * TILE + warpgroup * 64, 64)
        plgpu.copy_smem_to_gmem(tile, self.out.at[rows, pl.ds(column * TILE, TILE)])
        plgpu.wait_smem_to_gmem(0)

    def with_block(self, i, sums):
        """The sums, and those over 128 more, scaled."""
        slot = lax.rem(i, STAGES)
        plgpu.barrier_wait(self.loaded.at[slot])
        scaled = functools.partial(self.scaled_product, i, slot=slot)
        part = pl.run_scoped(scaled, plgpu.ACC((64, TILE), jnp.float32))
        plgpu.barrier_arrive(self.used.at[slot])
        return sums + part

    def scaled_product(self, i, ref, *, slot):
        warpgroup, (_, column) = lax.axis_index("warpgroup"), self.place()
        of_tile = self.rhs_scale[i, column] if self.rhs_scales is None else None
        rhs = self.rhs_tiles.at[slot].transpose((1, 0))
        plgpu.wgmma(ref, self.lhs_tiles.at[slot, warpgroup], rhs)
        # Beside the product, and so is the fence between reading the scales and their next copy.
        rows = pl.ds(warpgroup * 64, 64)
        of_rows = load(self.lhs_scales.at[slot, rows], layout=PER_ROW, optimized=False)
        if of_tile is None:
            of_columns = load(self.rhs_scales.at[slot], layout=PER_COLUMN, optimized=False)
        else:
            of_rows *= of_tile
        plgpu.commit_smem()
        part = ref[...]
        if of_tile is None:
            part *= by_column(of_columns, part)
        return part * by_row(of_rows, part)
