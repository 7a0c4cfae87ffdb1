"""Flash attention for Hopper, forward (Pallas Mosaic GPU; arXiv:2407.08608).

A program has 128 queries of one head. Two warpgroups compute, 64 queries each, a third copies tiles
of keys and values ahead of them, of two heads together where they share a key head
(`hopper.heads_together`). The products of tile i with the queries and of tile i - 1 with V
are issued together, so the softmax of tile i runs beside the second of them. The warpgroups are not
made to take turns: that was 5 to 16% slower (docs/kernels_record.md). Up to head size 128, where
two tiles of queries fit, programs go on from tile to tile (`flash_forward_dealt.py`), and without a
cap most tiles need no maxima. At head size 64 four warpgroups compute 256 queries.

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

from jaxscale.kernels.flash_spans import Spans, Visits, Work, tiles_seen
from jaxscale.kernels.hopper import (
    PAIR,
    WARPGROUPS,
    barrier_of_cluster,
    by_row,
    heads_together,
    load,
    run,
    wait_if,
    zeros,
)

# Of 65,536 a multiprocessor has; 128 threads a warpgroup.
REGISTERS, REGISTERS_TO_COPY = 240, 24


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Who computes, with how many registers a thread, and the tiles of keys in shared memory.

    keeps_reference: p of most tiles are made without maxima (`one_pass`).
    """

    warpgroups: int = WARPGROUPS
    registers: int = REGISTERS
    num_keys: int = 128
    stages: int = 2  # with 3, head size 128 would need 256 of 227 KiB
    keeps_reference: bool = False

    @property
    def num_queries(self) -> int:
        return 64 * self.warpgroups


# Head size 64, whose products are half of 128's beside the same exp: 8% faster than `Tiles()`
# (0.383 and 0.415 ms on an H200), and 3% more with eight stages instead of six and sums by lane
# (docs/kernels_record.md).
OF_HEAD_SIZE_64 = Tiles(warpgroups=4, registers=112, num_keys=64, stages=8, keeps_reference=True)

LOG2_E = math.log2(math.e)
# A score that is not seen, and what the largest score of a query begins with: finite, as a query
# may see no key of a tile, and apart, so that p of what is not seen is 0 then too. (Were both the
# same, p would be 2 to the rounding error of a product of 1e30: infinite for some scales.)
HIDDEN, LOWEST = -1e30, -1e20
PER_QUERY = plgpu.Layout.WGMMA.reduce(1)
LANES = 8  # columns of scores of which a thread has two


def tiles_of(head_size: int, *, seq: int, cap: float | None) -> Tiles:
    """The form of head size 64 takes whole tiles of 256 queries, and no cap: none was timed."""
    keeps_reference = head_size <= 128 and cap is None
    if head_size == 64 and keeps_reference and seq % OF_HEAD_SIZE_64.num_queries == 0:
        return OF_HEAD_SIZE_64
    # Sums of 64 queries times 256 take 128 registers: beside them 128 scores a query do not fit,
    # nor 128 keys and values in shared memory.
    num_keys = 128 if head_size <= 192 else 64
    return Tiles(num_keys=num_keys, keeps_reference=keeps_reference)


def forward(q_BSNH, k_BTKH, v_BTKV, *, spans: Spans, scale: float, cap: float | None = None):
    """(output [B, S, N, V], log-sum-exp float32 [B, N, S]): 0 and -inf where a query sees nothing.

    bfloat16; S a multiple of 128, and T; H and V a pair of `flash_attention.HEAD_SIZES`. cap:
    scores become cap * tanh(score / cap).
    """
    rows, seq, num_heads, head_size = q_BSNH.shape
    num_keys, v_head_size = k_BTKH.shape[1], v_BTKV.shape[-1]
    tiles = tiles_of(head_size, seq=seq, cap=cap)
    tile_k, stages = tiles.num_keys, tiles.stages
    visits = visits_of(spans, num_keys=num_keys, tiles=tiles)
    together = heads_together(num_heads, k_BTKH.shape[2], head_size=head_size)
    operand = functools.partial(swizzled, dtype=q_BSNH.dtype)
    q_tile = operand(tiles.warpgroups, 64, head_size)
    if v_head_size != head_size:
        q_tile = plgpu.RefUnion(q_tile, operand(tiles.warpgroups, 64, v_head_size))
    loaded = plgpu.Barrier(num_barriers=stages)
    of_cluster = functools.partial(barrier_of_cluster, together, num_arrivals=tiles.warpgroups)

    # Its name is the kernel's, in programs and traces.
    def flash_attention_forward(*refs, **scratch):
        group = num_heads // k_BTKH.shape[2]
        program = Program(*refs, **scratch, group=group, scale=scale, cap=cap, tiles=tiles)
        run(program, tiles.warpgroups)

    kernel = plgpu.kernel(
        flash_attention_forward,
        out_type=[
            jax.ShapeDtypeStruct((rows, seq, num_heads, v_head_size), q_BSNH.dtype),
            jax.ShapeDtypeStruct((rows, num_heads, seq), jnp.float32),
        ],
        scratch_types=dict(
            q_tile=q_tile,
            k_tiles=operand(stages, tile_k, head_size),
            v_tiles=operand(stages, tile_k, v_head_size),
            lse_tile=plgpu.SMEM((tiles.warpgroups, 64), jnp.float32),
            q_loaded=plgpu.Barrier(num_barriers=tiles.warpgroups),
            q_used=plgpu.Barrier(num_arrivals=tiles.warpgroups),
            k_loaded=loaded,
            v_loaded=loaded,
            k_used=of_cluster(num_barriers=stages),
            v_used=of_cluster(num_barriers=stages),
            done=of_cluster(),
        ),
        grid=(num_heads // together, seq // tiles.num_queries, rows),
        grid_names=("head", "tile", "row"),
        cluster=(together,),
        cluster_names=(PAIR,),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    # Without the barrier XLA runs the kernel twice in a scan: once more in a fusion of its own that
    # writes what is kept for the backward pass into the stack.
    return lax.optimization_barrier(kernel(q_BSNH, k_BTKH, v_BTKV, *spans, visits.stacked()))


def visits_of(spans: Spans, *, num_keys: int, tiles: Tiles) -> Visits:
    """One tile at least for each tile of queries, so that there always is a first one."""
    tile_q, tile_k = tiles.num_queries, tiles.num_keys
    visits = tiles_seen(spans, size=tile_q, num_seen=num_keys, seen_size=tile_k)
    return visits.one_at_least(num_keys // tile_k)


def swizzled(*shape, dtype):
    """Shared memory for tiles of operands."""
    tiled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=tiled)


@dataclasses.dataclass(frozen=True)
class Program:
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
    done: Any
    group: int
    scale: float
    cap: float | None
    tiles: Tiles

    def place(self):
        """(row, head, tile of queries); the last tiles see most keys, and begin first."""
        tiles = self.q.shape[1] // self.tiles.num_queries
        head = lax.axis_index("head") * lax.axis_size(PAIR) + lax.axis_index(PAIR)
        return lax.axis_index("row"), head, tiles - 1 - lax.axis_index("tile")

    def q_and_out_tiles(self):
        """This warpgroup's; the output takes the place of the queries."""
        tiles = (self.q_tile, self.q_tile) if self.v.shape == self.k.shape else self.q_tile
        return tuple(tile.at[lax.axis_index("warpgroup")] for tile in tiles)

    def work(self) -> Work:
        row, _, tile = self.place()
        return Work(*(self.visits[row, tile, i] for i in range(4)))

    def copy(self):
        plgpu.set_max_registers(REGISTERS_TO_COPY, action="decrease")
        self.load_tiles(0)
        plgpu.barrier_wait(self.done)

    def load_tiles(self, num_before):
        """Tiles of keys and values, `stages` ahead at most; returns how many there are then.

        num_before: that were loaded before, for a tile of queries that is done with.
        """
        work, (row, head, _) = self.work(), self.place()
        key_head, (stages, num_keys, _) = lax.div(head, self.group), self.k_tiles.shape

        def load_tile(i, tile):
            slot = lax.rem(i, stages)
            keys = (row, pl.ds(work.tile(tile) * num_keys, num_keys), key_head)
            is_reused = i >= stages
            wait_if(is_reused, self.k_used.at[slot])
            self.fetch(self.k.at[keys], self.k_tiles.at[slot], loaded=self.k_loaded.at[slot])
            wait_if(is_reused, self.v_used.at[slot])
            self.fetch(self.v.at[keys], self.v_tiles.at[slot], loaded=self.v_loaded.at[slot])

        pl.loop(0, work.num)(lambda i: load_tile(num_before + i, i))
        return num_before + work.num

    def fetch(self, source, target, *, loaded):
        """A tile of keys or values for all programs of the cluster, of which each loads a part."""
        plgpu.copy_gmem_to_smem(source, target, loaded, collective_axes=(PAIR,))

    def compute(self):
        plgpu.set_max_registers(self.tiles.registers, action="increase")
        row, head, tile = self.place()
        warpgroup = lax.axis_index("warpgroup")
        queries = self.queries_of(tile, warpgroup)
        (q_tile, out_tile), q_loaded = self.q_and_out_tiles(), self.q_loaded.at[warpgroup]
        plgpu.copy_gmem_to_smem(self.q.at[row, queries, head], q_tile, q_loaded)
        of_queries = self.spans_of(row, queries)
        plgpu.barrier_wait(q_loaded)
        outputs = plgpu.ACC((64, self.v.shape[-1]), jnp.float32)
        made = pl.run_scoped(functools.partial(self.one_pass, **of_queries), outputs)
        plgpu.barrier_arrive(self.done)
        out, lse = self.finished(made, **of_queries)
        if self.v.shape != self.k.shape:
            # The other warpgroup's queries may lie where this one's output comes.
            plgpu.barrier_arrive(self.q_used)
            plgpu.barrier_wait(self.q_used)
        self.store(out, lse, out_tile=out_tile, place=(row, head, queries))
        plgpu.wait_smem_to_gmem(0)
        # Until then the others of the cluster arrive at barriers that are here.
        plgpu.barrier_wait(self.done)

    def queries_of(self, tile, warpgroup):
        """A warpgroup's of a tile."""
        return pl.ds(tile * self.tiles.num_queries + warpgroup * 64, 64)

    def spans_of(self, row, queries) -> dict[str, Any]:
        first, last = (
            load(ref.at[row, queries], layout=PER_QUERY, optimized=False)
            for ref in (self.first, self.last)
        )
        return dict(first=first, last=last)

    def finished(self, made, *, first, last):
        """(output, log-sum-exp) of what `one_pass` returns."""
        out, largest, total = made
        sees = last > first
        total = jnp.where(sees, total, 1.0)
        out *= by_row(jnp.where(sees, 1.0 / total, 0.0), out)
        return out, jnp.where(sees, largest / LOG2_E + jnp.log(total), -jnp.inf)

    def store(self, out, lse, *, out_tile, place):
        row, head, queries = place
        lse_tile = self.lse_tile.at[lax.axis_index("warpgroup")]
        out_tile[...], lse_tile[...] = out.astype(self.out.dtype), lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile, self.out.at[row, queries, head])
        plgpu.copy_smem_to_gmem(lse_tile, self.lse.at[row, head, queries])

    def one_pass(self, out, *, first, last, judge=None, num_before=0):
        """(the sum of p V, the largest score in powers of 2, the sum of p) of 64 queries.

        judge: if given, p are made with the largest score of the first tile, as floats allow while
        none is 60 powers of 2 above it: no maxima, and sums need not shrink. A tile with a mask has
        them still if it is the last, or if the first has one. judge is told the sums of p.
        num_before: how many tiles were loaded before those of this pass.
        """
        work, num_keys, stages = self.work(), self.k_tiles.shape[1], self.tiles.stages
        softmax = functools.partial(self.softmax, first=first, last=last)
        scores = plgpu.ACC((64, num_keys), jnp.float32)
        largest = plgpu.layout_cast(jnp.full((64,), LOWEST, jnp.float32), PER_QUERY)
        total = plgpu.layout_cast(jnp.zeros((64,), jnp.float32), PER_QUERY)

        def slot_of(i):
            return lax.rem(num_before + i, stages)

        def first_scores(ref):
            self.issue_scores(ref, first_slot)
            return ref[...]

        first_slot = slot_of(0)
        plgpu.barrier_wait(self.k_loaded.at[first_slot])
        s = pl.run_scoped(first_scores, scores)
        plgpu.barrier_arrive(self.k_used.at[first_slot])
        p, largest, total, _ = softmax(s, (largest, total), keys=work.tile(0) * num_keys)
        plgpu.barrier_wait(self.v_loaded.at[first_slot])

        def step(i, carry, *, is_whole):
            p, *statistics = carry
            slot, slot_before = (slot_of(n) for n in (i, i - 1))
            plgpu.barrier_wait(self.k_loaded.at[slot])

            def beside_product(ref):
                s = self.scores_beside_product(ref, out=out, p=p, slots=(slot, slot_before))
                return softmax(s, statistics, keys=None if is_whole else work.tile(i) * num_keys)

            p, largest, total, shrink = pl.run_scoped(beside_product, scores)
            # A branch: without one here ptxas waits for the product before most of the softmax.
            plgpu.barrier_wait(self.v_loaded.at[slot])
            sums = out[...]
            plgpu.barrier_arrive(self.v_used.at[slot_before])
            out[...] = sums * by_row(shrink, sums)
            return p.astype(self.v.dtype), largest, total

        def step_by_reference(i, carry, *, is_whole):
            p, of_lanes = carry
            slot, slot_before = (slot_of(n) for n in (i, i - 1))
            plgpu.barrier_wait(self.k_loaded.at[slot])

            def beside_product(ref):
                s = self.scores_beside_product(ref, out=out, p=p, slots=(slot, slot_before))
                powers = s * (self.scale * LOG2_E) - by_row(largest, s)
                if not is_whole:
                    keys = work.tile(i) * num_keys
                    powers = masked(powers, first=first - keys, last=last - keys)
                p_now = jnp.exp2(powers)
                total_now = of_lanes + _sum_by_lane(p_now)
                # With a mask ptxas runs products one by one if they are rounded here.
                return p_now.astype(self.v.dtype) if is_whole else p_now, total_now

            p, of_lanes = pl.run_scoped(beside_product, scores)
            plgpu.barrier_wait(self.v_loaded.at[slot])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.v_used.at[slot_before])
            return p.astype(self.v.dtype), of_lanes

        def loop(body, carry, *, begin, end, is_whole):
            return lax.fori_loop(begin, end, functools.partial(body, is_whole=is_whole), carry)

        p, begin = p.astype(self.v.dtype), jnp.maximum(work.num_whole, 1)
        if judge is None:
            carry = p, largest, total
            p, largest, total = loop(step, carry, begin=1, end=begin, is_whole=True)
        else:
            of_lanes = zeros(LANES, jnp.float32)
            by_reference = functools.partial(loop, step_by_reference)
            p, of_lanes = by_reference((p, of_lanes), begin=1, end=begin, is_whole=True)
            # With a mask too where all queries have seen the first tile, but for the last step: the
            # next tile's keys are not loaded before this one is judged.
            end = jnp.maximum(begin, jnp.where(work.num_whole > 0, work.num - 1, 0))
            p, of_lanes = by_reference((p, of_lanes), begin=begin, end=end, is_whole=False)
            total, begin = total + of_lanes.sum(axis=1), end
            # Now: what overflowed could be hidden when sums shrink by what the last tiles hold.
            judge(total)
        carry = p, largest, total
        p, largest, total = loop(step, carry, begin=begin, end=work.num, is_whole=False)
        plgpu.wgmma(out, p, self.v_tiles.at[slot_of(work.num - 1)])
        return out[...], largest, total

    def issue_scores(self, ref, slot):
        q_tile, _ = self.q_and_out_tiles()
        plgpu.wgmma(ref, q_tile, self.k_tiles.at[slot].transpose((1, 0)))

    def scores_beside_product(self, ref, *, out, p, slots):
        """Scores of a tile, while p of the one before is multiplied with V."""
        slot, slot_before = slots
        self.issue_scores(ref, slot)
        plgpu.wgmma(out, p, self.v_tiles.at[slot_before])
        s = plgpu.wgmma_accumulator_load(ref, wait_n=1)
        plgpu.barrier_arrive(self.k_used.at[slot])
        return s

    def softmax(self, s, statistics, *, first, last, keys):
        """(p, largest, total, what sums so far are to be multiplied by).

        keys: the number of the tile's first, or None where all queries see all of them.
        """
        largest_before, total = statistics
        factor = self.scale
        if self.cap is not None:
            s, factor = jnp.tanh(s * (self.scale / self.cap)), self.cap
        if keys is not None:
            s = masked(s, first=first - keys, last=last - keys)
        largest = jnp.maximum(largest_before, s.max(axis=1) * (factor * LOG2_E))
        shrink = jnp.exp2(largest_before - largest)
        p = jnp.exp2(s * (factor * LOG2_E) - by_row(largest, s))
        return p, largest, total * shrink + p.sum(axis=1), shrink


def masked(values, *, first, last, hidden=HIDDEN):
    """Values [queries, keys] of a tile, `hidden` but those of its keys from first to last; or of
    keys and queries.

    Of every eight keys a thread has two side by side. All that it has of a query are bits of one
    number, so that a value takes a bit test instead of two comparisons: 185 instructions a step of
    64 queries times 128 keys instead of 297.
    """
    key = plgpu.broadcasted_iota(jnp.int32, values.shape, 1, layout=plgpu.Layout.WGMMA)

    def bits_below(limit):
        limit = jnp.clip(by_row(limit, key) - (key & 6), 0, values.shape[1])
        num = 2 * (limit >> 3) + jnp.minimum(limit & 7, 2)
        return ((1 << (num & 31)) - 1) | -(num >> 5)  # of 32 bits all

    seen, bit = bits_below(last) & ~bits_below(first), 2 * (key >> 3) + (key & 1)
    return jnp.where(((seen >> bit) & 1) == 1, values, hidden)


def _sum_by_lane(p):
    """[64, LANES]: as far as it goes without other threads."""
    parts = [p[:, i : i + LANES] for i in range(0, p.shape[1], LANES)]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
