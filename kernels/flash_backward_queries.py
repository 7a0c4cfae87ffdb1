"""Flash attention's dq for Hopper by itself, in one order: a program for each tile of queries.

It has 128 queries of one head, 64 for each of two warpgroups that compute, and goes over the tiles
of keys that they see, loaded for two heads together where they share a key head. Three products:
scores, dp, and the one that adds to dq, issued in the next step (`LateSum`). Where a third tile of
keys has room, scores and dp are issued at once: exp runs beside dp, and ds beside what adds to dq.
What belongs to queries is the same in all steps, and stays in registers.

B rows, S queries, T keys, N query heads, K key heads, H head size, V head size of the values.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxscale.kernels.flash_forward import REGISTERS, REGISTERS_TO_COPY, masked, swizzled
from jaxscale.kernels.flash_scores import (
    LateSum,
    Operands,
    Scores,
    stages_of_late_sum,
)
from jaxscale.kernels.flash_spans import Pairs, Work, tiles_seen
from jaxscale.kernels.hopper import (
    PAIR,
    WARPGROUPS,
    arrive_if,
    barrier_of_cluster,
    by_row,
    heads_together,
    load,
    run,
    wait_if,
    zeros,
)

TILE_Q = 64 * WARPGROUPS
PER_ROW = plgpu.Layout.WGMMA.reduce(1)


def of_queries(operands, begins, *, pairs: Pairs, scores: Scores):
    """dq [B, S, N, H], in q's dtype. operands, begins: as of `flash_backward_keys.of_keys`."""
    q_BSNH, k_BTKH, v_BTKV, _ = operands
    rows, seq, num_heads, head_size = q_BSNH.shape
    v_head_size = v_BTKV.shape[-1]
    spans = pairs.keys_of_queries
    # As many products a step at head size 64 too: both passes take 2.5% less on an H200.
    tile_k = 128 if head_size == 64 else 64
    visits = tiles_seen(spans, size=TILE_Q, num_seen=k_BTKH.shape[1], seen_size=tile_k)

    # Of head size 256, 128 queries, their gradients and two tiles of keys are 192 of 227 KiB.
    stages = stages_of_late_sum(head_size)
    num_values = 1 if head_size > 192 else stages
    together = heads_together(num_heads, k_BTKH.shape[2], head_size=head_size)
    of_cluster = functools.partial(barrier_of_cluster, together, num_arrivals=WARPGROUPS)

    operand = functools.partial(swizzled, dtype=q_BSNH.dtype)

    def flash_attention_backward_of_queries(*refs, **scratch):
        group = num_heads // k_BTKH.shape[2]
        run(_OfQueries(*refs, **scratch, group=group, scores=scores))

    kernel = plgpu.kernel(
        flash_attention_backward_of_queries,
        out_type=[jax.ShapeDtypeStruct(q_BSNH.shape, q_BSNH.dtype)],
        scratch_types=dict(
            q_tile=operand(WARPGROUPS, 64, head_size),
            grad_tile=operand(WARPGROUPS, 64, v_head_size),
            k_tiles=operand(stages, tile_k, head_size),
            v_tiles=operand(num_values, tile_k, v_head_size),
            queries_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
            k_loaded=plgpu.Barrier(num_barriers=stages),
            v_loaded=plgpu.Barrier(num_barriers=num_values),
            k_used=of_cluster(num_barriers=stages),
            v_used=of_cluster(num_barriers=num_values),
            done=of_cluster(),
        ),
        grid=(num_heads // together, seq // TILE_Q, rows),
        grid_names=("head", "tile", "row"),
        cluster=(together,),
        cluster_names=(PAIR,),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    (dq_BSNH,) = kernel(*operands, *begins, *spans, visits.stacked())
    return dq_BSNH


class _OfQueries:
    """The program of `of_queries`."""

    def __init__(self, *refs, group: int, scores: Scores, **scratch):
        self.operands = Operands(*refs[:9])
        (self.dq,) = refs[9:]
        self.group, self.scores = group, scores
        self.here = _OfQueriesScratch(**scratch)

    def place(self):
        """(row, head, tile of queries); the last tiles see most keys, and begin first."""
        row, pair, tile = self.operands.place()
        last = self.operands.q.shape[1] // TILE_Q - 1
        return row, pair * lax.axis_size(PAIR) + lax.axis_index(PAIR), last - tile

    def work(self) -> Work:
        row, _, tile = self.place()
        return self.operands.work(row, tile)

    @property
    def tile_k(self) -> int:
        return self.here.k_tiles.shape[1]

    def copy(self):
        """Loads tiles of keys and values ahead of the others."""
        plgpu.set_max_registers(REGISTERS_TO_COPY, action="decrease")
        of, here, work = self.operands, self.here, self.work()
        row, head, _ = self.place()

        @pl.loop(0, work.num)
        def load_tile(i):
            tile = pl.ds(work.tile(i) * self.tile_k, self.tile_k)
            keys = (row, tile, lax.div(head, self.group))
            for source, tiles, loaded, used in (
                (of.k, here.k_tiles, here.k_loaded, here.k_used),
                (of.v, here.v_tiles, here.v_loaded, here.v_used),
            ):
                slot = lax.rem(i, tiles.shape[0])
                wait_if(i >= tiles.shape[0], used.at[slot])
                plgpu.copy_gmem_to_smem(
                    source.at[keys], tiles.at[slot], loaded.at[slot], collective_axes=(PAIR,)
                )

        plgpu.barrier_wait(here.done)

    def compute(self):
        plgpu.set_max_registers(REGISTERS, action="increase")
        of, here = self.operands, self.here
        row, head, tile = self.place()
        warpgroup = lax.axis_index("warpgroup")
        queries = pl.ds(tile * TILE_Q + warpgroup * 64, 64)
        loaded, q_tile = here.queries_loaded.at[warpgroup], here.q_tile.at[warpgroup]
        plgpu.copy_gmem_to_smem(of.q.at[row, queries, head], q_tile, loaded)
        grad_tile = here.grad_tile.at[warpgroup]
        plgpu.copy_gmem_to_smem(of.grad.at[row, queries, head], grad_tile, loaded)
        of_rows = [
            load(ref, layout=PER_ROW, optimized=False)
            for ref in (
                of.lse.at[row, head, queries],
                of.seen.at[row, head, queries],
                of.first.at[row, queries],
                of.last.at[row, queries],
            )
        ]
        plgpu.barrier_wait(loaded)

        def all_tiles(dq):
            num_whole, num = self.work().num_whole, self.work().num
            step = functools.partial(self.step, dq=dq, of_rows=of_rows)
            ds = zeros(self.tile_k, self.dq.dtype)
            ds = lax.fori_loop(0, num_whole, functools.partial(step, is_whole=True), ds)
            ds = lax.fori_loop(num_whole, num, functools.partial(step, is_whole=False), ds)

            @pl.when(num > 0)
            def add_last():
                plgpu.wgmma(dq, ds, here.k_tiles.at[lax.rem(num - 1, here.stages)])
                plgpu.wgmma_wait(0)

            return dq[...]

        dq = pl.run_scoped(all_tiles, plgpu.ACC((64, of.q.shape[-1]), jnp.float32))
        plgpu.barrier_arrive(here.done)
        q_tile[...] = (dq * self.scores.scale).astype(self.dq.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tile, self.dq.at[row, queries, head])
        plgpu.wait_smem_to_gmem(0)
        # Until then the others of the cluster arrive at barriers that are here.
        plgpu.barrier_wait(here.done)

    def step(self, i, ds_before, *, dq, of_rows, is_whole: bool):
        """The first one adds zeros times its own tile of keys."""
        here, warpgroup = self.here, lax.axis_index("warpgroup")
        k_slot, v_slot = (lax.rem(i, tiles.shape[0]) for tiles in (here.k_tiles, here.v_tiles))
        k_before = lax.rem(jnp.maximum(i - 1, 0), here.stages)
        k_tile, v_tile = here.k_tiles.at[k_slot], here.v_tiles.at[v_slot]
        begin, seen, first, last = of_rows
        late = LateSum(
            add=lambda: plgpu.wgmma(dq, ds_before, here.k_tiles.at[k_before]),
            free=lambda: arrive_if(i > 0, here.k_used.at[k_before]),
            stages=here.stages,
        )
        plgpu.barrier_wait(here.k_loaded.at[k_slot])

        def issue_scores(ref):
            plgpu.wgmma(ref, here.q_tile.at[warpgroup], k_tile.transpose((1, 0)))

        def issue_dp(ref):
            plgpu.wgmma(ref, here.grad_tile.at[warpgroup], v_tile.transpose((1, 0)))

        def weights(products):
            p, slope = self.scores.weights(products, by_row(begin, products))
            if not is_whole:
                keys = self.work().tile(i) * self.tile_k
                p = masked(p, first=first - keys, last=last - keys, hidden=0.0)
            return p if slope is None else p * slope

        def make_ds(p, dp):
            plgpu.barrier_arrive(here.v_used.at[v_slot])
            return (p * (dp + by_row(seen, dp))).astype(self.dq.dtype)

        def make_p(scores):
            return weights(late.products(scores, lambda: issue_scores(scores)))

        def behind_p(dp):
            issue_dp(dp)
            return make_ds(p, plgpu.wgmma_accumulator_load(dp))

        def at_once(scores, dp):
            issue_scores(scores)
            issue_dp(dp)
            p = weights(plgpu.wgmma_accumulator_load(scores, wait_n=1))
            late.add()
            ds = make_ds(p, plgpu.wgmma_accumulator_load(dp, wait_n=1))
            plgpu.wgmma_wait(0)
            late.free()
            return ds

        tile = plgpu.ACC((64, self.tile_k), jnp.float32)
        if late.may_wait:
            plgpu.barrier_wait(here.v_loaded.at[v_slot])
            return pl.run_scoped(at_once, tile, tile)
        p = pl.run_scoped(make_p, tile)
        plgpu.barrier_wait(here.v_loaded.at[v_slot])
        return pl.run_scoped(behind_p, tile)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfQueriesScratch:
    """Shared memory and barriers of `_OfQueries`."""

    q_tile: Any
    grad_tile: Any
    k_tiles: Any
    v_tiles: Any
    queries_loaded: Any
    k_loaded: Any
    v_loaded: Any
    k_used: Any
    v_used: Any
    done: Any

    @property
    def stages(self) -> int:
        return self.k_tiles.shape[0]
