"""Flash attention for Hopper, forward, up to head size 128.

The programs are `flash_forward`'s, but go from tile to tile of queries, as `flash_dealt` deals them
out: the next one's queries, keys and values come while one ends. Without a cap most tiles of keys
need no maxima, and tiles of queries whose scores say that they did are made again in the end, by
each program for itself.

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

from jaxscale.kernels.flash_dealt import Dealt, Item, deal
from jaxscale.kernels.flash_forward import (
    REGISTERS_TO_COPY,
    Program,
    swizzled,
    tiles_of,
    visits_of,
)
from jaxscale.kernels.flash_spans import Spans, Work
from jaxscale.kernels.hopper import PAIR, barrier_of_cluster, heads_together, load, run, wait_if

SLOTS = 2  # of tiles of queries
# Of tiles of keys with a mask. While all of them needed maxima too head size 64 took 5% less of
# packed rows than with 1, and 128 the same (docs/kernels_record.md).
MASKED_COST = 1.5
EVERY_WARP = plgpu.Layout.WGMMA.reduce(0)  # each has all of a vector
# Of the largest sums of p: 8 KiB, or 16 of four warpgroups. If a program makes more tiles some
# share one, and are made again together.
NOTES = 1024
# A sum of p beyond it is taken for an overflow: of 2**60 times a value 2**67 are left.
MAX_TOTAL = 2.0**60


def is_for(head_size: int, v_head_size: int) -> bool:
    """Whether two tiles of queries fit beside two of keys and values."""
    return head_size == v_head_size <= 128


def forward(q_BSNH, k_BTKH, v_BTKH, *, spans: Spans, scale: float, cap: float | None = None):
    """As `flash_forward.forward`, where `is_for`."""
    rows, seq, num_heads, head_size = q_BSNH.shape
    tiles = tiles_of(head_size, seq=seq, cap=cap)
    visits = visits_of(spans, num_keys=k_BTKH.shape[1], tiles=tiles)
    head_bytes = (k_BTKH.nbytes + v_BTKH.nbytes) // num_heads
    together = heads_together(num_heads, k_BTKH.shape[2], head_size=head_size)
    dealt = deal(
        visits,
        num_heads=num_heads,
        head_bytes=head_bytes,
        masked_cost=MASKED_COST,
        together=together,
    )
    operand = functools.partial(swizzled, dtype=q_BSNH.dtype)
    loaded = plgpu.Barrier(num_barriers=tiles.stages)
    all_here: dict[str, Any] = dict(num_arrivals=tiles.warpgroups)
    used = plgpu.Barrier(num_barriers=tiles.stages, **all_here)
    of_cluster = functools.partial(barrier_of_cluster, together, **all_here)
    of_slots = plgpu.Barrier(num_barriers=SLOTS, **all_here)
    for_judgement: dict[str, Any] = dict(
        totals=plgpu.SMEM((tiles.warpgroups, min(NOTES, dealt.num_turns)), jnp.float32),
        judged=plgpu.Barrier(**all_here),
        k_used_alone=used,
        v_used_alone=used,
    )

    def flash_attention_forward(*refs, **scratch):
        here = Dealt(refs[5], dealt.num_items)
        # No visits but those.
        refs, group = (*refs[:5], None, *refs[6:]), num_heads // k_BTKH.shape[2]
        program = _Staying(
            *refs, **scratch, group=group, scale=scale, cap=cap, tiles=tiles, dealt=here
        )
        run(program, tiles.warpgroups)

    kernel = plgpu.kernel(
        flash_attention_forward,
        out_type=[
            jax.ShapeDtypeStruct(q_BSNH.shape, q_BSNH.dtype),
            jax.ShapeDtypeStruct((rows, num_heads, seq), jnp.float32),
        ],
        scratch_types=dict(
            q_tile=operand(SLOTS, tiles.warpgroups, 64, head_size),
            k_tiles=operand(tiles.stages, tiles.num_keys, head_size),
            v_tiles=operand(tiles.stages, tiles.num_keys, head_size),
            lse_tile=plgpu.SMEM((tiles.warpgroups, 64), jnp.float32),
            q_loaded=of_slots,
            q_used=of_slots,
            k_loaded=loaded,
            v_loaded=loaded,
            k_used=of_cluster(num_barriers=tiles.stages),
            v_used=of_cluster(num_barriers=tiles.stages),
            done=of_cluster(),
            **(for_judgement if tiles.keeps_reference else {}),
        ),
        grid=(dealt.num_programs,),
        grid_names=("program",),
        cluster=(together,),
        cluster_names=(PAIR,),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    # As in `flash_forward`.
    return lax.optimization_barrier(kernel(q_BSNH, k_BTKH, v_BTKH, *spans, dealt.table))


@dataclasses.dataclass(frozen=True)
class _Staying(Program):
    """Tiles of keys are counted on from one tile of queries to the next."""

    _: dataclasses.KW_ONLY
    dealt: Dealt
    totals: Any = None
    judged: Any = None
    k_used_alone: Any = None
    v_used_alone: Any = None
    item: Any = None  # `Item`
    is_alone: bool = False

    def place(self):
        row, head, tile = self.item[:3]
        return row, head + lax.axis_index(PAIR), tile

    def work(self):
        return self.item.work

    def fetch(self, source, target, *, loaded):
        if not self.is_alone:
            return super().fetch(source, target, loaded=loaded)
        return plgpu.copy_gmem_to_smem(source, target, loaded)

    def nth(self, n) -> Item:
        """What it makes in its nth turn."""
        item = self.dealt.item(n)
        if not self.is_alone:
            return item
        # Tiles without a mask in the loop of the others: with two loops here all passes spilled, 28
        # bytes at head size 64.
        begin, end, *_ = item.work
        return item._replace(work=Work(begin, end, begin, begin))

    def alone(self) -> "_Staying":
        """The program that no longer waits for the others of its cluster."""
        used = dict(k_used=self.k_used_alone, v_used=self.v_used_alone)
        return dataclasses.replace(self, is_alone=True, **used)

    def at(self, number, item) -> "_Staying":
        """The program of one tile of queries, the so-and-so-manyth that is made."""
        return dataclasses.replace(self, item=item, q_tile=self.q_tile.at[lax.rem(number, SLOTS)])

    def copy(self):
        plgpu.set_max_registers(REGISTERS_TO_COPY, action="decrease")
        num, none = self.dealt.num(), jnp.int32(0)
        lax.fori_loop(0, num, lambda n, before: self.load_one(n, before, number=n), none)
        if self.tiles.keeps_reference:
            plgpu.barrier_wait(self.judged)
            self.for_repeats(self.alone().load_one)
        plgpu.barrier_wait(self.done)

    def load_one(self, n, num_before, *, number):
        """Its nth tile of queries, and their tiles of keys. number, num_before: as of `make`."""
        here, slot = self.at(number, self.nth(n)), lax.rem(number, SLOTS)
        row, head, tile = here.place()
        wait_if(number >= SLOTS, self.q_used.at[slot])
        for warpgroup in range(self.tiles.warpgroups):
            queries, target = self.queries_of(tile, warpgroup), here.q_tile.at[warpgroup]
            plgpu.copy_gmem_to_smem(self.q.at[row, queries, head], target, self.q_loaded.at[slot])
        return here.load_tiles(num_before)

    def compute(self):
        plgpu.set_max_registers(self.tiles.registers, action="increase")

        def one(n, carry):
            num_before, item = carry
            next_item = self.dealt.item(n + 1)
            judge = functools.partial(self.judge, n) if self.tiles.keeps_reference else None
            return self.make(item, num_before, number=n, judge=judge), next_item

        lax.fori_loop(0, self.dealt.num(), one, (jnp.int32(0), self.dealt.item(0)))
        plgpu.barrier_arrive(self.done)
        plgpu.wait_smem_to_gmem(0)
        if self.tiles.keeps_reference:
            plgpu.barrier_arrive(self.judged)
            plgpu.barrier_wait(self.judged)
            alone = self.alone()

            def again(n, num_before, *, number):
                return alone.make(alone.nth(n), num_before, number=number)

            self.for_repeats(again)
            plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_wait(self.done)

    def make(self, item, num_before, *, number, judge=None):
        """Output and log-sum-exp of a tile of queries.

        number: of those that this program made before. num_before: of tiles of keys; returns it
        with these.
        """
        here, slot = self.at(number, item), lax.rem(number, SLOTS)
        row, head, tile = here.place()
        warpgroup = lax.axis_index("warpgroup")
        queries = self.queries_of(tile, warpgroup)
        of_queries = self.spans_of(row, queries)
        plgpu.barrier_wait(self.q_loaded.at[slot])

        # The tile before has been stored by now.
        @pl.when(number > 0)
        def give_back():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.q_used.at[lax.rem(number - 1, SLOTS)])

        one_pass = functools.partial(
            here.one_pass, judge=judge, num_before=num_before, **of_queries
        )
        made = pl.run_scoped(one_pass, plgpu.ACC((64, self.v.shape[-1]), jnp.float32))
        num_before += here.work().num
        plgpu.barrier_arrive(self.v_used.at[lax.rem(num_before - 1, self.tiles.stages)])
        finished = self.finished(made, **of_queries)
        self.store(*finished, out_tile=here.q_tile.at[warpgroup], place=(row, head, queries))
        return num_before

    def judge(self, n, total):
        """Notes how large sums of p became without maxima, of this program's nth tile.

        Each warp finds the largest of its warpgroup's by itself: what `total.max()` passes from
        warp to warp lies in one place for all warpgroups (jax 0.11.2), where they overwrote each
        other's, and runs of one program differed.
        """
        warpgroup = lax.axis_index("warpgroup")
        lse_tile = self.lse_tile.at[warpgroup]  # it has been stored by now
        lse_tile[...] = total
        largest = load(lse_tile, layout=EVERY_WARP, optimized=False).max()
        num_notes = self.totals.shape[1]
        noted = self.totals.at[warpgroup, lax.rem(n, num_notes)]
        if num_notes < self.dealt.num_turns:
            largest = jnp.where(n < num_notes, largest, jnp.maximum(largest, noted[...]))
        noted[...] = largest

    def for_repeats(self, body):
        """`body(n, num_before, number=)` for those of this program's tiles whose sums of p were too
        large; slots of keys are counted from the first again."""
        num = self.dealt.num()

        def one(n, carry):
            note = lax.rem(n, self.totals.shape[1])
            is_good = [self.totals[i, note] < MAX_TOTAL for i in range(self.tiles.warpgroups)]
            repeats = 1 - functools.reduce(jnp.logical_and, is_good).astype(jnp.int32)

            def again(_, carry):
                num_before, number = carry
                return body(n, num_before, number=number), number + 1

            # A loop, as a branch gives no arrays.
            return lax.fori_loop(0, repeats, again, carry)

        lax.fori_loop(0, num, one, (jnp.int32(0), num))
