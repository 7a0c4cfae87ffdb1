"""Drawing the next token: temperature, top-k, top-p (Holtzman et al. 2019, arXiv:1904.09751).

B texts, V vocabulary.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """temperature: 0 takes the likeliest. top_k: draws among the k likeliest; 0: among all.

    top_p: draws among the fewest that hold this much probability together; 1: among all.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def validate(self) -> None:
        """Raises ValueError for what cannot be."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature}: set it to 0 or more")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: set it to 1 or more, or to 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: set it above 0 and up to 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed}: set it between 0 and {2**32 - 1}")


def draw(logits_BV, sampling: Sampling, *, key):
    """The next token of each text, int32 [B]; logits: float32."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        logits_BV = among_likeliest(logits_BV, sampling.top_k)
    if sampling.top_p < 1:
        logits_BV = among_mass(logits_BV, sampling.top_p)
    return jax.random.categorical(key, logits_BV, axis=-1).astype(jnp.int32)


def among_likeliest(logits_BV, num: int):
    """-inf for all but the `num` highest; those that equal the last of them stay too."""
    return _at_least(logits_BV, lambda is_in_BV: is_in_BV.sum(-1) >= num)


def among_mass(logits_BV, mass: float):
    """-inf for all but the fewest highest whose probabilities sum to `mass`, or their equals."""
    p_BV = jax.nn.softmax(logits_BV, axis=-1)
    # Rounding may leave the sum of all below a mass near 1; then all stay.
    return _at_least(logits_BV, lambda is_in_BV: jnp.where(is_in_BV, p_BV, 0).sum(-1) >= mass)


def _at_least(logits_BV, suffices):
    """-inf below the highest threshold with which `suffices` holds.

    Found bit by bit: 32 passes over the logits, where sorting 64 x 128,256 would take as long as
    the model itself.
    """
    bits_BV = _ordered(logits_BV)

    def narrow(i, threshold_B):
        higher_B = threshold_B | (jnp.uint32(1) << (jnp.uint32(31) - i.astype(jnp.uint32)))
        return jnp.where(suffices(bits_BV >= higher_B[:, None]), higher_B, threshold_B)

    zeros_B = jnp.zeros(logits_BV.shape[:1], jnp.uint32)
    threshold_B = jax.lax.fori_loop(0, 32, narrow, zeros_B)
    return jnp.where(bits_BV >= threshold_B[:, None], logits_BV, -jnp.inf)


def _ordered(x):
    """float32 as uint32 of the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
