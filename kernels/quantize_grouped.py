"""The operands of grouped products rounded to 8 bits, on an NVIDIA GPU.

Matrices are needed as they are and turned over, with a scale for each: both are made in one read,
after one that finds largest values. Rows, as they are with a scale for each, are read once. The
programs are in `quantize_triton.py`, scales are `quantize.scale_of`.

T rows, E groups, K rows and N columns of a matrix.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.kernels import quantize, triton_calls
from jaxscale.kernels.quantize import TILE

# Values of a program that rounds rows: 64 a thread.
VALUES = 8192
MOST_COLUMNS = 16384


def matrices_supported(w_EKN, *, platform: str, compute_capability: str) -> str | None:
    """None if `quantize_matrices` runs here for these, else the reason."""
    if reason := quantize.device_supported(platform, compute_capability):
        return reason
    odd = [size for size in w_EKN.shape[1:] if not size or size % TILE]
    return f"it takes matrices of multiples of {TILE}, not {odd[0]}" if odd else None


def rows_supported(x_TK, *, platform: str, compute_capability: str) -> str | None:
    """None if `quantize_rows` runs here for these, else the reason."""
    return quantize.device_supported(platform, compute_capability) or _objection_to_rows(x_TK)


def _objection_to_rows(x_TK) -> str | None:
    if not math.prod(x_TK.shape):
        return f"it takes rows that hold something, not {x_TK.shape}"
    if x_TK.shape[1] > MOST_COLUMNS:
        return f"it takes rows of {MOST_COLUMNS} at most, not {x_TK.shape[1]}"
    return None


def reference_matrices(w_EKN, dtype):
    """The same as `quantize_matrices` in plain jnp."""
    w_EKN = w_EKN.astype(jnp.float32)
    scale_E = quantize.scale_of(jnp.max(jnp.abs(w_EKN), axis=(1, 2)), dtype)
    values_EKN = (w_EKN * (1 / scale_E)[:, None, None]).astype(dtype)
    return values_EKN, values_EKN.transpose(0, 2, 1), scale_E


def reference_rows(x_TK, dtype):
    """The same as `quantize_rows` in plain jnp."""
    x_TK = x_TK.astype(jnp.float32)
    scale_T = quantize.scale_of(jnp.max(jnp.abs(x_TK), axis=1), dtype)
    return (x_TK * (1 / scale_T)[:, None]).astype(dtype), scale_T


def quantize_matrices(w_EKN, dtype, *, compute_capability: str):
    """(values [E, K, N], values [E, N, K], float32 scales [E]); values * scale is w.

    XLA finds largest values in one read; the second rounds both ways.
    """
    scale_E = quantize.scale_of(jnp.max(jnp.abs(w_EKN), axis=(1, 2)).astype(jnp.float32), dtype)
    made = quantize.cast(w_EKN, 1 / scale_E, dtype, compute_capability=compute_capability)
    return *made, scale_E


def quantize_rows(x_TK, dtype, *, compute_capability: str):
    """(values [T, K], float32 scales [T]), of which values * scale is x.

    Raises ValueError for what `rows_supported` would refuse.
    """
    if reason := _objection_to_rows(x_TK):
        raise ValueError(reason)
    from jaxscale.kernels import quantize_triton

    num_rows, size = x_TK.shape
    width = 1 << max(size - 1, 0).bit_length()
    rows = max(VALUES // width, 1)
    settings: dict[str, Any] = dict(
        grid=(-(-num_rows // rows),),
        num_warps=max(4, rows * width // VALUES * 4),
        compute_capability=compute_capability,
        M=num_rows,
        K=size,
        MOST_EXPONENT=quantize.most_of(dtype)[1],
        ROWS=rows,
        WIDTH=width,
    )
    values_TK, scale_T = triton_calls.call(
        x_TK,
        kernel=quantize_triton.quantize_rows,
        name="quantize_rows",
        out_shape=[
            jax.ShapeDtypeStruct(x_TK.shape, dtype),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ],
        **settings,
    )
    return values_TK, scale_T
