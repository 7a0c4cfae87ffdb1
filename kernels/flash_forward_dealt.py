"""Flash attention for Hopper, forward, up to head size 128.

The programs are `flash_forward`'s, but go from tile to tile of queries, as `flash_dealt` deals them
out: the next one's queries, keys and values come while one ends. Without a cap most tiles of keys
need no maxima, and a tile of queries whose scores say that they did is made again.

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

from jaxscale.kernels.flash_dealt import Dealt, deal
from jaxscale.kernels.flash_forward import (
    REGISTERS_TO_COPY,
    Program,
    swizzled,
    tiles_of,
    visits_of,
)
from jaxscale.kernels.flash_spans import Spans
from jaxscale.kernels.hopper import load, run

# Tiles of queries, and what warpgroups tell each other of one. No warpgroup is two tiles ahead of
# another: a slot is loaded anew when all have given it back.
SLOTS = 2
# Of tiles of keys with a mask. While all of them needed maxima too head size 64 took 5% less of
# packed rows than with 1, and 128 the same (docs/kernels_record.md).
MASKED_COST = 1.5
EVERY_WARP = plgpu.Layout.WGMMA.reduce(0)  # each has all of a vector
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
    dealt = deal(visits, num_heads=num_heads, head_bytes=head_bytes, masked_cost=MASKED_COST)
    operand = functools.partial(swizzled, dtype=q_BSNH.dtype)
    loaded = plgpu.Barrier(num_barriers=tiles.stages)
    used = plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=tiles.stages)
    of_slots = plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=SLOTS)
    for_judgement: dict[str, Any] = dict(
        totals=plgpu.SMEM((SLOTS, tiles.warpgroups), jnp.float32), judged=of_slots
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
            k_used=used,
            v_used=used,
            **(for_judgement if tiles.keeps_reference else {}),
        ),
        grid=(dealt.num_programs,),
        grid_names=("program",),
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
    item: Any = None  # `Item`

    def place(self):
        return self.item[:3]

    def work(self):
        return self.item.work

    def at(self, n, item) -> "_Staying":
        """The program of one tile of queries, its nth."""
        slot = lax.rem(n, SLOTS)
        names = ("q_tile", "totals", "judged") if self.tiles.keeps_reference else ("q_tile",)
        own = {name: getattr(self, name).at[slot] for name in names}
        return dataclasses.replace(self, item=item, **own)

    def copy(self):
        plgpu.set_max_registers(REGISTERS_TO_COPY, action="decrease")

        def one(n, num_before):
            here, slot = self.at(n, self.dealt.item(n)), lax.rem(n, SLOTS)
            row, head, tile = here.place()
            pl.when(n >= SLOTS)(lambda: plgpu.barrier_wait(self.q_used.at[slot]))
            for warpgroup in range(self.tiles.warpgroups):
                queries = self.queries_of(tile, warpgroup)
                target = here.q_tile.at[warpgroup]
                plgpu.copy_gmem_to_smem(
                    self.q.at[row, queries, head], target, self.q_loaded.at[slot]
                )
            num_before = here.load_tiles(num_before)
            if not self.tiles.keeps_reference:
                return num_before
            return lax.fori_loop(0, here.num_repeats(), lambda _, n: here.load_tiles(n), num_before)

        lax.fori_loop(0, self.dealt.num(), one, jnp.int32(0))

    def compute(self):
        plgpu.set_max_registers(self.tiles.registers, action="increase")

        def one(n, carry):
            num_before, item = carry
            next_item = self.dealt.item(n + 1)
            here = self.at(n, item)
            row, head, tile = here.place()
            queries = self.queries_of(tile, lax.axis_index("warpgroup"))
            of_queries = self.spans_of(row, queries)
            plgpu.barrier_wait(self.q_loaded.at[lax.rem(n, SLOTS)])

            # The tile before has been stored by now.
            @pl.when(n > 0)
            def give_back():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(self.q_used.at[lax.rem(n - 1, SLOTS)])

            passes = functools.partial(here.passes, num_before=num_before, **of_queries)
            outputs = plgpu.ACC((64, self.v.shape[-1]), jnp.float32)
            *made, num_before = pl.run_scoped(passes, outputs)
            out_tile = here.q_tile.at[lax.axis_index("warpgroup")]
            finished = self.finished(made, **of_queries)
            self.store(*finished, out_tile=out_tile, place=(row, head, queries))
            return num_before, next_item

        lax.fori_loop(0, self.dealt.num(), one, (jnp.int32(0), self.dealt.item(0)))
        plgpu.wait_smem_to_gmem(0)

    def passes(self, out, *, num_before, **of_queries):
        """As `one_pass`, and how many tiles of keys were loaded up to its end.

        Where a sum of p says that the first tile's largest score was not enough, all warpgroups
        begin again, with maxima.
        """
        num_tiles = self.work().num

        def one_pass(num_before, **options):
            _, *statistics = self.one_pass(out, num_before=num_before, **options, **of_queries)
            last = lax.rem(num_before + num_tiles - 1, self.tiles.stages)
            plgpu.barrier_arrive(self.v_used.at[last])
            return statistics

        def again(_, statistics):
            del statistics
            out[...] = jnp.zeros_like(out[...])
            return one_pass(num_before + num_tiles)

        judge = self.judge if self.tiles.keeps_reference else None
        statistics, end = one_pass(num_before, judge=judge), num_before + num_tiles
        if judge is not None:
            repeats = self.num_repeats()
            # A loop, as a branch gives no arrays.
            statistics = lax.fori_loop(0, repeats, again, statistics)
            end += num_tiles * repeats
        return out[...], *statistics, end

    def judge(self, total):
        """Tells all warpgroups how large sums of p became without maxima.

        Each warp finds the largest of its warpgroup's by itself: what `total.max()` passes from
        warp to warp lies in one place for all warpgroups (jax 0.11.2), where they overwrote each
        other's, and runs of one program differed.
        """
        warpgroup = lax.axis_index("warpgroup")
        lse_tile = self.lse_tile.at[warpgroup]  # it has been stored by now
        lse_tile[...] = total
        self.totals[warpgroup] = load(lse_tile, layout=EVERY_WARP, optimized=False).max()
        plgpu.barrier_arrive(self.judged)

    def num_repeats(self):
        """1 if a warpgroup's sums of p were too large, else 0: waits for all of them."""
        plgpu.barrier_wait(self.judged)
        is_good = [self.totals[i] < MAX_TOTAL for i in range(self.tiles.warpgroups)]
        return 1 - functools.reduce(jnp.logical_and, is_good).astype(jnp.int32)
