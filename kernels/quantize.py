"""A matrix rounded to 8 bits, as it is and turned over, in one read, on an NVIDIA GPU.

Products of 8 bits want what they sum over last. The gradient that comes backwards is summed over
its columns for dx, over its rows for dw, so it is needed both ways. XLA reads it twice for largest
values and twice to round it; the program in `quantize_triton.py` reads it once.

Scales are powers of two (`scale_of`, which `ops/fp8.py` takes too). M rows, K columns.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.kernels import triton_calls

# Values along what is summed that have one scale; rows and columns of a program's tile.
BLOCK = TILE = 128
# The ways in which a matrix can be had: [M, K], with scales along K; [K, M], along M.
STRAIGHT, TURNED = WAYS = "straight", "turned"
# Scales that survive a product of two, and undoing it, in float32.
LEAST_EXPONENT, MOST_EXPONENT = -120, 120
# Of what is turned over the tensor cores, and the program's words, want a multiple of.
MULTIPLE = 16
# 99% of a copy both ways with blocks' scales, 83% with 8, 66% with 16 (H200, [16384, 14336]).
WARPS = 4
# Tiles of rows whose programs follow each other: 1 KB of a row that is written turned over.
TOGETHER = 8


def scale_of(amax, dtype):
    """For each largest value the least power of two that brings it into the range of dtype.

    amax, and the result: float32. NaN where amax is not finite.
    """
    scale = jnp.ldexp(jnp.float32(1), exponent_of(amax, dtype))
    return jnp.where(jnp.isfinite(amax), scale, jnp.nan)


def exponent_of(amax, dtype):
    """Of that power of two, int32."""
    # amax = mantissa * 2**exponent, and so is the most that dtype holds (448 or 57344).
    mantissa, exponent = jnp.frexp(amax)
    most_mantissa, most_exponent = most_of(dtype)
    exponent = exponent - most_exponent + (mantissa > most_mantissa).astype(jnp.int32)
    return jnp.clip(exponent, LEAST_EXPONENT, MOST_EXPONENT)


def most_of(dtype) -> tuple[float, int]:
    """Mantissa and exponent of the most that dtype holds."""
    return math.frexp(float(jnp.finfo(dtype).max))


def device_supported(platform: str, compute_capability: str) -> str | None:
    """None if the programs run on this platform ("gpu"), else the reason."""
    return triton_calls.objection(
        platform=platform, compute_capability=compute_capability, least=8.9
    )


def supported(
    x_MK, *, platform: str, compute_capability: str, has_scale: bool = False
) -> str | None:
    """None if the programs run here for this matrix, else the reason.

    has_scale: whether there is one scale, which is given.
    """
    if reason := device_supported(platform, compute_capability):
        return reason
    return _objection(x_MK.shape, has_scale=has_scale)


def _objection(shape: Sequence[int], *, has_scale: bool) -> str | None:
    """What is wrong with matrices [..., M, K] for the programs, if anything."""
    multiple = MULTIPLE if has_scale else BLOCK
    odd = [size for size in shape[-2:] if not size or size % multiple]
    return f"it takes multiples of {multiple}, not {odd[0]}" if odd else None


def reference(x_MK, dtype, *, ways: Sequence[str] = WAYS, scale=None):
    """The same as `quantize` in plain jnp."""
    made = []
    for way in ways:
        x = x_MK.astype(jnp.float32) if way == STRAIGHT else x_MK.astype(jnp.float32).T
        if scale is not None:
            made.append(((x * (1 / scale)).astype(dtype), scale))
            continue
        runs = x.reshape(len(x), -1, BLOCK)
        scales = scale_of(jnp.max(jnp.abs(runs), axis=2), dtype)
        made.append(((runs * (1 / scales)[..., None]).astype(dtype).reshape(x.shape), scales))
    return made


def quantize(
    x_MK,
    dtype,
    *,
    compute_capability: str,
    ways: Sequence[str] = WAYS,
    scale=None,
):
    """[(values, scale) for each of `ways`], of which values * scale is x.

    Straight: values [M, K] and float32 scales [M, K / 128]; turned: [K, M] and [K, M / 128].
    scale: one number, float32, for all of x; the scales are then this one, and `ways` has TURNED.
    Bits are those of `reference`. Raises ValueError for what `supported` would refuse and for ways
    that there are not.
    """
    if scale is not None:
        made = cast(x_MK, 1 / scale, dtype, compute_capability=compute_capability, ways=ways)
        return [(values, scale) for values in made]
    _check(x_MK.shape, ways, has_scale=False)
    from jaxscale.kernels import quantize_triton

    order = [way for way in WAYS if way in ways]
    absent: dict[str, Any] = {} if len(order) == 2 else dict(second_ptr=None, second_scale_ptr=None)
    shapes = _shapes(x_MK.shape)
    out = triton_calls.call(
        x_MK,
        kernel=quantize_triton.quantize_blocks,
        name="quantize_blocks",
        out_shape=[
            shape
            for way in order
            for shape in (
                jax.ShapeDtypeStruct(shapes[way], dtype),
                jax.ShapeDtypeStruct((shapes[way][1] // BLOCK, shapes[way][0]), jnp.float32),
            )
        ],
        **_launch(x_MK.shape, compute_capability, ways=ways),
        MOST_EXPONENT=most_of(dtype)[1],
        IS_TURNED=TURNED in ways,
        **absent,
    )
    pairs = {way: (out[2 * i], out[2 * i + 1].T) for i, way in enumerate(order)}
    return [pairs[way] for way in ways]


def cast(x, factor, dtype, *, compute_capability: str, ways: Sequence[str] = WAYS) -> list[Any]:
    """Matrices [..., M, K] times their factor, float32 [...], in 8 bits: for each of `ways`.

    `ways` has TURNED: as they are XLA does it as well. Raises ValueError as `quantize` does.
    """
    _check(x.shape, ways, has_scale=True)
    from jaxscale.kernels import quantize_triton

    order = [way for way in (TURNED, STRAIGHT) if way in ways]
    absent: dict[str, Any] = {} if STRAIGHT in ways else dict(straight_ptr=None)
    shapes = _shapes(x.shape)
    made = triton_calls.call(
        x,
        jnp.reshape(factor, (-1,)),
        kernel=quantize_triton.quantize_cast,
        name="quantize_cast",
        out_shape=[jax.ShapeDtypeStruct(shapes[way], dtype) for way in order],
        **_launch(x.shape, compute_capability, ways=ways),
        **absent,
    )
    found = dict(zip(order, made, strict=True))
    return [found[way] for way in ways]


def _check(shape: Sequence[int], ways: Sequence[str], *, has_scale: bool) -> None:
    if reason := _objection(shape, has_scale=has_scale):
        raise ValueError(f"x has the shape {tuple(shape)}; {reason}")
    if unknown := [way for way in ways if way not in WAYS]:
        raise ValueError(f"ways has {unknown[0]!r}; there are {STRAIGHT!r} and {TURNED!r}")
    if has_scale and TURNED not in ways:
        raise ValueError(f"ways is {ways}; with one scale it must have {TURNED!r}")


def _shapes(shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """By way, of matrices [..., M, K]."""
    *matrices, num_rows, size = shape
    return {STRAIGHT: (*matrices, num_rows, size), TURNED: (*matrices, size, num_rows)}


def _launch(
    shape: Sequence[int], compute_capability: str, *, ways: Sequence[str]
) -> dict[str, Any]:
    """How matrices [..., M, K] are cut up, a program a tile."""
    *matrices, num_rows, size = shape
    return dict(
        grid=(math.prod(matrices) * -(-num_rows // TILE) * -(-size // TILE),),
        num_warps=WARPS,
        compute_capability=compute_capability,
        M=num_rows,
        K=size,
        TOGETHER=TOGETHER,
        IS_STRAIGHT=STRAIGHT in ways,
    )
