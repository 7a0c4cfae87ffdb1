"""The gated activation of Llama's feed-forward layers."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def swiglu(gate, up):
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202); float32 inside, the inputs' dtype out.

    The backward pass is written out, so that XLA makes both gradients in one kernel that reads each input once, and keeps
    no sigmoid between the passes (0.44 GiB a layer of Llama-3-8B and 16,384 tokens).
    """
    return _forward(gate, up)


def _forward(gate, up):
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def _swiglu_fwd(gate, up):
    return _forward(gate, up), (gate, up)


def _swiglu_bwd(residuals, grad):
    # The barrier: without it XLA finds the sigmoid of the forward pass to be the same, and keeps it.
    gate, up = jax.lax.optimization_barrier(residuals)
    gate32, grad32 = gate.astype(jnp.float32), grad.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(gate32)
    dgate = grad32 * up.astype(jnp.float32) * sigmoid * (1 + gate32 * (1 - sigmoid))
    return dgate.astype(gate.dtype), (grad32 * gate32 * sigmoid).astype(up.dtype)


swiglu.defvjp(_swiglu_fwd, _swiglu_bwd)
