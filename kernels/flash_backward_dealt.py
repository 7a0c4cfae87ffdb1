"""Flash attention's dk and dv for Hopper, and dq unless it is made by itself, at head size 64.

Without a cap: with one, `flash_backward_keys` makes them.

The programs are those of `flash_backward_keys`, `WIDE`, but go from tile to tile of keys, as
`flash_dealt` deals them out: keys and values lie twice in shared memory, and the next one's come,
with its first tiles of queries, while one ends. Masks go by the spans of queries.

B rows, S queries, T keys, N query heads, K key heads, H head size.
"""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxscale.kernels.flash_backward_keys import (
    PER_QUERY,
    REGISTERS,
    REGISTERS_TO_COPY,
    TILE_K,
    WIDE,
    OfKeys,
    compiler_params,
    scratch_of,
)
from jaxscale.kernels.flash_dealt import Dealt, Item, deal
from jaxscale.kernels.flash_scores import Scores
from jaxscale.kernels.flash_spans import Pairs, tiles_seen
from jaxscale.kernels.hopper import WARPGROUPS, by_column, load, run, wait_if

SLOTS = 2  # tiles of keys
# Without what dq takes.
WIDE_ALONE = dataclasses.replace(WIDE, stages=3, grad_stages=3)


def of_keys(operands, begins, *, pairs: Pairs, scores: Scores, dq):
    """As that of `flash_backward_keys`: [dk, dv], and dq in a reference, unless None."""
    has_dq = dq is not None
    part = WIDE if has_dq else WIDE_ALONE
    q_BSNH, k_BTKH, v_BTKH, _ = operands
    num_key_heads = k_BTKH.shape[2]
    group, tile_q = q_BSNH.shape[2] // num_key_heads, part.num_queries
    spans, seq = pairs.queries_of_keys, q_BSNH.shape[1]
    visits = tiles_seen(spans, size=TILE_K, num_seen=seq, seen_size=tile_q)
    # One tile at least: the zeros before the first step are waited for in it.
    visits = visits.one_at_least(seq // tile_q)
    # Queries, their gradients, and dq in float32; without dq too, as tiles of twice as many heads
    # together took 0 to 1.7% longer both ways on an H200 (docs/kernels_record.md).
    head_bytes = 4 * q_BSNH.nbytes // num_key_heads
    dealt = deal(visits, num_heads=num_key_heads, head_bytes=head_bytes)

    def flash_attention_backward(*refs, keys_used, **scratch):
        read, table, made = refs[:8], refs[8], refs[9:]
        options = dict(part=part, group=group, scores=scores, has_dq=has_dq)
        program = _Staying(*read, None, *made, **options, **scratch)
        program.dealt, program.keys_used = Dealt(table, dealt.num_items), keys_used
        run(program)

    kernel = plgpu.kernel(
        flash_attention_backward,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_BTKH, v_BTKH)],
        scratch_types=dict(
            **scratch_of(operands, part=part, has_dq=has_dq, slots=(SLOTS,)),
            keys_used=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=SLOTS),
        ),
        grid=(dealt.num_programs,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=compiler_params(has_dq=has_dq),
    )
    added_to = (dq,) if has_dq else ()
    return kernel(*operands, *begins, *pairs.keys_of_queries, dealt.table, *added_to)


class _Staying(OfKeys):
    """Steps, and tiles of ds, are counted on from one tile of keys to the next."""

    dealt: Dealt
    keys_used: Any
    item: Item

    def place(self):
        return self.item[:3]

    def at(self, n, first_step) -> "_Staying":
        """The program of its nth tile of keys."""
        program, slot = copy.copy(self), lax.rem(n, SLOTS)
        program.item = self.dealt.item(n)
        program.remembered = program.item.work
        # Each tile of keys before had one of ds more than steps.
        program.first_step, program.first_ds = first_step, first_step + n + 1
        tiles = {name: getattr(self.here, name).at[slot] for name in ("k_tile", "v_tile")}
        program.here = dataclasses.replace(self.here, **tiles)
        return program

    def seen_by(self, row, keys):
        """Nothing, as `masked` goes by queries."""
        return {}

    def masked(self, values, head_and_tile, *, seen_by, hidden):
        """By the keys that each query sees. Spans of the queries that see each key would be kept in
        registers, of which none are left: with them rows of one document took 3 to 6% longer on an
        H200, log-normal ones 1.6% less (docs/kernels_record.md)."""
        row, _, _ = self.place()
        queries = self.queries(head_and_tile[1])
        first, last = (
            load(ref.at[row, queries], layout=PER_QUERY, optimized=False)
            for ref in (self.operands.first, self.operands.last)
        )
        key = self.keys().start
        key += plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
        # One comparison instead of two.
        behind = (key - by_column(first, values)).astype(jnp.uint32)
        num = by_column((last - first).astype(jnp.uint32), values)
        return jnp.where(behind < num, values, hidden)

    def copy(self):
        plgpu.set_max_registers(REGISTERS_TO_COPY, action="decrease")

        def one(n, first_step):
            program, slot = self.at(n, first_step), lax.rem(n, SLOTS)
            wait_if(n >= SLOTS, self.keys_used.at[slot])
            program.load(self.here.keys_loaded.at[slot])
            return first_step + program.num_steps()

        lax.fori_loop(0, self.dealt.num(), one, jnp.int32(0))

    def compute(self):
        plgpu.set_max_registers(REGISTERS, action="increase")
        self.offer_ds()

        def one(n, first_step):
            program, slot = self.at(n, first_step), lax.rem(n, SLOTS)
            program.make(self.here.keys_loaded.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.keys_used.at[slot])
            return first_step + program.num_steps()

        lax.fori_loop(0, self.dealt.num(), one, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def add_last_dq(self, num_steps):
        self.add_dq(num_steps - 1, self.last_head_and_tile())
