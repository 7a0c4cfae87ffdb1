"""What the programs of flash attention's backward pass share: scores, and what they read.

B rows, N query heads, S queries.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxscale.kernels.flash_forward import LOG2_E
from jaxscale.kernels.flash_spans import Work

STAGES = 2  # tiles of queries in shared memory, or of keys


@dataclasses.dataclass(frozen=True)
class Scores:
    """How a program makes scores of products of queries and keys."""

    scale: float
    cap: float | None

    def begin(self, lse_BNS):
        """What a program subtracts of them: where sums begin, which are multiplied by the scale
        after it, but for scores with a cap, which are then powers of 2."""
        return -lse_BNS / self.scale if self.cap is None else -lse_BNS * LOG2_E

    def weights(self, products, begin=None):
        """(p, what d of scores is to be multiplied by or None).

        begin: in the shape of products, unless it is in them, as with a cap it cannot be.
        """
        if self.cap is None:
            factor = self.scale * LOG2_E
            powers = products * factor
            return jnp.exp2(powers if begin is None else powers + begin * factor), None
        tanh = jnp.tanh(products * (self.scale / self.cap))
        return jnp.exp2(tanh * (self.cap * LOG2_E) + begin), 1.0 - tanh * tanh


@dataclasses.dataclass(frozen=True)
class Operands:
    """The references of what the programs read."""

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

    def work(self, row, tile) -> Work:
        return Work(*(self.visits[row, tile, i] for i in range(4)))


def stages_of_late_sum(head_size: int) -> int:
    """As `STAGES`, where sums are added to a step late: three if there is room for them."""
    return 3 if head_size <= 192 else STAGES


@dataclasses.dataclass(frozen=True, kw_only=True)
class LateSum:
    """The product of the step before, which adds to a sum in this one.

    add: issues it. free: gives back the tile that it reads, one of so many stages. Of three it may
    wait, and the product runs beside this step's exp, or ds. Of two, the next one would begin its
    way half a step later so, and both passes take 6.5% longer at head size 256 on an H200: it goes
    ahead of this step's scores, and the tile is free as soon as can be. With three both passes take
    1.4% less at 192/128, and 1.9% in runs that must repeat to the bit at 128
    (docs/kernels_record.md).
    """

    add: Callable[[], None]
    free: Callable[[], None]
    stages: int

    @property
    def may_wait(self) -> bool:
        return self.stages > STAGES

    def products(self, scores, issue: Callable[[], None]):
        """Those of queries and keys, which `issue` adds to scores."""
        if self.may_wait:
            issue()
            self.add()
            return plgpu.wgmma_accumulator_load(scores, wait_n=1)
        self.add()
        issue()
        products = plgpu.wgmma_accumulator_load(scores)
        self.free()
        return products

    def wait_beside_dp(self):
        """Behind exp and the issue of the product that makes dp."""
        if self.may_wait:
            plgpu.wgmma_wait(1)
            self.free()
