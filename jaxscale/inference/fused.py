"""The layers of Llama's family for one text's next token, in the one launch each of kernels/decode.

Continuing one text reads every weight for each token, and at that rate the launches between the
reads count: XLA's 18 a layer take 55% of the time (1.5 B, one H200).

D model, K key heads, T tokens that can be kept, H head size.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.kernels import decode
from jaxscale.models import decoder, llama
from jaxscale.ops.execution import Execution
from jaxscale.ops.kept import Kept

# The matrices whose inputs the models have first and the program last.
TURNED = ("qkv", "gate", "up")


def objection(
    model: decoder.Config, *, execution: Execution, num_devices: int, num_cores: int
) -> str | None:
    """Why `Layers` cannot stand for the model's own blocks, or None."""
    if not isinstance(model, llama.Config):
        return "it is for the blocks of Llama, Mistral, Qwen 2 and Qwen 3"
    if num_devices > 1:
        return f"it is for one device, not {num_devices}"
    if jnp.dtype(execution.dtype) != jnp.bfloat16:
        return f"it takes bfloat16, not {execution.dtype.value}"
    return decode.supported(
        platform=execution.platform,
        compute_capability=execution.compute_capability,
        num_cores=num_cores,
        head_size=model.head_dim(),
        num_kv_heads=model.num_kv_heads,
    )


@dataclasses.dataclass
class Layers:
    """Runs a token's layers, one after the other, as `llama.block` does.

    counter: that of kernels/decode, which goes from layer to layer. num_cores: of the GPU.
    """

    num_cores: int
    counter: Any = dataclasses.field(default_factory=lambda: jnp.zeros((1,), jnp.int32))

    def block(self, x_11D, weights: llama.Block, shared, execution: Execution):
        """(x, no aux) of the next token of one slot."""
        (cos_11h, sin_11h), kept = shared
        assert isinstance(kept, Kept) and kept.fresh is None and x_11D.shape[:2] == (1, 1)
        x_D, keys_KTH, values_KTH, self.counter = decode.layer(
            x_11D[0, 0],
            _weights(weights),
            keys_KTH=kept.keys[0],
            values_KTH=kept.values[0],
            place=kept.positions_BS[0],
            cos_sin=(cos_11h[0, 0], sin_11h[0, 0]),
            counter=self.counter,
            num_cores=self.num_cores,
            eps=weights.c.norm_eps,
            window=weights.c.window,
        )
        kept.keys, kept.values = keys_KTH[None], values_KTH[None]
        return x_D[None, None], {}


def _weights(weights: llama.Block) -> decode.Weights:
    def optional(name: str):
        box = getattr(weights, name, None)
        return None if box is None else box[...]

    return decode.Weights(
        attention_norm_D=weights.attention_norm[...],
        qkv_KMHD=inputs_last(weights.qkv[...]),
        out_DNH=weights.out[...],
        mlp_norm_D=weights.mlp_norm[...],
        gate_FD=inputs_last(weights.gate[...]),
        up_FD=inputs_last(weights.up[...]),
        down_DF=weights.down[...],
        qkv_bias_KMH=optional("qkv_bias"),
        q_norm_H=optional("q_norm"),
        k_norm_H=optional("k_norm"),
    )


def inputs_last(weight: jax.Array) -> jax.Array:
    """[D, ...] as [..., D]."""
    return jnp.moveaxis(weight, 0, -1)
