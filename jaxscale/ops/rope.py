"""Rotary position embedding (Su et al. 2021), with the frequency scaling of Llama 3.1.

B batch, S sequence, N heads (query or key), H head size.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from jaxscale.config import check_fields, number


@dataclasses.dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Scaling:
    """Llama 3.1's stretch of the context.

    Wavelengths beyond `original_seq_len / low` are `factor` times longer.
    """

    factor: float = number(least=1, default=8.0)
    low: float = number(above=0, default=1.0)
    high: float = number(above=0, default=4.0)
    original_seq_len: int = number(least=1, default=8192)

    def validate(self) -> None:
        check_fields(self, "config.model.rope_scaling")
        if not self.high > self.low:
            raise ValueError(
                f"config.model.rope_scaling.low={self.low} must be below high={self.high}; "
                "lower it, or raise config.model.rope_scaling.high"
            )

    def scaled(self, frequency: np.ndarray) -> np.ndarray:
        wavelength = 2 * math.pi / frequency
        smooth = (self.original_seq_len / wavelength - self.low) / (self.high - self.low)
        smooth = np.clip(smooth, 0.0, 1.0)
        return frequency * (smooth + (1 - smooth) / self.factor)


@dataclasses.dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Stretch:
    """All positions `factor` times closer together (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float = 1.0

    def scaled(self, frequency: np.ndarray) -> np.ndarray:
        return frequency / self.factor


def frequencies(head_size: int, *, theta: float, scaling: Scaling | Stretch | None) -> np.ndarray:
    """Radians a position of each of the `head_size / 2` pairs, float32."""
    frequency = theta ** -(np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    if scaling is not None:
        frequency = scaling.scaled(frequency)
    return frequency.astype(np.float32)


def angles(positions_BS, head_size: int, *, theta: float, scaling: Scaling | Stretch | None = None):
    """cos and sin of position times frequency, each float32 [B, S, head_size / 2]."""
    radians = positions_BS[..., None].astype(jnp.float32) * frequencies(
        head_size, theta=theta, scaling=scaling
    )
    return jnp.cos(radians), jnp.sin(radians)


def rotate(x_BSNH, cos_BSh, sin_BSh):
    """Rotates the pairs (i, i + H/2), the order of Hugging Face's weights.

    Computed in float32; the result has x's dtype.
    """
    first, second = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BSh[:, :, None], sin_BSh[:, :, None]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BSNH.dtype)
