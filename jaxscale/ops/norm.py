"""Normalisation."""

import jax
import jax.numpy as jnp


def rms_norm(x, scale, *, eps: float):
    """x / rms(x) * scale over the last axis (Zhang & Sennrich 2019).

    Statistics are float32, the result has x's dtype.
    """
    x32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse_rms * scale.astype(jnp.float32)).astype(x.dtype)
