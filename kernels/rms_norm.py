"""RMSNorm with or without the sum before it, forward and backward in one pass each, on a GPU.

XLA makes the sum and the norm in launches of their own, and goes back in more than one. The
programs in `rms_norm_triton.py` read each operand once, and add in one order: the same bits each
time.

M rows, D columns, P programs.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.kernels import triton_calls

# A row lies in the registers of a program.
MAX_SIZE = 16_384
# Values a thread has of a row.
A_THREAD = 16
# That go back, each over some of the rows: 4 a multiprocessor of an H100 or H200.
PROGRAMS = 528


def supported(x_MD, *, platform: str, compute_capability: str) -> str | None:
    """None if the programs run on this platform ("gpu") for these rows, else the reason."""
    # Ampere's would run; nobody has timed them.
    reason = triton_calls.objection(
        platform=platform, compute_capability=compute_capability, least=9.0
    )
    if reason:
        return reason
    # Others run, as tests have them; nobody has timed them.
    if x_MD.dtype != jnp.bfloat16:
        return f"it takes bfloat16, not {x_MD.dtype}"
    return _objection(x_MD.shape)


def _objection(shape: tuple[int, ...]) -> str | None:
    """What is wrong with rows of this shape [..., D], if anything."""
    if not math.prod(shape):
        return f"it takes rows that hold something, not {shape}"
    if shape[-1] > MAX_SIZE:
        return f"it takes rows of {MAX_SIZE} values at most, not {shape[-1]}"
    return None


def reference(x_MD, scale_D, *, eps: float):
    """x / rms(x) * scale in plain jnp, in x's dtype; statistics are float32."""
    x32 = x_MD.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse_rms * scale_D.astype(jnp.float32)).astype(x_MD.dtype)


def forward(x_MD, scale_D, *, eps: float, compute_capability: str):
    """(x / rms(x) * scale in x's dtype, 1 / rms(x) in float32 [M]). M may be several dimensions.

    Raises ValueError for shapes or dtypes that do not fit each other, and for rows that
    are empty or too long.
    """
    _check(x_MD, scale_D)
    return _call(
        "rms_norm",
        *(x_MD, scale_D),
        out_shape=[_like(x_MD), _statistics(x_MD)],
        EPS=eps,
        compute_capability=compute_capability,
    )


def forward_of_sum(x_MD, added_MD, scale_D, *, eps: float, compute_capability: str):
    """(x + added in x's dtype, what `forward` makes of it as it is rounded).

    Raises ValueError as `forward` does.
    """
    _check(x_MD, scale_D, added=added_MD)
    summed_MD, *made = _call(
        "add_rms_norm",
        *(x_MD, added_MD, scale_D),
        out_shape=[_like(x_MD), _like(x_MD), _statistics(x_MD)],
        EPS=eps,
        compute_capability=compute_capability,
    )
    return summed_MD, tuple(made)


def backward(x_MD, scale_D, inverse_M, of_x_MD, grad_MD, *, compute_capability: str):
    """(the gradient of x in x's dtype, that of the scale in float32 [D]).

    inverse_M: of `forward`. grad_MD: the norm's gradient. of_x_MD: that of x where else it is read,
    which is added. Raises ValueError as `forward` does.
    """
    _check(x_MD, scale_D, of_x=of_x_MD, grad=grad_MD)
    if inverse_M.shape != x_MD.shape[:-1]:
        raise ValueError(
            f"inverse has the shape {inverse_M.shape}; it must be that of x's rows, "
            f"{x_MD.shape[:-1]}"
        )
    num_rows, size = math.prod(x_MD.shape[:-1]), x_MD.shape[-1]
    programs = min(PROGRAMS, num_rows)
    dx_MD, dscale_PD = _call(
        "rms_norm_backward",
        *(x_MD, scale_D, inverse_M, of_x_MD, grad_MD),
        out_shape=[_like(x_MD), jax.ShapeDtypeStruct((programs, size), jnp.float32)],
        grid=programs,
        compute_capability=compute_capability,
        M=num_rows,
        PROGRAMS=programs,
    )
    return dx_MD, dscale_PD.sum(axis=0)


def _check(x_MD, scale_D, **others) -> None:
    if reason := _objection(x_MD.shape):
        raise ValueError(f"x: {reason}")
    if scale_D.shape != x_MD.shape[-1:]:
        raise ValueError(f"scale has the shape {scale_D.shape}; it must be [{x_MD.shape[-1]}]")
    for name, other in others.items():
        if (other.shape, other.dtype) != (x_MD.shape, x_MD.dtype):
            raise ValueError(
                f"{name} is {other.dtype}{list(other.shape)}; it must be {x_MD.dtype}"
                f"{list(x_MD.shape)} as x"
            )


def _like(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _statistics(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)


def _call(name: str, x_MD, *operands, grid: int | None = None, **settings: Any) -> tuple:
    """grid: programs; one a row unless given."""
    from jaxscale.kernels import rms_norm_triton

    size = x_MD.shape[-1]
    block = 1 << (size - 1).bit_length()
    made = triton_calls.call(
        x_MD,
        *operands,
        kernel=getattr(rms_norm_triton, name),
        name=name,
        grid=(grid or math.prod(x_MD.shape[:-1]),),
        num_warps=min(16, max(1, block // (32 * A_THREAD))),
        D=size,
        BLOCK=block,
        **settings,
    )
    return tuple(made)
