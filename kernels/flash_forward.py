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

# Of 65,536 a multiprocessor has; 128 threads a warpgroup.
REGISTERS, REGISTERS_TO_COPY = 240, 24

LOG2_E = math.log2(math.e)
# A score that is not seen, and what the largest score of a query begins with: finite, as a query
# may see no key of a tile, and apart, so that p of what is not seen is 0 then too. (Were both the
# same, p would be 2 to the rounding error of a product of 1e30: infinite for some scales.)
HIDDEN, LOWEST = -1e30, -1e20
PER_QUERY = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Of a program."""

    # That compute, 64 queries each.
    warpgroups: int = WARPGROUPS
    keys: int = 128
    # Tiles of keys in shared memory: with 3, head size 128 needs 120 bytes too many.
    stages: int = 2
    # Heads one after the other: the next one's queries are loaded meanwhile.
    heads: int = 1
    registers: int = REGISTERS
    # Whether warpgroups take turns to begin products.
    turns: bool = False

    @property
    def queries(self) -> int:
        return 64 * self.warpgroups

    @property
    def q_slots(self) -> int:
        """Of queries in shared memory, for each warpgroup."""
        return 1 if self.heads == 1 else 2


# What is timed beside what stands, by head size (drafts: keep one and delete the others).
VARIANTS: dict[int, Tiles] = {}


def tiles_of(head_size: int) -> Tiles:
    """Sums of 64 queries times 256 take 128 registers: beside them 128 scores a query do not fit,
    nor 128 keys and values in shared memory."""
    return VARIANTS.get(head_size, Tiles(keys=128 if head_size <= 192 else 64))


def forward(q_BSNH, k_BTKH, v_BTKV, *, spans: Spans, scale: float, cap: float | None = None):
    """(output [B, S, N, V], log-sum-exp float32 [B, N, S]): 0 and -inf where a query sees nothing.

    bfloat16; S a multiple of 128, and T; H and V a pair of `flash_attention.HEAD_SIZES`. cap:
    scores become cap * tanh(score / cap).
    """
    rows, seq, num_heads, head_size = q_BSNH.shape
    num_keys, v_head_size = k_BTKH.shape[1], v_BTKV.shape[-1]
    tiles = tiles_of(head_size)
    if num_heads % tiles.heads:
        tiles = dataclasses.replace(tiles, heads=1)
    spans = spans.padded(-seq % tiles.queries)
    padded_seq = spans.first_BS.shape[1]
    visits = tiles_of_keys(spans, num_keys=num_keys, tile_q=tiles.queries, tile_k=tiles.keys)
    # One tile at least, so that there always is a first one.
    begin = jnp.minimum(visits.begin, num_keys // tiles.keys - 1)
    visits = visits._replace(begin=begin, end=jnp.maximum(visits.end, begin + 1))

    def operand(*shape):
        tiled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM(shape, q_BSNH.dtype, transforms=tiled)

    num_q_tiles = tiles.warpgroups * tiles.q_slots
    q_tile = operand(num_q_tiles, 64, head_size)
    if v_head_size != head_size:
        q_tile = plgpu.RefUnion(q_tile, operand(num_q_tiles, 64, v_head_size))
    loaded = plgpu.Barrier(num_barriers=tiles.stages)
    used = plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=tiles.stages)

    # Its name is the kernel's, in programs and traces.
    def flash_attention_forward(*refs, **scratch):
        group = num_heads // k_BTKH.shape[2]
        program = _Program(*refs, **scratch, tiles=tiles, group=group, scale=scale, cap=cap)
        run(program, warpgroups=tiles.warpgroups)

    kernel = plgpu.kernel(
        flash_attention_forward,
        out_type=[
            jax.ShapeDtypeStruct((rows, seq, num_heads, v_head_size), q_BSNH.dtype),
            jax.ShapeDtypeStruct((rows, num_heads, padded_seq), jnp.float32),
        ],
        scratch_types=dict(
            q_tile=q_tile,
            k_tiles=operand(tiles.stages, tiles.keys, head_size),
            v_tiles=operand(tiles.stages, tiles.keys, v_head_size),
            lse_tile=plgpu.SMEM((tiles.warpgroups, 64), jnp.float32),
            q_loaded=plgpu.Barrier(num_barriers=num_q_tiles),
            q_used=plgpu.Barrier(num_arrivals=tiles.warpgroups),
            turn=plgpu.Barrier(num_barriers=tiles.warpgroups),
            k_loaded=loaded,
            v_loaded=loaded,
            k_used=used,
            v_used=used,
        ),
        grid=(num_heads // tiles.heads, padded_seq // tiles.queries, rows),
        grid_names=("heads", "tile", "row"),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    # Without the barrier XLA runs the kernel twice in a scan: once more in a fusion of its own that
    # writes what is kept for the backward pass into the stack.
    out_BSNV, lse_BNS = lax.optimization_barrier(
        kernel(q_BSNH, k_BTKH, v_BTKV, *spans, visits.stacked())
    )
    return out_BSNV, lse_BNS[..., :seq]


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
    turn: Any
    k_loaded: Any
    v_loaded: Any
    k_used: Any
    v_used: Any
    tiles: Tiles
    group: int
    scale: float
    cap: float | None

    def place(self):
        """(row, first head, tile of queries); the last tiles see most keys, and begin first."""
        last = self.first.shape[1] // self.tiles.queries - 1
        head = lax.axis_index("heads") * self.tiles.heads
        return lax.axis_index("row"), head, last - lax.axis_index("tile")

    def q_and_out_tiles(self):
        """The output takes the place of the queries."""
        return (self.q_tile, self.q_tile) if self.v.shape == self.k.shape else self.q_tile

    def q_slot(self, head):
        """Of this warpgroup's queries, of this program's head."""
        slots = self.tiles.q_slots
        slot = lax.rem(head, slots) if slots > 1 else 0
        return lax.axis_index("warpgroup") * slots + slot

    def queries(self):
        """This warpgroup's."""
        *_, tile = self.place()
        return pl.ds(tile * self.tiles.queries + lax.axis_index("warpgroup") * 64, 64)

    def work(self) -> Work:
        row, _, tile = self.place()
        return Work(*(self.visits[row, tile, i] for i in range(4)))

    def copy(self):
        """Loads the tiles of keys and values, `stages` ahead at most."""
        plgpu.set_max_registers(REGISTERS_TO_COPY, action="decrease")
        work, (row, head, _) = self.work(), self.place()
        stages, num_keys = self.tiles.stages, self.tiles.keys

        @pl.loop(0, self.tiles.heads * work.num)
        def load_tile(n):
            slot = lax.rem(n, stages)
            tile, key_head = work.tile(n), lax.div(head, self.group)
            if self.tiles.heads > 1:
                tile = work.tile(lax.rem(n, work.num))
                key_head = lax.div(head + lax.div(n, work.num), self.group)
            keys = (row, pl.ds(tile * num_keys, num_keys), key_head)
            is_reused = n >= stages
            pl.when(is_reused)(lambda: plgpu.barrier_wait(self.k_used.at[slot]))
            plgpu.copy_gmem_to_smem(self.k.at[keys], self.k_tiles.at[slot], self.k_loaded.at[slot])
            pl.when(is_reused)(lambda: plgpu.barrier_wait(self.v_used.at[slot]))
            plgpu.copy_gmem_to_smem(self.v.at[keys], self.v_tiles.at[slot], self.v_loaded.at[slot])

    def load_queries(self, head):
        row, first_head, _ = self.place()
        slot = self.q_slot(head)
        queries = self.q.at[row, self.queries(), first_head + head]
        q_tiles, _ = self.q_and_out_tiles()
        plgpu.copy_gmem_to_smem(queries, q_tiles.at[slot], self.q_loaded.at[slot])

    def compute(self):
        plgpu.set_max_registers(self.tiles.registers, action="increase")
        row, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")
        self.load_queries(0)
        first, last = (
            load(ref.at[row, self.queries()], layout=PER_QUERY, optimized=False)
            for ref in (self.first, self.last)
        )
        if self.tiles.turns:
            is_last = warpgroup == self.tiles.warpgroups - 1
            pl.when(is_last)(lambda: plgpu.barrier_arrive(self.turn.at[0]))
        one_head = functools.partial(self.one_head, first=first, last=last)
        if self.tiles.heads == 1:
            one_head(0)
        else:
            pl.loop(0, self.tiles.heads)(one_head)
        plgpu.wait_smem_to_gmem(0)

    def one_head(self, head, *, first, last):
        row, first_head, _ = self.place()
        warpgroup, slot = lax.axis_index("warpgroup"), self.q_slot(head)
        plgpu.barrier_wait(self.q_loaded.at[slot])
        outputs = plgpu.ACC((64, self.v.shape[-1]), jnp.float32)
        out, largest, total = pl.run_scoped(
            functools.partial(self.all_tiles, head=head, first=first, last=last), outputs
        )
        sees = last > first
        total = jnp.where(sees, total, 1.0)
        out *= by_row(jnp.where(sees, 1.0 / total, 0.0), out)
        if self.v.shape != self.k.shape:
            # The other warpgroup's queries may lie where this one's output comes.
            plgpu.barrier_arrive(self.q_used)
            plgpu.barrier_wait(self.q_used)
        out_tile, lse_tile = self.q_and_out_tiles()[1].at[slot], self.lse_tile.at[warpgroup]
        out_tile[...] = out.astype(self.out.dtype)
        lse_tile[...] = jnp.where(sees, largest / LOG2_E + jnp.log(total), -jnp.inf)
        plgpu.commit_smem()
        queries, head = self.queries(), first_head + head
        plgpu.copy_smem_to_gmem(out_tile, self.out.at[row, queries, head])
        plgpu.copy_smem_to_gmem(lse_tile, self.lse.at[row, head, queries])

    def load_next_queries(self, head):
        """Into the place of the head before, which has been written to memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(head + 1 < self.tiles.heads)(lambda: self.load_queries(head + 1))

    def all_tiles(self, out, *, head, first, last):
        """(the sum of p V, the largest score in powers of 2, the sum of p) of 64 queries."""
        work = self.work()
        softmax = functools.partial(self.softmax, first=first, last=last)
        stages, num_keys = self.tiles.stages, self.tiles.keys
        scores = plgpu.ACC((64, num_keys), jnp.float32)
        largest = plgpu.layout_cast(jnp.full((64,), LOWEST, jnp.float32), PER_QUERY)
        total = plgpu.layout_cast(jnp.zeros((64,), jnp.float32), PER_QUERY)
        # Tiles that this program's heads before have visited.
        before = head * work.num
        issue_scores = functools.partial(self.issue_scores, q_slot=self.q_slot(head))

        def first_scores(ref):
            issue_scores(ref, slot)
            return ref[...]

        slot = lax.rem(before, stages)
        plgpu.barrier_wait(self.k_loaded.at[slot])
        s = pl.run_scoped(first_scores, scores)
        plgpu.barrier_arrive(self.k_used.at[slot])
        p, largest, total, _ = softmax(s, (largest, total), keys=work.tile(0) * num_keys)
        plgpu.barrier_wait(self.v_loaded.at[slot])
        if self.tiles.heads > 1:
            self.load_next_queries(head)

        def step(i, carry, *, is_whole):
            p, *statistics = carry
            slot, slot_before = (lax.rem(before + n, stages) for n in (i, i - 1))
            plgpu.barrier_wait(self.k_loaded.at[slot])
            self.wait_for_turn()

            def beside_product(ref):
                issue_scores(ref, slot)
                plgpu.wgmma(out, p, self.v_tiles.at[slot_before])
                self.end_turn()
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
        slot = lax.rem(before + work.num - 1, stages)
        plgpu.wgmma(out, p, self.v_tiles.at[slot])
        sums = out[...]
        if self.tiles.heads > 1:
            # The last of a program is not waited for.
            plgpu.barrier_arrive(self.v_used.at[slot])
        return sums, largest, total

    def wait_for_turn(self):
        if self.tiles.turns:
            plgpu.barrier_wait(self.turn.at[lax.axis_index("warpgroup")])

    def end_turn(self):
        if self.tiles.turns:
            next_one = lax.rem(lax.axis_index("warpgroup") + 1, self.tiles.warpgroups)
            plgpu.barrier_arrive(self.turn.at[next_one])

    def issue_scores(self, ref, slot, *, q_slot):
        q_tile = self.q_and_out_tiles()[0].at[q_slot]
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
