"""How a forward pass is run: dtypes, what is saved for the backward pass, unrolling, attention."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxscale.config import AsyncTensor, Attention, Balance, Dtype, Exchange, Norm, Remat
from jaxscale.ops.delayed import Meters
from jaxscale.ops.fp8 import Fp8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """None of it changes what is computed, but for rounding."""

    dtype: Dtype = Dtype.BFLOAT16
    # Of the sum of a block's weight gradients over devices, if wider than `dtype`.
    reduce_dtype: Dtype = Dtype.BFLOAT16
    # Which products with weights are made in 8 bits; None: none.
    fp8: Fp8 | None = None
    # Of the layer that runs, with delayed scales; put in by `ops/layers.py`.
    meters: Meters = dataclasses.field(default_factory=lambda: Meters({}), compare=False)
    remat: Remat = Remat.NONE
    # So many of a stack's layers, the first ones, take `remat.leaner`, where all are unrolled.
    leaner_layers: int = 0
    # Weights gathered for the forward pass are kept for the backward pass.
    keep_gathered: bool = False
    # Parts of the weights' gradients are summed over copies of the weights, once they are
    # reduce-scattered: HSDP.
    sums_parts: bool = False
    # Layers in one iteration of the loop over layers; as many as there are: no loop.
    scan_unroll: int = 1
    # Barriers keep XLA from keeping more than `remat` says; `ops/layers.py` finds out.
    is_lean: bool = False
    # Nothing keeps XLA from keeping all that the backward pass reads; found out there too.
    is_rich: bool = False
    attention: Attention = Attention.AUTO
    # Of the residual stream; inference stays with XLA's.
    norm: Norm = Norm.XLA
    # How attention brings together a sequence that is split (`ops/context.py`), and how it is dealt
    # to the devices, but for all-to-all (`ops/deal.py`).
    exchange: Exchange = Exchange.ALL_TO_ALL
    balance: Balance = Balance.HEAD_TAIL
    # Layers run on parts of the rows: each device's in a ring (`ops/ring.py`), or two halves of its
    # own (`ops/halves.py`).
    async_tensor: AsyncTensor = AsyncTensor.OFF
    # Weights come gathered and cast, one set for all parts.
    is_gathered: bool = False
    # The most documents that a row may hold.
    max_documents: int = 32
    # The same bits each time, on a GPU too: gradients are not added atomically.
    deterministic: bool = False
    # Tells of the hidden states behind each layer whether they are finite.
    watches_finite: bool = False
    # Of the devices it will run on, which need not be here: a step can be compiled for others.
    platform: str = dataclasses.field(default_factory=jax.default_backend)
    compute_capability: str = "9.0"

    @property
    def gradient_dtype(self) -> jnp.dtype:
        """In which a block's weight gradients leave their products and are summed over devices."""
        narrow, wide = jnp.dtype(self.dtype), jnp.dtype(self.reduce_dtype)
        return wide if wide.itemsize > narrow.itemsize else narrow
