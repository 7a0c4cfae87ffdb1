"""Flash attention's dk and dv for Hopper, and dq by additions: a program for each tile of keys.

It has 128 keys of one key head, 64 for each of two warpgroups that compute, and goes over the
tiles of queries, of all heads that share the key head, which see them. Five products: scores and dp
(transposed, so that p and ds stay in registers as operands), dv, dk, and dq, whose part is added in
float32 to what other programs add. dq of a tile is made one tile late: ds crosses from one
warpgroup to the other, and neither waits for it. What a warpgroup does between products runs beside
a product of its own: p beside dp, ds beside dv, the addition of dq beside dk. A warpgroup leaves
its products out where none of a step's queries sees its keys. At head size 64 without a cap it
makes all, and programs go on from tile to tile (`flash_backward_dealt.py`), steps are of 128
queries, and dq of 64 is made by each warpgroup (`Part.is_wide`).

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

from jaxscale.kernels import flash_dq_sums
from jaxscale.kernels.flash_forward import HIDDEN, REGISTERS, REGISTERS_TO_COPY, masked
from jaxscale.kernels.flash_scores import STAGES, Operands, Scores
from jaxscale.kernels.flash_spans import Pairs, Work, tiles_seen
from jaxscale.kernels.hopper import WARPGROUPS, load, run, wait_if, zeros

TILE_Q = 64
TILE_K = 64 * WARPGROUPS
# Up to this head size a warpgroup has the registers for its sums of five products.
MAX_HEAD_SIZE_OF_FIVE = 128
# Of scores that are transposed.
PER_QUERY, PER_KEY = plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What a kernel by tiles of keys makes, of how many queries a step, and how many tiles of
    queries and of gradients it holds."""

    name: str = "flash_attention_backward"
    has_dk: bool = True
    has_dv: bool = True
    stages: int = STAGES
    grad_stages: int = STAGES
    num_queries: int = TILE_Q

    @property
    def is_wide(self) -> bool:
        """Steps of 128 queries, with additions of dq, of which a warpgroup makes 64 queries instead
        of half of the columns. The tiles to visit stay in registers."""
        return self.num_queries > TILE_Q

    @property
    def num_ds(self) -> int:
        """Tiles of ds. With four none is waited for: a warpgroup may be a step ahead, and the other
        still read what it made two before. Of two, one is waited for until both have read it: of
        128 queries there is no room for four."""
        return 2 if self.is_wide else 4

    def num_dq_columns(self, head_size: int) -> int:
        """Of a warpgroup's part of dq, which is of 64 queries."""
        return head_size if self.is_wide else head_size // WARPGROUPS


WHOLE = Part()
# Head size 64: 0.91 to 0.93 ms instead of 1.09 on an H200 (docs/kernels_record.md).
WIDE = Part(num_queries=128)


def of_keys(operands, begins, *, pairs: Pairs, scores: Scores, part: Part = WHOLE, dq, make=None):
    """[dk, dv] or one of them; adds dq / scale to `dq`, unless None.

    operands: q, k, v and the output's gradient. begins: where scores and dp begin, float32
    [B, N, S] each: `Scores.begin`, and minus the sum over V of output and gradient. dq: a reference
    of sums (`flash_dq_sums.py`). make: the class of the program, if not `OfKeys`.
    """
    q_BSNH, k_BTKH, v_BTKV, _ = operands
    rows, num_keys, num_key_heads, _ = k_BTKH.shape
    spans = pairs.queries_of_keys
    in_tiles = dict(num_seen=q_BSNH.shape[1], seen_size=part.num_queries)
    visits = tiles_seen(spans, size=TILE_K, **in_tiles).stacked()
    if make is None:
        # Behind them each warpgroup's own, from and to.
        own = tiles_seen(spans, size=TILE_K // WARPGROUPS, **in_tiles).stacked()[..., :2]
        visits = jnp.concatenate([visits, own.reshape(visits.shape)], axis=-1)

    def program(*refs, **scratch):
        group = q_BSNH.shape[2] // num_key_heads
        options = dict(part=part, group=group, scores=scores)
        run((make or OfKeys)(*refs, **scratch, has_dq=dq is not None, **options))

    program.__name__ = part.name
    made = [x for x, is_made in ((k_BTKH, part.has_dk), (v_BTKV, part.has_dv)) if is_made]
    kernel = plgpu.kernel(
        program,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in made],
        scratch_types=scratch_of(operands, part=part, has_dq=dq is not None),
        grid=(num_key_heads, num_keys // TILE_K, rows),
        grid_names=("head", "tile", "row"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=compiler_params(has_dq=dq is not None),
    )
    added_to = () if dq is None else (dq,)
    return kernel(*operands, *begins, *spans, visits, *added_to)


def compiler_params(*, has_dq: bool) -> Any:
    """jax adds no barriers to those that stand here where dq is added to.

    These are enough then. No thread reads and writes the same shared memory, and all 256 threads
    arrive at each barrier in it, so no warp is a phase behind another. Threads write `ds_tiles`
    when both warpgroups have waited for the products that read them (`Part.num_ds`), `dq_tile`
    when TMA has read it (`wait_smem_to_gmem`, behind which the warpgroup meets), and in the end
    `k_tile` and `v_tile`, when all products are done (`both`). Products and TMA read what threads
    wrote behind `commit_smem`, a fence and a meeting of the warpgroup. TMA writes where all threads
    are done (`q_used`, `grad_used`).
    """
    return plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=has_dq)


def scratch_of(operands, *, part: Part, has_dq: bool, slots: tuple[int, ...] = ()):
    """Shared memory and barriers of a program; slots: of keys and values, if not for one tile."""
    q_BSNH, _, v_BTKV, _ = operands
    head_size, v_head_size = q_BSNH.shape[-1], v_BTKV.shape[-1]
    tile_q, num_ds = part.num_queries, part.num_ds
    stages, num_grads = part.stages, part.grad_stages
    num_columns = part.num_dq_columns(head_size)

    def operand(*shape):
        return plgpu.SMEM(shape, q_BSNH.dtype, transforms=_swizzled(num_columns))

    used = functools.partial(plgpu.Barrier, num_arrivals=WARPGROUPS)
    # Of a tile of queries and its statistics.
    loaded = functools.partial(plgpu.Barrier, num_arrivals=2)
    for_dq = dict(
        ds_tiles=operand(num_ds, TILE_K, tile_q),
        dq_tile=plgpu.SMEM((WARPGROUPS, *flash_dq_sums.part_shape(num_columns)), jnp.float32),
        ds_made=used(num_barriers=num_ds),
        both=plgpu.Barrier(num_arrivals=WARPGROUPS),
        **(dict(ds_used=used(num_barriers=num_ds)) if part.is_wide else {}),
    )
    # dv is put there on its way out too, or in place of the keys if it has their size.
    has_v_tile = part.has_dk or v_head_size != head_size
    return dict(
        k_tile=operand(*slots, TILE_K, head_size),
        q_tiles=operand(stages, tile_q, head_size),
        grad_tiles=operand(num_grads, tile_q, v_head_size),
        lse_tiles=plgpu.SMEM((stages, tile_q), jnp.float32),
        seen_tiles=plgpu.SMEM((num_grads, tile_q), jnp.float32),
        keys_loaded=plgpu.Barrier(num_arrivals=1 + part.has_dk, num_barriers=slots),
        q_loaded=loaded(num_barriers=stages),
        grad_loaded=loaded(num_barriers=num_grads),
        q_used=used(num_barriers=stages),
        grad_used=used(num_barriers=num_grads),
        **(dict(v_tile=operand(*slots, TILE_K, v_head_size)) if has_v_tile else {}),
        **(for_dq if has_dq else {}),
    )


def _swizzled(columns: int):
    """Of operands with whole tiles of so many columns."""
    columns = min(64, columns)
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)


class OfKeys:
    """The program of `of_keys`."""

    # References, or None.
    dq: Any
    dk: Any
    dv: Any

    def __init__(self, *refs, has_dq: bool, part: Part, group: int, scores: Scores, **scratch: Any):
        self.operands = Operands(*refs[:9])
        made = iter(refs[9:])
        self.dq, self.dk, self.dv = (
            next(made) if is_made else None for is_made in (has_dq, part.has_dk, part.has_dv)
        )
        self.part, self.group, self.scores = part, group, scores
        self.here = Scratch(**scratch)
        self.remembered: Work | None = None
        # Where slots in shared memory are counted from; step -1 is the zeros before the first.
        self.first_step, self.first_ds = 0, part.num_ds

    def place(self):
        """(row, key head, tile of keys)."""
        return self.operands.place()

    def work(self) -> Work:
        row, _, tile = self.place()
        return self.remembered or self.operands.work(row, tile)

    def slot_of_step(self, i, stages: int):
        return lax.rem(self.first_step + i, stages)

    def slot_of_ds(self, i):
        return lax.rem(i + self.first_ds, self.part.num_ds)

    def num_steps(self):
        return self.group * self.work().num

    def first_head(self):
        return self.place()[1] * self.group

    def over_steps(self, visit, handed=None):
        """visit(i, head_and_tile, handed=, is_whole=) of each step in order, which returns what it
        hands to the next one; what the last one does is returned.

        Steps without a mask come first, of one head after the other. Heads and tiles are counted
        on: with divisions by numbers known at run time both passes took 3 to 8% longer on an H200
        (head size 128).
        """
        work = self.work()

        def steps(handed, *, is_whole):
            begin, end = (jnp.int32(0), work.num_whole) if is_whole else (work.num_whole, work.num)

            def one(i, carried):
                head, j, handed = carried
                head_and_tile = head, work.tile(j, is_whole)
                handed = visit(i, head_and_tile, handed=handed, is_whole=is_whole)
                j += 1
                if self.group > 1:
                    is_last = j == end
                    head, j = head + is_last.astype(head.dtype), jnp.where(is_last, begin, j)
                return head, j, handed

            carried = self.first_head(), begin, handed
            return lax.fori_loop(self.group * begin, self.group * end, one, carried)[-1]

        return steps(steps(handed, is_whole=True), is_whole=False)

    def copy(self):
        plgpu.set_max_registers(REGISTERS_TO_COPY, action="decrease")
        self.load(self.here.keys_loaded)

    def load(self, keys_loaded):
        """A tile of keys and values, and tiles of queries ahead of the other warpgroups."""
        of, here = self.operands, self.here
        row, key_head, tile = self.place()
        keys = (row, pl.ds(tile * TILE_K, TILE_K), key_head)
        plgpu.copy_gmem_to_smem(of.k.at[keys], here.k_tile, keys_loaded)
        if self.dk is not None:
            plgpu.copy_gmem_to_smem(of.v.at[keys], here.v_tile, keys_loaded)

        def load_tile(i, head_and_tile, **_):
            head, tile = head_and_tile
            queries = self.queries(tile)
            for operand, statistic, tiles, statistics, loaded, used in (
                (of.q, of.lse, here.q_tiles, here.lse_tiles, here.q_loaded, here.q_used),
                (
                    of.grad,
                    of.seen,
                    here.grad_tiles,
                    here.seen_tiles,
                    here.grad_loaded,
                    here.grad_used,
                ),
            ):
                stages = tiles.shape[0]
                slot = self.slot_of_step(i, stages)
                wait_if(self.first_step + i >= stages, used.at[slot])
                for source, target in (
                    (operand.at[row, queries, head], tiles),
                    (statistic.at[row, head, queries], statistics),
                ):
                    plgpu.copy_gmem_to_smem(source, target.at[slot], loaded.at[slot])

        self.over_steps(load_tile)

    def compute(self):
        plgpu.set_max_registers(REGISTERS, action="increase")
        self.offer_ds()
        self.make(self.here.keys_loaded)
        plgpu.wait_smem_to_gmem(0)

    def offer_ds(self):
        """Before anything is made nobody reads tiles of ds."""
        if self.here.ds_used is not None:
            for slot in range(self.part.num_ds):
                plgpu.barrier_arrive(self.here.ds_used.at[slot])

    def make(self, keys_loaded):
        """All of a tile of keys, up to its way to memory."""
        here, of = self.here, self.operands
        row, key_head, _ = self.place()
        num_steps, mine, keys = self.num_steps(), self.mine(), self.keys()
        seen_by = self.seen_by(row, keys)
        if self.dq is not None:
            # The first step adds the product of these zeros to the dq of its own tile.
            self.hand_over(zeros(self.part.num_queries, here.ds_tiles.dtype), self.slot_of_ds(-1))
        plgpu.barrier_wait(keys_loaded)
        sums = {
            name: plgpu.ACC((64, like.shape[-1]), jnp.float32)
            for name, like, made in (("dk", of.k, self.dk), ("dv", of.v, self.dv))
            if made is not None
        }
        sums = pl.run_scoped(functools.partial(self.all_steps, seen_by), **sums)
        if self.dq is not None:
            self.add_last_dq(num_steps)
            # The other warpgroup has read this one's keys for its columns of dq.
            plgpu.barrier_arrive(here.both)
            plgpu.barrier_wait(here.both)
        # This warpgroup's part of a tile that is read no more, and where it goes.
        places = {
            "dk": (here.k_tile, self.dk, self.scores.scale),
            "dv": (here.k_tile if here.v_tile is None else here.v_tile, self.dv, 1.0),
        }
        for name, made in sums.items():
            made_tile, target, factor = places[name]
            made_tile.at[mine][...] = (made * factor).astype(target.dtype)
        plgpu.commit_smem()
        for name in sums:
            made_tile, target, _ = places[name]
            plgpu.copy_smem_to_gmem(made_tile.at[mine], target.at[row, keys, key_head])

    def keys(self):
        """This warpgroup's, of the row."""
        _, _, tile = self.place()
        return pl.ds(tile * TILE_K + lax.axis_index("warpgroup") * 64, 64)

    def seen_by(self, row, keys) -> dict[str, Any]:
        """The spans of queries that see each of these keys: what `masked` is told."""
        first, last = (
            load(ref.at[row, keys], layout=PER_KEY, optimized=False)
            for ref in (self.operands.first, self.operands.last)
        )
        return dict(first=first, last=last)

    def own_tiles(self):
        """The tiles of queries, from and to, that see one of this warpgroup's keys.

        The other's may be of another document, or before these. Of log-normal documents 8% of the
        halves of steps are in vain, of files 2%, and left out (docs/kernels_record.md).
        """
        row, _, tile = self.place()
        place = len(Work._fields) + 2 * lax.axis_index("warpgroup")
        return tuple(self.operands.visits[row, tile, place + i] for i in range(2))

    def add_last_dq(self, num_steps):
        pl.when(num_steps > 0)(lambda: self.add_dq(num_steps - 1, self.last_head_and_tile()))

    def last_head_and_tile(self):
        """Of the last step, if there is one."""
        work = self.work()
        return self.first_head() + self.group - 1, work.tile(work.num - 1)

    def mine(self):
        """This warpgroup's keys of the tile."""
        return pl.ds(lax.axis_index("warpgroup") * 64, 64)

    def all_steps(self, seen_by, **sums):
        # What is handed on: where the dq of a step is added, of the first one's zeros in its place.
        first = self.first_head(), self.work().tile(jnp.int32(0))
        own_tiles = None if self.part.is_wide else self.own_tiles()
        step = functools.partial(self.step, seen_by=seen_by, own_tiles=own_tiles, **sums)
        self.over_steps(step, first)
        return {name: made[...] for name, made in sums.items()}

    def step(self, i, head_and_tile, *, handed, is_whole: bool, seen_by, own_tiles, dk, dv):
        """own_tiles: if given, other tiles are passed by."""
        here, mine = self.here, self.mine()
        q_slot = self.slot_of_step(i, self.part.stages)
        grad_slot = self.slot_of_step(i, self.part.grad_stages)
        q_tile, grad_tile = here.q_tiles.at[q_slot], here.grad_tiles.at[grad_slot]
        lse_tile, dtype = here.lse_tiles.at[q_slot], self.operands.q.dtype
        plgpu.barrier_wait(here.q_loaded.at[q_slot])
        plgpu.barrier_wait(here.grad_loaded.at[grad_slot])

        def issue(scores, dp):
            if self.scores.cap is None:
                begin = begin_of(lse_tile)
                # At head size 64 of what scores begin with, before p and dp take registers.
                if self.part.is_wide and not is_whole:
                    begin = self.masked(begin, head_and_tile, seen_by=seen_by, hidden=HIDDEN)
                scores[...] = begin
            dp[...] = begin_of(here.seen_tiles.at[grad_slot])
            plgpu.wgmma(scores, here.k_tile.at[mine], q_tile.transpose((1, 0)))
            plgpu.wgmma(dp, here.v_tile.at[mine], grad_tile.transpose((1, 0)))
            products = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            # At head size 64 products have the mask in them.
            mask = dict(is_whole=is_whole or self.part.is_wide, seen_by=seen_by)
            p, slope = self.weights(products, head_and_tile, lse_tile=lse_tile, **mask)
            plgpu.wgmma(dv, p.astype(dtype), grad_tile)
            dp = plgpu.wgmma_accumulator_load(dp, wait_n=1)
            ds = ((p if slope is None else p * slope) * dp).astype(dtype)
            if self.dq is not None:
                self.hand_over(ds, self.slot_of_ds(i))
                self.add_dq(i - 1, handed, beside=lambda: plgpu.wgmma(dk, ds, q_tile))
            else:
                plgpu.wgmma(dk, ds, q_tile)
            plgpu.wgmma_wait(0)

        def make():
            tile = plgpu.ACC((64, self.part.num_queries), jnp.float32)
            pl.run_scoped(issue, tile, tile)

        def pass_by():
            # Both make dq of what both have, and that of the step before is still to be added.
            if self.dq is not None:
                self.hand_over(zeros(self.part.num_queries, dtype), self.slot_of_ds(i))
                self.add_dq(i - 1, handed)

        if is_whole or own_tiles is None:
            make()
        else:
            (_, tile), (begin, end) = head_and_tile, own_tiles
            lax.cond((tile >= begin) & (tile < end), make, pass_by)
        plgpu.barrier_arrive(here.q_used.at[q_slot])
        plgpu.barrier_arrive(here.grad_used.at[grad_slot])
        return head_and_tile

    def weights(self, products, head_and_tile, *, lse_tile, is_whole: bool, seen_by):
        """As that of `Scores`, with a mask unless all is seen."""
        begin = None if self.scores.cap is None else begin_of(lse_tile)
        p, slope = self.scores.weights(products, begin)
        if not is_whole:
            p = self.masked(p, head_and_tile, seen_by=seen_by, hidden=0.0)
        return p, slope

    def masked(self, values, head_and_tile, *, seen_by, hidden: float):
        """Of keys and a tile of queries, `hidden` where a query does not see a key."""
        first_query = head_and_tile[1] * self.part.num_queries
        limits = {name: limit - first_query for name, limit in seen_by.items()}
        return masked(values, **limits, hidden=hidden)

    def queries(self, tile):
        return pl.ds(tile * self.part.num_queries, self.part.num_queries)

    def hand_over(self, ds, slot):
        """Gives this warpgroup's ds of a tile of queries to both."""
        if self.here.ds_used is not None:
            plgpu.barrier_wait(self.here.ds_used.at[slot])
        self.here.ds_tiles.at[slot, self.mine()][...] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.here.ds_made.at[slot])

    def add_dq(self, i, head_and_tile, *, beside=None):
        """Adds this warpgroup's part of dq of the ith step to that of a head's tile of queries.

        i: -1 adds zeros, to the first step's. beside: issues a product that runs meanwhile.
        """
        here, (row, _, _), (head, tile) = self.here, self.place(), head_and_tile
        warpgroup, part = lax.axis_index("warpgroup"), self.part
        dq_tile = here.dq_tile.at[warpgroup]
        num_queries = flash_dq_sums.NUM_QUERIES
        num_columns = part.num_dq_columns(self.operands.k.shape[-1])
        columns = pl.ds(0 if part.is_wide else warpgroup * num_columns, num_columns)
        slot = self.slot_of_ds(i)
        plgpu.barrier_wait(here.ds_made.at[slot])

        def product(ref):
            ds_tile = here.ds_tiles.at[slot]
            if part.is_wide:
                ds_tile = ds_tile.at[:, pl.ds(warpgroup * num_queries, num_queries)]
            plgpu.wgmma(ref, ds_tile.transpose((1, 0)), here.k_tile.at[:, columns])
            if beside is None:
                return ref[...]
            beside()
            return plgpu.wgmma_accumulator_load(ref, wait_n=1)

        dq = pl.run_scoped(product, plgpu.ACC((num_queries, num_columns), jnp.float32))
        if here.ds_used is not None:
            plgpu.barrier_arrive(here.ds_used.at[slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        dq_tile[...] = flash_dq_sums.as_held(dq)
        plgpu.commit_smem()
        place = (WARPGROUPS * tile + warpgroup, 0) if part.is_wide else (tile, warpgroup)
        plgpu.copy_smem_to_gmem(dq_tile, self.dq.at[row, head, *place], reduction_op="add")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scratch:
    """Shared memory and barriers of `OfKeys`."""

    k_tile: Any
    q_tiles: Any
    grad_tiles: Any
    lse_tiles: Any
    seen_tiles: Any
    keys_loaded: Any
    q_loaded: Any
    grad_loaded: Any
    q_used: Any
    grad_used: Any
    v_tile: Any = None
    ds_tiles: Any = None
    dq_tile: Any = None
    ds_made: Any = None
    ds_used: Any = None
    both: Any = None


def begin_of(ref):
    """What sums over the head begin with: of each query the same for all keys."""
    values = load(ref, layout=PER_QUERY)
    tile = lax.broadcast_in_dim(values, (64, *values.shape), [1])
    return plgpu.layout_cast(tile, plgpu.Layout.WGMMA)
