"""AdamW with moments of 8 bits, of one parameter: what an update makes of it, and a program for it.

`jaxscale/optim/adamw8bit.py` says what the codes are. XLA makes them in two passes, as a block's
scale is wanted before its codes; the program in `adamw8bit_triton.py` reads and writes each byte
once, in place, and moves the parameter too. Its numbers are those of `reference` to the bit.

The arithmetic is made for that: few divisions, and for a code's own sake no root but one.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxscale.kernels import triton_calls

MOST_M, MOST_V = 127, 255
# Of v from TINY on. Then the least m is no more of its block's largest than the least root of v is,
# and an update no more than the block's largest m and root of v make.
LEAST_V = 2
# Scales under it have no inverse, and some processors take numbers under it for 0.
TINY = 2.0**-126
# Odd numbers far from each other, of the codes, the place and the update's number.
OF_CODES, OF_PLACE, OF_COUNT = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
# (Values of a program's tile, its warps), by the tile's axis of blocks; the best on an H200:
# down the columns 1.21 ms (1.38 to 1.87 of others), along rows 0.385 (0.41 to 0.56).
TILES = ((2048, 4), (1024, 2))


class Moments(NamedTuple):
    """Of one parameter: int8, float32, uint8, float32, where they are coded.

    Codes have the parameter's shape; scales have blocks where those have values. nu: of the root.
    """

    mu: Any
    mu_scale: Any
    nu: Any
    nu_scale: Any


class Exact(NamedTuple):
    """Moments in float32."""

    m: Any
    v: Any


class Numbers(NamedTuple):
    """Of an update, scalars; float32 but for the last two, int32 and bool.

    clip: what gradients are multiplied by. of_m, of_v: what turns moments into their unbiased
    estimates. rate: minus the learning rate.
    """

    clip: Any
    of_m: Any
    of_v: Any
    rate: Any
    count: Any
    is_good: Any


class Settings(NamedTuple):
    """decay: of the parameter, times the learning rate."""

    b1: float
    b2: float
    eps: float
    decay: float


def device_supported(platform: str, compute_capability: str) -> str | None:
    """None if the program runs on this platform ("gpu"), else the reason."""
    return triton_calls.objection(
        platform=platform, compute_capability=compute_capability, least=8.0
    )


def supported(p, gradient, *, old: Moments) -> str | None:
    """None if the program takes these arrays (or shapes), a device's part of them, else why not."""
    axis = axis_of_blocks(old)
    if axis is None:
        return "it takes moments of 8 bits"
    if not p.shape == gradient.shape == old.mu.shape == old.nu.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (p, gradient, old.mu, old.nu))
        return f"parameter, gradient and moments have the shapes {shapes}; they must have one"
    odd = [x.dtype for x in (p, gradient) if x.dtype != jnp.float32]
    if odd:
        return f"it takes float32, not {odd[0]}"
    block = p.shape[axis] // old.mu_scale.shape[axis]
    if block < 4 or block & (block - 1):
        return f"it takes blocks of a power of two from 4, not {block}"
    if block * math.prod(p.shape[axis + 1 :]) >= 2**31:
        return "it takes blocks of at most 2**31 values with what stands between"
    return None


def axis_of_blocks(old: Moments) -> int | None:
    """That in which scales are fewer than codes; None for float32."""
    if old.mu_scale.ndim == 0:
        return None
    pairs = zip(old.mu.shape, old.mu_scale.shape, strict=True)
    return next(axis for axis, (size, blocks) in enumerate(pairs) if size != blocks)


def update(
    p,
    gradient,
    *,
    old: Moments,
    numbers: Numbers,
    settings: Settings,
    place: Any = 0,
    behind: int | None = None,
    compute_capability: str,
    tile: tuple[int, int] | None = None,
) -> tuple[Any, Moments]:
    """(the parameter, its moments) after an update, in place; as they were unless is_good.

    place: of the first value in the whole parameter, counted from the model dimension on; behind:
    values of the whole parameter behind one of its model dimension. Of a device's own part. tile:
    other than of TILES, for trying out. Raises ValueError for what `supported` would refuse.
    """
    if reason := supported(p, gradient, old=old):
        raise ValueError(reason)
    from jaxscale.kernels import adamw8bit_triton

    axis = axis_of_blocks(old)
    assert axis is not None  # as `supported` says
    block = p.shape[axis] // old.mu_scale.shape[axis]
    outer, inner = math.prod(p.shape[:axis]), math.prod(p.shape[axis + 1 :])
    size, warps = tile or TILES[0 if inner > 1 else 1]
    width = max(size // block, 4)
    while inner > 1 and width > 4 and width >= 2 * inner:
        width //= 2
    parts = outer * p.shape[axis] // block
    count = numbers.count.astype(jnp.uint32) * np.uint32(OF_COUNT)
    place = jnp.asarray(place).astype(jnp.uint32) * np.uint32(OF_PLACE)
    p, *moments = triton_calls.call(
        p,
        gradient,
        *old,
        jnp.stack([x.astype(jnp.float32) for x in numbers[:4]]),
        jnp.stack([numbers.is_good.astype(jnp.uint32), count + place]),
        kernel=adamw8bit_triton.update,
        name="adamw8bit",
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (p, *old)],
        input_output_aliases={0: 0, 2: 1, 3: 2, 4: 3, 5: 4},
        grid=(parts * -(-inner // width) if inner > 1 else -(-parts // width),),
        num_warps=warps,
        compute_capability=compute_capability,
        # XLA rounds each product before it is added to.
        enable_fp_fusion=False,
        OUTER=outer,
        E=p.shape[axis],
        INNER=inner,
        B=block,
        C=width,
        AXIS=0 if inner > 1 else 1,
        PLACES=(inner if behind is None else behind) % 2**32,
        B1=settings.b1,
        B2=settings.b2,
        EPS=settings.eps,
        DECAY=settings.decay,
        STILL_M=_still(settings.b1, power=2),
        STILL_V=_still(settings.b2, power=4),
    )
    return p, Moments(*moments)


# In plain jnp.


def reference(
    p, gradient, *, old: Moments, numbers: Numbers, settings: Settings
) -> tuple[Any, Moments]:
    """The same as `update`, of a whole parameter however it is sharded; also of float32 moments."""
    step, moments = stepped(numbers.clip * gradient, old, numbers=numbers, settings=settings)
    if settings.decay:
        step = step + settings.decay * p
    return jnp.where(numbers.is_good, p + numbers.rate * step, p), moments


def stepped(gradient, old: Moments, *, numbers: Numbers, settings: Settings) -> tuple[Any, Moments]:
    """(what AdamW moves the parameter by but for decay and rate, the new moments).

    The old ones unless is_good.
    """
    axis, decays = axis_of_blocks(old), (settings.b1, settings.b2)
    g, *in_blocks = (_in_blocks(x, axis, scale=old.mu_scale) for x in (gradient, *old))
    parts = Moments(*in_blocks)
    new = _exact(g, parts, decays=decays)
    made = Moments(new.m, old.mu_scale, new.v, old.nu_scale)
    if axis is not None:
        scales = _scales(new, axis=axis)
        # Else XLA keeps moments in float32 until their scales are known, instead of making them
        # once more of what takes a byte: 1 GiB of a table of 8B on 2 GPUs. Not on the gradient:
        # clipped, it would be written once more.
        parts, scales = lax.optimization_barrier((parts, scales))
        new = _exact(g, parts, decays=decays)
        noise = _noise(parts, axis=axis, count=numbers.count)
        made = _coded(new, scales, noise=noise, decays=decays)
    step = new.m * numbers.of_m / (jnp.sqrt(new.v * numbers.of_v) + settings.eps)
    chosen = jax.tree.map(lambda new, old: jnp.where(numbers.is_good, new, old), made, parts)
    moments = (x.reshape(like.shape) for x, like in zip(chosen, old, strict=True))
    return step.reshape(gradient.shape), Moments(*moments)


def _in_blocks(x, axis: int | None, *, scale):
    """[..., blocks, block, ...]; of the scales themselves [..., blocks, 1, ...].

    JAX keeps what splits the axis on the blocks.
    """
    if axis is None:
        return x
    num = scale.shape[axis]
    return x.reshape(*x.shape[:axis], num, x.shape[axis] // num, *x.shape[axis + 1 :])


def _exact(gradient, old: Moments, *, decays: Sequence[float]) -> Exact:
    """decays: (b1, b2)."""
    m, root = _powers(old.mu, old.mu_scale), _powers(old.nu, old.nu_scale)
    v = old.nu if old.nu.dtype == jnp.float32 else root * root
    b1, b2 = decays
    return Exact(b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * (gradient * gradient))


def _powers(codes, scale):
    """float32; codes that are float32 as they are."""
    if codes.dtype == jnp.float32:
        return codes
    codes = codes.astype(jnp.float32)
    return codes * jnp.abs(codes) * scale


def _scales(new: Exact, *, axis: int) -> tuple:
    """Of m and of the root of v: with them the largest of a block has the largest code."""
    most_m, most_v = (
        jnp.max(_in_order(x), axis=axis + 1, keepdims=True) for x in (jnp.abs(new.m), new.v)
    )
    return most_m * (1 / MOST_M**2), jnp.sqrt(most_v) * (1 / MOST_V**2)


def _in_order(x):
    """x, laid out by its dimensions: for a maximum over another than the last XLA turns it over."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def _coded(new: Exact, scales: tuple, *, noise, decays: Sequence[float]) -> Moments:
    """The codes, in blocks.

    Codes whose squares, times the scale, are |m|, and the root of v. Of the two next to it the one
    with the nearer m, or v, where a step's decay moves those by half a code or more; of smaller
    ones either, so that the mean is that of m, and v.
    """
    (mu_scale, nu_scale), (b1, b2) = scales, decays
    square = jnp.abs(new.m) * _inverse(mu_scale)
    code = jnp.sqrt(square)
    low = jnp.floor(code)
    share = _share(noise & 0xFFFF, code, still=_still(b1, power=2))
    is_up = share * _odd(low) < square - low * low
    mu = jnp.minimum(jnp.where(is_up, low + 1, low), MOST_M)
    mu = jnp.where(new.m < 0, -mu, mu)
    inverse = _inverse(nu_scale)
    fourth = new.v * inverse * inverse
    code = jnp.sqrt(jnp.sqrt(fourth))
    low = jnp.floor(code)
    square = low * low
    share = _share(noise >> 16, code, still=_still(b2, power=4))
    # (low + 1)**4 - low**4 on the left.
    is_up = share * (_odd(low) * (square + square + _odd(low))) < fourth - square * square
    nu = jnp.minimum(jnp.where(is_up, low + 1, low), MOST_V)
    nu = jnp.where(new.v >= TINY, jnp.maximum(nu, LEAST_V), 0)
    return Moments(mu.astype(jnp.int8), mu_scale, nu.astype(jnp.uint8), nu_scale)


def _inverse(scale):
    return jnp.where(scale >= TINY, 1 / scale, 0.0)


def _odd(low):
    """(low + 1)**2 - low**2."""
    return low + low + 1


def _still(decay: float, *, power: int) -> float:
    """The code from which on `decay` of code**power moves it by half a code or more."""
    less = 1 - decay ** (1 / power)
    return 0.5 / less


def _share(noise, code, *, still: float):
    """Of the way to the next code's value; what is beyond goes there. noise: below 2**16."""
    return jnp.where(code < still, (noise.astype(jnp.float32) + 0.5) * 2.0**-16, 0.5)


def _noise(old: Moments, *, axis: int, count):
    """uint32, like the codes in blocks: they, their place and the count, mixed.

    Not the new moments' bits: their last ones differ from mesh to mesh. The place is that from the
    model dimension on, as stages hold the layers before it in other orders; axis: of the blocks.
    The constants of the mixing are those of C. Wellons' "lowbias32".
    """
    m, v = (x.astype(jnp.int32) for x in (old.mu, old.nu))
    x = (m * 256 + v).astype(jnp.uint32) * np.uint32(OF_CODES)
    x += _place(old.mu, axis=axis) * np.uint32(OF_PLACE)
    x += count.astype(jnp.uint32) * np.uint32(OF_COUNT)
    x = (x ^ x >> 16) * np.uint32(0x7FEB352D)
    x = (x ^ x >> 15) * np.uint32(0x846CA68B)
    return x ^ x >> 16


def _place(x, *, axis: int):
    """uint32, like x: another number for each place from `axis` on."""
    sharding: Any = jax.typeof(x).sharding
    place, stride = jnp.uint32(0), 1
    for dim in range(x.ndim - 1, axis - 1, -1):
        iota = lax.broadcasted_iota(jnp.uint32, x.shape, dim, out_sharding=sharding)
        place, stride = place + iota * np.uint32(stride % 2**32), stride * x.shape[dim]
    return place
