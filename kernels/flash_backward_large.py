"""Flash attention's dk and dv for Hopper, at head sizes beyond 128: a kernel for each.

A warpgroup has no registers for the sums of both. The programs are those of `flash_backward_keys`,
without dq, but a step's last product, which adds to dk or dv, is issued in the next step: then it
is one wait with that step's scores, or runs beside exp (`LateSum`). On an H200 both passes are 2.7%
faster so at head size 256, and nothing is spilled (docs/kernels_record.md).

B rows, S queries, T keys, N query heads, K key heads, H head size, V head size of the values.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxscale.kernels import flash_backward_keys
from jaxscale.kernels.flash_backward_keys import OfKeys, Part, begin_of
from jaxscale.kernels.flash_scores import (
    LateSum,
    stages_of_late_sum,
)
from jaxscale.kernels.hopper import arrive_if, wait_if, zeros

# Of head size 256, 128 keys and values and two tiles of queries are 192 of 227 KiB: there is room
# for one of gradients, which are needed for dp alone and so not for long.
OF_KEYS = Part(name="flash_attention_backward_of_keys", has_dv=False, grad_stages=1)
OF_VALUES = Part(name="flash_attention_backward_of_values", has_dk=False)


def of_keys(operands, begins, **options: Any):
    """As that of `flash_backward_keys`: [dk, dv]."""
    make = functools.partial(flash_backward_keys.of_keys, operands, begins, dq=None, **options)
    stages = stages_of_late_sum(operands[0].shape[-1])
    for_keys = dataclasses.replace(OF_KEYS, stages=stages)
    for_values = dataclasses.replace(OF_VALUES, stages=stages, grad_stages=stages)
    return *make(part=for_keys, make=_OfKeys), *make(part=for_values, make=_OfValues)


class _Late(OfKeys):
    """Adds to one sum, and a step late: `late_step` returns what the next one multiplies with a
    tile of `added_tiles`."""

    late_step: Any
    added_tiles: Any

    def all_steps(self, seen_by, **sums):
        ((name, made),) = sums.items()
        nothing = zeros(self.part.num_queries, self.operands.q.dtype)
        step = functools.partial(self.late_step, seen_by=seen_by, made=made)
        last = self.over_steps(step, nothing)
        num_steps = self.num_steps()

        @pl.when(num_steps > 0)
        def add_last():
            plgpu.wgmma(made, last, self.added_tiles().at[self.slot(num_steps - 1)])
            plgpu.wgmma_wait(0)

        return {name: made[...]}

    def slots(self, i):
        """Of a step and of the one before; the first step adds zeros times its own tile."""
        return self.slot(i), self.slot(jnp.maximum(i - 1, 0))

    def slot(self, i):
        return self.slot_of_step(i, self.part.stages)

    def begin_scores(self, scores, slot):
        if self.scores.cap is None:
            scores[...] = begin_of(self.here.lse_tiles.at[slot])

    def issue_scores(self, scores, slot):
        q_tile = self.here.q_tiles.at[slot]
        plgpu.wgmma(scores, self.here.k_tile.at[self.mine()], q_tile.transpose((1, 0)))

    def tile(self):
        return plgpu.ACC((64, self.part.num_queries), jnp.float32)


class _OfKeys(_Late):
    """Three products: scores, dp and dk."""

    def added_tiles(self):
        return self.here.q_tiles

    def late_step(self, i, head_and_tile, *, handed, made, **mask):
        here, (slot, slot_before) = self.here, self.slots(i)
        lse_tile = here.lse_tiles.at[slot]
        grad_slot = self.slot_of_step(i, self.part.grad_stages)
        late = LateSum(
            add=lambda: plgpu.wgmma(made, handed, here.q_tiles.at[slot_before]),
            free=lambda: arrive_if(i > 0, here.q_used.at[slot_before]),
            stages=self.part.stages,
        )
        plgpu.barrier_wait(here.q_loaded.at[slot])

        def make_p(scores):
            self.begin_scores(scores, slot)
            products = late.products(scores, lambda: self.issue_scores(scores, slot))
            p, slope = self.weights(products, head_and_tile, lse_tile=lse_tile, **mask)
            return p if slope is None else p * slope

        def make_ds(dp, p):
            dp[...] = begin_of(here.seen_tiles.at[grad_slot])
            grad_tile = here.grad_tiles.at[grad_slot]
            plgpu.wgmma(dp, here.v_tile.at[self.mine()], grad_tile.transpose((1, 0)))
            late.wait_beside_dp()
            ds = p * plgpu.wgmma_accumulator_load(dp)
            plgpu.barrier_arrive(here.grad_used.at[grad_slot])
            return ds.astype(self.operands.q.dtype)

        p = pl.run_scoped(make_p, self.tile())
        plgpu.barrier_wait(here.grad_loaded.at[grad_slot])
        return pl.run_scoped(functools.partial(make_ds, p=p), self.tile())


class _OfValues(_Late):
    """Two products: scores and dv."""

    def added_tiles(self):
        return self.here.grad_tiles

    def late_step(self, i, head_and_tile, *, handed, made, **mask):
        here, (slot, slot_before) = self.here, self.slots(i)
        lse_tile = here.lse_tiles.at[slot]
        plgpu.barrier_wait(here.q_loaded.at[slot])
        wait_if(i == 0, here.grad_loaded.at[slot])

        def make_p(scores):
            self.begin_scores(scores, slot)
            self.issue_scores(scores, slot)
            plgpu.wgmma(made, handed, here.grad_tiles.at[slot_before])
            products = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            p, _ = self.weights(products, head_and_tile, lse_tile=lse_tile, **mask)
            return p.astype(self.operands.q.dtype)

        p = pl.run_scoped(make_p, self.tile())
        # Here, so that ptxas does not move the wait for dv before exp: over a branch it does not.
        wait_if(i > 0, here.grad_loaded.at[slot])
        plgpu.barrier_arrive(here.q_used.at[slot])
        plgpu.wgmma_wait(0)
        arrive_if(i > 0, here.grad_used.at[slot_before])
        return p
