"""Flash attention for Hopper, backward (Pallas Mosaic GPU; arXiv:2407.08608, arXiv:2205.14135).

A program has 128 keys of one key head, 64 for each of two warpgroups that compute, and goes over
the tiles of queries, of all heads that share the key head, which see them. Five products: scores
and dp (transposed, so that p and ds stay in registers as operands), dv, dk, and dq, whose part is
added in float32 to what other programs add. dq of a tile is made one tile late: ds crosses from one
warpgroup to the other, and neither waits for it.

The order of those additions is not fixed. For a run that must repeat to the bit, dq is made in a
program of its own, by tile of queries: two products more.

B rows, S queries, T keys, N query heads, K key heads, H head size.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxscale.kernels.flash_forward import LOG2_E, REGISTERS, REGISTERS_TO_COPY
from jaxscale.kernels.flash_spans import Spans, Work, tiles_of_keys, tiles_of_queries
from jaxscale.kernels.hopper import WARPGROUPS, load, run

TILE_Q = 64
TILE_K = 64 * WARPGROUPS
STAGES = 2  # tiles of queries in shared memory
# Tiles of ds: a warpgroup may be a step ahead, and the other still read what it made two before.
DS_TILES = 4

PER_QUERY = plgpu.Layout.WGMMA.reduce(0)  # of scores that are transposed


def backward(q_BSNH, k_BTKH, v_BTKH, *, grad_BSNH, lse_BNS, seen_BNS, spans, scale, in_order):
    """dq, dk and dv, in the input dtypes.

    lse_BNS: the log-sum-exp of the scores, float32, finite where a query sees nothing. seen_BNS:
    the sum over H of output and grad_BSNH, float32. in_order: sums are made in one order.
    """
    operands = q_BSNH, k_BTKH, v_BTKH, grad_BSNH
    # What is subtracted from sums is where they begin; scores are multiplied by the scale after it.
    begins = -lse_BNS / scale, -seen_BNS
    if in_order:
        dk_BTKH, dv_BTKH = _of_keys(operands, begins, spans=spans, scale=scale, dq=None)
        dq_BSNH = _of_queries(operands, begins, spans=spans, scale=scale)
        return dq_BSNH, dk_BTKH, dv_BTKH

    # Zeros that wait for the gradient. XLA would make those of all layers as soon as it may: 15 GiB
    # of Llama 3 8B, 65,536 tokens over two GPUs.
    zero, *begins = lax.optimization_barrier((jnp.float32(0), *begins))
    sums_BSNH = jnp.broadcast_to(zero, q_BSNH.shape)

    def adding(dq_dk_dv):
        dq, dk, dv = dq_dk_dv
        dk[...], dv[...] = _of_keys(operands, begins, spans=spans, scale=scale, dq=dq)

    # Not jax.new_ref: here no effect is left for jax.checkpoint and loops to carry.
    begin = sums_BSNH, jnp.zeros_like(k_BTKH), jnp.zeros_like(v_BTKH)
    sums_BSNH, dk_BTKH, dv_BTKH = pl.run_state(adding)(begin)
    return (sums_BSNH * scale).astype(q_BSNH.dtype), dk_BTKH, dv_BTKH


def _swizzled(head_size: int):
    """Of operands: a warpgroup's half of the columns of K is whole tiles."""
    columns = min(64, head_size // WARPGROUPS)
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)


# dk and dv, and dq by additions.


def _of_keys(operands, begins, *, spans: Spans, scale: float, dq):
    """dk, dv; adds dq / scale to `dq`, a reference of float32, unless None."""
    q_BSNH, k_BTKH, v_BTKH, _ = operands
    rows, num_keys, num_key_heads, head_size = k_BTKH.shape
    visits = tiles_of_queries(spans, num_keys=num_keys, tile_q=TILE_Q, tile_k=TILE_K)

    def operand(*shape):
        return plgpu.SMEM(shape, q_BSNH.dtype, transforms=_swizzled(head_size))

    floats = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)
    statistics = plgpu.SMEM((STAGES, TILE_Q), jnp.float32)
    # Of a tile of queries and its statistics.
    loaded = plgpu.Barrier(num_arrivals=2, num_barriers=STAGES)
    dq_columns = head_size // WARPGROUPS
    for_dq = dict(
        ds_tiles=operand(DS_TILES, TILE_K, TILE_Q),
        dq_tile=plgpu.SMEM((WARPGROUPS, TILE_Q, dq_columns), jnp.float32, transforms=floats),
        ds_made=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=DS_TILES),
        both=plgpu.Barrier(num_arrivals=WARPGROUPS),
    )

    def flash_attention_backward(*refs, **scratch):
        group = q_BSNH.shape[2] // num_key_heads
        run(_OfKeys(*refs, **scratch, has_dq=dq is not None, group=group, scale=scale))

    kernel = plgpu.kernel(
        flash_attention_backward,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_BTKH, v_BTKH)],
        scratch_types=dict(
            k_tile=operand(TILE_K, head_size),
            v_tile=operand(TILE_K, head_size),
            q_tiles=operand(STAGES, TILE_Q, head_size),
            grad_tiles=operand(STAGES, TILE_Q, head_size),
            lse_tiles=statistics,
            seen_tiles=statistics,
            keys_loaded=plgpu.Barrier(num_arrivals=2),
            q_loaded=loaded,
            grad_loaded=loaded,
            used=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
            **(for_dq if dq is not None else {}),
        ),
        grid=(num_key_heads, num_keys // TILE_K, rows),
        grid_names=("head", "tile", "row"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    added_to = () if dq is None else (dq,)
    return kernel(*operands, *begins, *spans, visits.stacked(), *added_to)


@dataclasses.dataclass(frozen=True)
class _Operands:
    """The references of what both kernels read."""

    q: Any
    k: Any
    v: Any
    grad: Any
    lse: Any
    seen: Any
    first: Any
    last: Any
    visits: Any

    def place(self):
        """(row, head, tile)."""
        return tuple(lax.axis_index(name) for name in ("row", "head", "tile"))

    def work(self) -> Work:
        row, _, tile = self.place()
        return Work(*(self.visits[row, tile, i] for i in range(4)))


class _OfKeys:
    """The program of `_of_keys`."""

    def __init__(self, *refs, has_dq: bool, group: int, scale: float, **scratch):
        self.operands = _Operands(*refs[:9])
        self.dq, self.dk, self.dv = refs[9:] if has_dq else (None, *refs[9:])
        self.group, self.scale = group, scale
        self.here = _OfKeysScratch(**scratch)

    def num_steps(self):
        return self.group * self.operands.work().num

    def step_of(self, i):
        """(head, tile of queries) of the ith step; steps without a mask come first."""
        work, (_, key_head, _) = self.operands.work(), self.operands.place()
        num_whole = self.group * work.num_whole
        is_whole = i < num_whole
        tiles = jnp.where(is_whole, work.num_whole, work.num - work.num_whole)
        j = jnp.where(is_whole, i, i - num_whole)
        head_of_group, tile = lax.div(j, tiles), lax.rem(j, tiles)
        tile = jnp.where(is_whole, tile, work.num_whole + tile)
        return key_head * self.group + head_of_group, work.tile(tile)

    def copy(self):
        """Loads this program's keys and values, and tiles of queries ahead of the others."""
        plgpu.set_max_registers(REGISTERS_TO_COPY, action="decrease")
        of, here = self.operands, self.here
        row, key_head, tile = of.place()
        keys = (row, pl.ds(tile * TILE_K, TILE_K), key_head)
        plgpu.copy_gmem_to_smem(of.k.at[keys], here.k_tile, here.keys_loaded)
        plgpu.copy_gmem_to_smem(of.v.at[keys], here.v_tile, here.keys_loaded)

        @pl.loop(0, self.num_steps())
        def load_tile(i):
            slot, (head, tile) = lax.rem(i, STAGES), self.step_of(i)
            queries = pl.ds(tile * TILE_Q, TILE_Q)
            pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(here.used.at[slot]))
            for source, target, loaded in (
                (of.q.at[row, queries, head], here.q_tiles, here.q_loaded),
                (of.lse.at[row, head, queries], here.lse_tiles, here.q_loaded),
                (of.grad.at[row, queries, head], here.grad_tiles, here.grad_loaded),
                (of.seen.at[row, head, queries], here.seen_tiles, here.grad_loaded),
            ):
                plgpu.copy_gmem_to_smem(source, target.at[slot], loaded.at[slot])

    def compute(self):
        plgpu.set_max_registers(REGISTERS, action="increase")
        here, head_size = self.here, self.operands.k.shape[-1]
        row, key_head, tile = self.operands.place()
        num_steps, mine = self.num_steps(), self.mine()
        if self.dq is not None:
            # The first step adds the product of these zeros to the dq of its own tile.
            zeros = jnp.zeros((64, TILE_Q), here.ds_tiles.dtype)
            zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            self.hand_over(zeros, DS_TILES - 1)
        plgpu.barrier_wait(here.keys_loaded)
        sums = plgpu.ACC((64, head_size), jnp.float32)
        dk, dv = pl.run_scoped(self.all_steps, sums, sums)
        if self.dq is not None:
            pl.when(num_steps > 0)(lambda: self.add_dq(num_steps - 1))
            # The other warpgroup has read this one's keys for its columns of dq.
            plgpu.barrier_arrive(here.both)
            plgpu.barrier_wait(here.both)
        here.k_tile.at[mine][...] = (dk * self.scale).astype(self.dk.dtype)
        here.v_tile.at[mine][...] = dv.astype(self.dv.dtype)
        plgpu.commit_smem()
        keys = (row, pl.ds(tile * TILE_K + lax.axis_index("warpgroup") * 64, 64), key_head)
        plgpu.copy_smem_to_gmem(here.k_tile.at[mine], self.dk.at[keys])
        plgpu.copy_smem_to_gmem(here.v_tile.at[mine], self.dv.at[keys])
        plgpu.wait_smem_to_gmem(0)

    def mine(self):
        """This warpgroup's keys of the tile."""
        return pl.ds(lax.axis_index("warpgroup") * 64, 64)

    def all_steps(self, dk, dv):
        num_whole = self.group * self.operands.work().num_whole
        step = functools.partial(self.step, dk=dk, dv=dv)
        pl.loop(0, num_whole)(functools.partial(step, is_whole=True))
        pl.loop(num_whole, self.num_steps())(functools.partial(step, is_whole=False))
        return dk[...], dv[...]

    def step(self, i, *, dk, dv, is_whole: bool):
        here, slot = self.here, lax.rem(i, STAGES)
        plgpu.barrier_wait(here.q_loaded.at[slot])
        plgpu.barrier_wait(here.grad_loaded.at[slot])

        def issue(scores, dp):
            scores[...] = _begin(here.lse_tiles.at[slot])
            dp[...] = _begin(here.seen_tiles.at[slot])
            plgpu.wgmma(
                scores, here.k_tile.at[self.mine()], here.q_tiles.at[slot].transpose((1, 0))
            )
            plgpu.wgmma(dp, here.v_tile.at[self.mine()], here.grad_tiles.at[slot].transpose((1, 0)))
            p = jnp.exp2(plgpu.wgmma_accumulator_load(scores, wait_n=1) * (self.scale * LOG2_E))
            if not is_whole:
                p = self.masked(p, i)
            ds = p * plgpu.wgmma_accumulator_load(dp, wait_n=0)
            p, ds = p.astype(self.dv.dtype), ds.astype(self.dv.dtype)
            if self.dq is not None:
                self.hand_over(ds, lax.rem(i, DS_TILES))
            plgpu.wgmma(dv, p, here.grad_tiles.at[slot])
            plgpu.wgmma(dk, ds, here.q_tiles.at[slot])
            if self.dq is not None:
                self.add_dq(i - 1, slot_in_use=slot)
            else:
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(here.used.at[slot])

        tile = plgpu.ACC((64, TILE_Q), jnp.float32)
        pl.run_scoped(issue, tile, tile)

    def masked(self, p, i):
        row, _, tile_of_keys = self.operands.place()
        _, tile = self.step_of(i)
        queries = pl.ds(tile * TILE_Q, TILE_Q)
        key = tile_of_keys * TILE_K + lax.axis_index("warpgroup") * 64
        key += plgpu.broadcasted_iota(jnp.int32, p.shape, 0, layout=plgpu.Layout.WGMMA)
        # One after the other: both at once take registers that spill.
        first = _per_query(self.operands.first.at[row, queries])
        p = jnp.where(key >= _by_column(first, p), p, 0.0)
        last = _per_query(self.operands.last.at[row, queries])
        return jnp.where(key < _by_column(last, p), p, 0.0)

    def hand_over(self, ds, slot):
        """Gives this warpgroup's ds of a tile of queries to both."""
        self.here.ds_tiles.at[slot, self.mine()][...] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.here.ds_made.at[slot])

    def add_dq(self, i, *, slot_in_use=None):
        """Adds this warpgroup's columns of dq of the ith step (-1: zeros, to those of step 0).

        slot_in_use: of the queries that products before this one read.
        """
        here, (row, _, _) = self.here, self.operands.place()
        head, tile = self.step_of(jnp.maximum(i, 0))
        warpgroup = lax.axis_index("warpgroup")
        dq_tile = here.dq_tile.at[warpgroup]
        _, num_queries, num_columns = here.dq_tile.shape
        columns = pl.ds(warpgroup * num_columns, num_columns)
        slot = lax.rem(i + DS_TILES, DS_TILES)
        plgpu.barrier_wait(here.ds_made.at[slot])

        def product(ref):
            plgpu.wgmma(ref, here.ds_tiles.at[slot].transpose((1, 0)), here.k_tile.at[:, columns])
            if slot_in_use is not None:
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(here.used.at[slot_in_use])
            return ref[...]

        dq = pl.run_scoped(product, plgpu.ACC((num_queries, num_columns), jnp.float32))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        dq_tile[...] = dq
        plgpu.commit_smem()
        target = self.dq.at[row, pl.ds(tile * TILE_Q, TILE_Q), head, columns]
        plgpu.copy_smem_to_gmem(dq_tile, target, reduction_op="add")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfKeysScratch:
    """Shared memory and barriers of `_OfKeys`."""

    k_tile: Any
    v_tile: Any
    q_tiles: Any
    grad_tiles: Any
    lse_tiles: Any
    seen_tiles: Any
    keys_loaded: Any
    q_loaded: Any
    grad_loaded: Any
    used: Any
    ds_tiles: Any = None
    dq_tile: Any = None
    ds_made: Any = None
    both: Any = None


def _per_query(ref):
    return load(ref, layout=PER_QUERY, optimized=False)


def _begin(ref):
    """What sums over the head begin with: of each query the same for all keys."""
    values = load(ref, layout=PER_QUERY)
    tile = lax.broadcast_in_dim(values, (64, TILE_Q), [1])
    return plgpu.layout_cast(tile, plgpu.Layout.WGMMA)


def _by_column(x, like):
    return lax.broadcast_in_dim(x, like.shape, [1])


# dq by itself, in one order.

TILE_Q_IN_ORDER = 64 * WARPGROUPS
TILE_K_IN_ORDER = 64
PER_ROW = plgpu.Layout.WGMMA.reduce(1)


def _of_queries(operands, begins, *, spans: Spans, scale: float):
    """dq."""
    q_BSNH, k_BTKH, *_ = operands
    rows, seq, num_heads, head_size = q_BSNH.shape
    tiles = dict(tile_q=TILE_Q_IN_ORDER, tile_k=TILE_K_IN_ORDER)
    visits = tiles_of_keys(spans, num_keys=k_BTKH.shape[1], **tiles)

    def operand(*shape):
        tiled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM((*shape, head_size), q_BSNH.dtype, transforms=tiled)

    def flash_attention_backward_of_queries(*refs, **scratch):
        group = num_heads // k_BTKH.shape[2]
        run(_OfQueries(*refs, **scratch, group=group, scale=scale))

    kernel = plgpu.kernel(
        flash_attention_backward_of_queries,
        out_type=[jax.ShapeDtypeStruct(q_BSNH.shape, q_BSNH.dtype)],
        scratch_types=dict(
            q_tile=operand(WARPGROUPS, 64),
            grad_tile=operand(WARPGROUPS, 64),
            k_tiles=operand(STAGES, TILE_K_IN_ORDER),
            v_tiles=operand(STAGES, TILE_K_IN_ORDER),
            queries_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
            keys_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            used=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
        ),
        grid=(num_heads, seq // TILE_Q_IN_ORDER, rows),
        grid_names=("head", "tile", "row"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    (dq_BSNH,) = kernel(*operands, *begins, *spans, visits.stacked())
    return dq_BSNH


class _OfQueries:
    """The program of `_of_queries`."""

    def __init__(self, *refs, group: int, scale: float, **scratch):
        self.operands = _Operands(*refs[:9])
        (self.dq,) = refs[9:]
        self.group, self.scale = group, scale
        self.here = _OfQueriesScratch(**scratch)

    def copy(self):
        """Loads tiles of keys and values ahead of the others."""
        plgpu.set_max_registers(REGISTERS_TO_COPY, action="decrease")
        of, here, work = self.operands, self.here, self.operands.work()
        row, head, _ = of.place()

        @pl.loop(0, work.num)
        def load_tile(i):
            slot = lax.rem(i, STAGES)
            tile = pl.ds(work.tile(i) * TILE_K_IN_ORDER, TILE_K_IN_ORDER)
            keys = (row, tile, lax.div(head, self.group))
            pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(here.used.at[slot]))
            for source, tiles in (of.k, here.k_tiles), (of.v, here.v_tiles):
                plgpu.copy_gmem_to_smem(source.at[keys], tiles.at[slot], here.keys_loaded.at[slot])

    def compute(self):
        plgpu.set_max_registers(REGISTERS, action="increase")
        of, here = self.operands, self.here
        row, head, tile = of.place()
        warpgroup = lax.axis_index("warpgroup")
        queries = pl.ds(tile * TILE_Q_IN_ORDER + warpgroup * 64, 64)
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
            num_whole = of.work().num_whole
            step = functools.partial(self.step, dq=dq, of_rows=of_rows)
            pl.loop(0, num_whole)(functools.partial(step, is_whole=True))
            pl.loop(num_whole, of.work().num)(functools.partial(step, is_whole=False))
            return dq[...]

        dq = pl.run_scoped(all_tiles, plgpu.ACC((64, of.q.shape[-1]), jnp.float32))
        q_tile[...] = (dq * self.scale).astype(self.dq.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tile, self.dq.at[row, queries, head])
        plgpu.wait_smem_to_gmem(0)

    def step(self, i, *, dq, of_rows, is_whole: bool):
        here, slot = self.here, lax.rem(i, STAGES)
        warpgroup = lax.axis_index("warpgroup")
        lse, seen, first, last = of_rows
        plgpu.barrier_wait(here.keys_loaded.at[slot])

        def products(scores, dp):
            by_row = functools.partial(lax.broadcast_in_dim, shape=(64, TILE_K_IN_ORDER))
            for ref, values in (scores, lse), (dp, seen):
                tile = by_row(values, broadcast_dimensions=[0])
                ref[...] = plgpu.layout_cast(tile, plgpu.Layout.WGMMA)
            k_tile, v_tile = here.k_tiles.at[slot], here.v_tiles.at[slot]
            plgpu.wgmma(scores, here.q_tile.at[warpgroup], k_tile.transpose((1, 0)))
            plgpu.wgmma(dp, here.grad_tile.at[warpgroup], v_tile.transpose((1, 0)))
            p = jnp.exp2(plgpu.wgmma_accumulator_load(scores, wait_n=1) * (self.scale * LOG2_E))
            if not is_whole:
                key = plgpu.broadcasted_iota(jnp.int32, p.shape, 1, layout=plgpu.Layout.WGMMA)
                key += self.operands.work().tile(i) * TILE_K_IN_ORDER
                bounds = (by_row(x, broadcast_dimensions=[0]) for x in (first, last))
                p = jnp.where((key >= next(bounds)) & (key < next(bounds)), p, 0.0)
            ds = p * plgpu.wgmma_accumulator_load(dp, wait_n=0)
            plgpu.wgmma(dq, ds.astype(self.dq.dtype), k_tile)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(here.used.at[slot])

        tile = plgpu.ACC((64, TILE_K_IN_ORDER), jnp.float32)
        pl.run_scoped(products, tile, tile)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfQueriesScratch:
    """Shared memory and barriers of `_OfQueries`."""

    q_tile: Any
    grad_tile: Any
    k_tiles: Any
    v_tiles: Any
    queries_loaded: Any
    keys_loaded: Any
    used: Any
