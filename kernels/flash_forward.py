"""Flash attention for Hopper, forward (Pallas Mosaic GPU; arXiv:2407.08608).

A program has 128 queries of one head. Two warpgroups compute, 64 queries each, a third copies tiles
of keys and values ahead of them. The products of tile i with the queries and of tile i - 1 with V
are issued together, so the softmax of tile i runs beside the second of them. The warpgroups are not
made to take turns: that was 9 to 15% slower (docs/kernels.md).

B rows, S queries, T keys, N query heads, K key heads, H head size, V head size of the values.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxscale.kernels.flash_spans import Spans, Work, tiles_of_keys
from jaxscale.kernels.hopper import WARPGROUPS, by_row, load, run

TILE_Q = 64 * WARPGROUPS
STAGES = 2  # tiles of keys in shared memory: with 3, head size 128 needs 120 bytes too many
# Of 65,536 a multiprocessor has; 128 threads a warpgroup.
REGISTERS, REGISTERS_TO_COPY = 240, 24

LOG2_E = math.log2(math.e)
# A score that is not seen, and what the largest score of a query begins with: finite, as a query
# may see no key of a tile, and apart, so that p of what is not seen is 0 then too. (Were both the
# same, p would be 2 to the rounding error of a product of 1e30: infinite for some scales.)
HIDDEN, LOWEST = -1e30, -1e20
PER_QUERY = plgpu.Layout.WGMMA.reduce(1)


def _keys_of_a_tile(head_size: int) -> int:
    """Sums of 64 queries times 256 take 128 registers: beside them 128 scores a query do not fit,
    nor 128 keys and values in shared memory."""
    return 128 if head_size <= 192 else 64


def forward(q_BSNH, k_BTKH, v_BTKV, *, spans: Spans, scale: float, cap: float | None = None):
    """(output [B, S, N, V], log-sum-exp float32 [B, N, S]): 0 and -inf where a query sees nothing.

    bfloat16; S a multiple of 128, and T; H and V a pair of `flash_attention.HEAD_SIZES`. cap:
    scores become cap * tanh(score / cap).
    """
    rows, seq, num_heads, head_size = q_BSNH.shape
    num_keys, v_head_size = k_BTKH.shape[1], v_BTKV.shape[-1]
    tile_k = _keys_of_a_tile(head_size)
    visits = tiles_of_keys(spans, num_keys=num_keys, tile_q=TILE_Q, tile_k=tile_k)
    # One tile at least, so that there always is a first one.
    begin = jnp.minimum(visits.begin, num_keys // tile_k - 1)
    visits = visits._replace(begin=begin, end=jnp.maximum(visits.end, begin + 1))

    def operand(*shape):
        tiled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM(shape, q_BSNH.dtype, transforms=tiled)

    q_tile = operand(WARPGROUPS, 64, head_size)
    if v_head_size != head_size:
        q_tile = plgpu.RefUnion(q_tile, operand(WARPGROUPS, 64, v_head_size))
    loaded = plgpu.Barrier(num_barriers=STAGES)
    used = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES)

    # Its name is the kernel's, in programs and traces.
    def flash_attention_forward(*refs, **scratch):
        group = num_heads // k_BTKH.shape[2]
        run(_Program(*refs, **scratch, group=group, scale=scale, cap=cap))

    kernel = plgpu.kernel(
        flash_attention_forward,
        out_type=[
            jax.ShapeDtypeStruct((rows, seq, num_heads, v_head_size), q_BSNH.dtype),
            jax.ShapeDtypeStruct((rows, num_heads, seq), jnp.float32),
        ],
        scratch_types=dict(
            q_tile=q_tile,
            k_tiles=operand(STAGES, tile_k, head_size),
            v_tiles=operand(STAGES, tile_k, v_head_size),
            lse_tile=plgpu.SMEM((WARPGROUPS, 64), jnp.float32),
            q_loaded=plgpu.Barrier(num_barriers=WARPGROUPS),
            q_used=plgpu.Barrier(num_arrivals=WARPGROUPS),
            k_loaded=loaded,
            v_loaded=loaded,
            k_used=used,
            v_used=used,
        ),
        grid=(num_heads, seq // TILE_Q, rows),
        grid_names=("head", "tile", "row"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    # Without the barrier XLA runs the kernel twice in a scan: once more in a fusion of its own that
    # writes what is kept for the backward pass into the stack.
    return lax.optimization_barrier(kernel(q_BSNH, k_BTKH, v_BTKV, *spans, visits.stacked()))


@dataclasses.dataclass(frozen=True)
class _Program:
    """The references of a kernel's operands, its shared memory and its barriers."""

    q: Any
    k: Any
    v: Any
    first: Any
    last: Any
    visits: Any
    out: Any
    lse: Any
    _: dataclasses.KW_ONLY
    q_tile: Any
    k_tiles: Any
    v_tiles: Any
    lse_tile: Any
    q_loaded: Any
    q_used: Any
    k_loaded: Any
    v_loaded: Any
    k_used: Any
    v_used: Any
    group: int
    scale: float
    cap: float | None

    def place(self):
        """(row, head, tile of queries); the last tiles see most keys, and begin first."""
        tiles = self.q.shape[1] // TILE_Q
        return lax.axis_index("row"), lax.axis_index("head"), tiles - 1 - lax.axis_index("tile")

    def q_and_out_tiles(self):
        """This warpgroup's; the output takes the place of the queries."""
        tiles = (self.q_tile, self.q_tile) if self.v.shape == self.k.shape else self.q_tile
        return tuple(tile.at[lax.axis_index("warpgroup")] for tile in tiles)

    def work(self) -> Work:
        row, _, tile = self.place()
        return Work(*(self.visits[row, tile, i] for i in range(4)))

    def copy(self):
        """Loads the tiles of keys and values, `STAGES` ahead at most."""
        plgpu.set_max_registers(REGISTERS_TO_COPY, action="decrease")
        work, (row, head, _) = self.work(), self.place()
        key_head, num_keys = lax.div(head, self.group), self.k_tiles.shape[1]

        @pl.loop(0, work.num)
        def load_tile(i):
            slot = lax.rem(i, STAGES)
            keys = (row, pl.ds(work.tile(i) * num_keys, num_keys), key_head)
            is_reused = i >= STAGES
            pl.when(is_reused)(lambda: plgpu.barrier_wait(self.k_used.at[slot]))
            plgpu.copy_gmem_to_smem(self.k.at[keys], self.k_tiles.at[slot], self.k_loaded.at[slot])
            pl.when(is_reused)(lambda: plgpu.barrier_wait(self.v_used.at[slot]))
            plgpu.copy_gmem_to_smem(self.v.at[keys], self.v_tiles.at[slot], self.v_loaded.at[slot])

    def compute(self):
        plgpu.set_max_registers(REGISTERS, action="increase")
        row, head, tile = self.place()
        warpgroup = lax.axis_index("warpgroup")
        queries = pl.ds(tile * TILE_Q + warpgroup * 64, 64)
        (q_tile, out_tile), q_loaded = self.q_and_out_tiles(), self.q_loaded.at[warpgroup]
        plgpu.copy_gmem_to_smem(self.q.at[row, queries, head], q_tile, q_loaded)
        first, last = (
            load(ref.at[row, queries], layout=PER_QUERY, optimized=False)
            for ref in (self.first, self.last)
        )
        plgpu.barrier_wait(q_loaded)
        outputs = plgpu.ACC((64, self.v.shape[-1]), jnp.float32)
        out, largest, total = pl.run_scoped(
            functools.partial(self.all_tiles, first=first, last=last), outputs
        )
        sees = last > first
        total = jnp.where(sees, total, 1.0)
        out *= by_row(jnp.where(sees, 1.0 / total, 0.0), out)
        if self.v.shape != self.k.shape:
            # The other warpgroup's queries may lie where this one's output comes.
            plgpu.barrier_arrive(self.q_used)
            plgpu.barrier_wait(self.q_used)
        out_tile[...] = out.astype(self.out.dtype)
        lse_tile = self.lse_tile.at[warpgroup]
        lse_tile[...] = jnp.where(sees, largest / LOG2_E + jnp.log(total), -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile, self.out.at[row, queries, head])
        plgpu.copy_smem_to_gmem(lse_tile, self.lse.at[row, head, queries])
        plgpu.wait_smem_to_gmem(0)

    def all_tiles(self, out, *, first, last):
        """(the sum of p V, the largest score in powers of 2, the sum of p) of 64 queries."""
        work = self.work()
        softmax = functools.partial(self.softmax, first=first, last=last)
        num_keys = self.k_tiles.shape[1]
        scores = plgpu.ACC((64, num_keys), jnp.float32)
        largest = plgpu.layout_cast(jnp.full((64,), LOWEST, jnp.float32), PER_QUERY)
        total = plgpu.layout_cast(jnp.zeros((64,), jnp.float32), PER_QUERY)

        def first_scores(ref):
            self.issue_scores(ref, 0)
            return ref[...]

        plgpu.barrier_wait(self.k_loaded.at[0])
        s = pl.run_scoped(first_scores, scores)
        plgpu.barrier_arrive(self.k_used.at[0])
        p, largest, total, _ = softmax(s, (largest, total), keys=work.tile(0) * num_keys)
        plgpu.barrier_wait(self.v_loaded.at[0])

        def step(i, carry, *, is_whole):
            p, *statistics = carry
            slot, slot_before = (lax.rem(n, STAGES) for n in (i, i - 1))
            plgpu.barrier_wait(self.k_loaded.at[slot])

            def beside_product(ref):
                self.issue_scores(ref, slot)
                plgpu.wgmma(out, p, self.v_tiles.at[slot_before])
                s = plgpu.wgmma_accumulator_load(ref, wait_n=1)
                plgpu.barrier_arrive(self.k_used.at[slot])
                return softmax(s, statistics, keys=None if is_whole else work.tile(i) * num_keys)

            p, largest, total, shrink = pl.run_scoped(beside_product, scores)
            # A branch: without one here ptxas waits for the product before most of the softmax.
            plgpu.barrier_wait(self.v_loaded.at[slot])
            sums = out[...]
            plgpu.barrier_arrive(self.v_used.at[slot_before])
            out[...] = sums * by_row(shrink, sums)
            return p.astype(self.v.dtype), largest, total

        carry = p.astype(self.v.dtype), largest, total
        end_of_whole = jnp.maximum(work.num_whole, 1)
        carry = lax.fori_loop(1, end_of_whole, functools.partial(step, is_whole=True), carry)
        step = functools.partial(step, is_whole=False)
        p, largest, total = lax.fori_loop(end_of_whole, work.num, step, carry)
        plgpu.wgmma(out, p, self.v_tiles.at[lax.rem(work.num - 1, STAGES)])
        return out[...], largest, total

    def issue_scores(self, ref, slot):
        q_tile, _ = self.q_and_out_tiles()
        plgpu.wgmma(ref, q_tile, self.k_tiles.at[slot].transpose((1, 0)))

    def softmax(self, s, statistics, *, first, last, keys):
        """(p, largest, total, what sums so far are to be multiplied by).

        keys: the number of the tile's first, or None where all queries see all of them.
        """
        largest_before, total = statistics
        factor = self.scale
        if self.cap is not None:
            s, factor = jnp.tanh(s * (self.scale / self.cap)), self.cap
        if keys is not None:
            key = keys + plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
            is_seen = (key >= by_row(first, s)) & (key < by_row(last, s))
            s = jnp.where(is_seen, s, HIDDEN)
        largest = jnp.maximum(largest_before, s.max(axis=1) * (factor * LOG2_E))
        shrink = jnp.exp2(largest_before - largest)
        p = jnp.exp2(s * (factor * LOG2_E) - by_row(largest, s))
        return p, largest, total * shrink + p.sum(axis=1), shrink
