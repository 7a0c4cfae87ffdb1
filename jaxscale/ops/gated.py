"""Gated activations of feed-forward layers (Shazeer 2020, arXiv:2002.05202).

Their backward passes are written out, so that XLA makes both gradients in one launch that reads
each input once, and keeps nothing but the inputs between the passes.
"""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def swiglu(gate, up):
    """silu(gate) * up; float32 inside, the inputs' dtype out."""
    return _gated(jax.nn.silu, gate, up=up)


def _swiglu_bwd(residuals, grad):
    # A barrier, because XLA otherwise finds the forward pass's sigmoid to be the same and keeps it.
    gate, up = jax.lax.optimization_barrier(residuals)
    gate32, grad32 = gate.astype(jnp.float32), grad.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(gate32)
    dgate = grad32 * up.astype(jnp.float32) * sigmoid * (1 + gate32 * (1 - sigmoid))
    return dgate.astype(gate.dtype), (grad32 * gate32 * sigmoid).astype(up.dtype)


swiglu.defvjp(
    lambda gate, up: (_gated(jax.nn.silu, gate, up=up), (gate, up)),
    _swiglu_bwd,
)


@jax.custom_vjp
def geglu(gate, up):
    """gelu(gate) * up with the tanh approximation; float32 inside, the inputs' dtype out."""
    return _gated(_gelu, gate, up=up)


def _gelu(x):
    return jax.nn.gelu(x, approximate=True)


def _geglu_bwd(residuals, grad):
    gate, up = jax.lax.optimization_barrier(residuals)
    grad32 = grad.astype(jnp.float32)
    activated, pull = jax.vjp(_gelu, gate.astype(jnp.float32))
    (dgate,) = pull(grad32 * up.astype(jnp.float32))
    return dgate.astype(gate.dtype), (grad32 * activated).astype(up.dtype)


geglu.defvjp(lambda gate, up: (_gated(_gelu, gate, up=up), (gate, up)), _geglu_bwd)


def _gated(activation, gate, *, up):
    return (activation(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)
