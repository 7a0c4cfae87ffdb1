"""AdamW with moments of 8 bits, scaled by blocks (Dettmers et al. 2021, arXiv:2110.02861).

A block is `Config.block` values along the model dimension: of a matrix in a layer a part of the
values of one unit, of a table of those of one token, whose gradients are of like size. It has two
float32 scales; a device's part of a parameter is whole blocks, so each rounds alone and any mesh
gives the same numbers. Parameters without a model dimension (norms, biases) keep float32 moments.

Codes are powers instead of the paper's table, which takes a search: m is c * |c| * scale, c an
int8; the root of v is c**2 * scale, c a uint8. Near a block's largest value a step is 1.6% and
0.8% of it, and the range is 16,000 and 65,000 (linear codes: 127 and 255).

What is rounded is a moving average: a nearest code stays where it is once a step's decay is under
half a code (with b2=0.95 all roots under 2% of their block's largest, with 0.999 all). Such codes
are rounded up as often as leaves m and v as they are on average. The noise is a hash of the
update's number, the place and the old codes: the same run gives the same bits.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxscale import sharding as shd
from jaxscale.config import number
from jaxscale.optim import adamw

# The axis along which blocks are.
MODEL = "embed"
MOST_M, MOST_V = 127, 255
# Of v > 0. Then the least m is no more of its block's largest than the least root of v is, and an
# update no more than the block's largest m and root of v make.
LEAST_V = 2


class State(NamedTuple):
    """count: int32. The others are trees like the parameters, of codes and their scales.

    The codes have the parameters' shapes, the scales one value for each block. What is not coded is
    float32, its scale 1, of shape (). nu: of the root of v where it is coded.
    """

    count: Any
    mu: Any
    mu_scale: Any
    nu: Any
    nu_scale: Any


class Moments(NamedTuple):
    """Of one parameter; as in State."""

    mu: jax.Array
    mu_scale: jax.Array
    nu: jax.Array
    nu_scale: jax.Array


@dataclasses.dataclass(slots=True, kw_only=True)
class Config(adamw.Config):
    """Takes 2 bytes and 8 / block a value instead of 8 for the moments."""

    # A device's part of the model dimension has to be a multiple of it: 64 splits 4096 over 64.
    block: int = number(least=2, most=1024, default=64)

    def _scale_by_adam(self) -> optax.GradientTransformationExtraArgs:
        """As that of AdamW: it leaves its state as it was unless `is_good`."""

        def init(params):
            columns = (self._first(params, field) for field in Moments._fields)
            return State(jnp.zeros((), jnp.int32), *columns)

        def update(gradients, state, params=None, *, is_good=True):
            del params
            count = optax.safe_increment(state.count)
            leaves, tree = jax.tree.flatten(gradients)
            old = zip(*(jax.tree.leaves(part) for part in state[1:]), strict=True)
            made = [
                self._updated(gradient, Moments(*parts), count=count, is_good=is_good)
                for gradient, parts in zip(leaves, old, strict=True)
            ]
            updates, *columns = zip(*made, strict=True)
            tree_of_state = jax.tree.structure(state.mu)
            count = jnp.where(is_good, count, state.count)
            moments = (jax.tree.unflatten(tree_of_state, column) for column in columns)
            return jax.tree.unflatten(tree, updates), State(count, *moments)

        return optax.GradientTransformationExtraArgs(init, update)

    def _first(self, params, field: str):
        """A tree of the state at the start."""

        def first(box):
            axis = _axis_of_blocks(box)
            return jax.tree.map(lambda leaf: getattr(self._of_leaf(leaf, axis), field), box)

        return jax.tree.map(first, params, is_leaf=lambda x: shd.axes_of(x) is not None)

    def _of_leaf(self, leaf, axis: int | None) -> Moments:
        if axis is None or leaf.shape[axis] == 1:
            zeros = jnp.zeros(leaf.shape, jnp.float32)
            return Moments(zeros, jnp.ones(()), zeros, jnp.ones(()))
        shape = list(leaf.shape)
        shape[axis] //= self._block_of(shape[axis])
        scale = jnp.zeros(shape, jnp.float32)
        return Moments(
            jnp.zeros(leaf.shape, jnp.int8), scale, jnp.zeros(leaf.shape, jnp.uint8), scale
        )

    def _block_of(self, size: int) -> int:
        """Raises ValueError for a model dimension that blocks do not fill."""
        block = min(self.block, size)
        if size % block:
            best = max(each for each in range(1, block) if size % each == 0)
            fix = f"set it to {best}" if best > 1 else "set config.optim to adamw.Config()"
            raise ValueError(
                f"config.optim.block={self.block} does not divide the model dimension, {size}; "
                + fix
            )
        return block

    def _updated(self, gradient, old: Moments, *, count, is_good) -> tuple:
        """(the update, the new moments) of one parameter."""
        axis = _split_axis(old)
        g, *in_blocks = (_in_blocks(x, axis, scale=old.mu_scale) for x in (gradient, *old))
        parts = Moments(*in_blocks)
        exact = self._exact(g, parts)
        made = Moments(exact.m, old.mu_scale, exact.v, old.nu_scale)
        if axis is not None:
            scales = _scales(exact, axis=axis)
            # Else XLA keeps moments in float32 until their scales are known, instead of making them
            # once more of what takes a byte: 1 GiB of a table of 8B on 2 GPUs. Not on the gradient:
            # clipped, it would be written once more.
            parts, scales = jax.lax.optimization_barrier((parts, scales))
            exact = self._exact(g, parts)
            noise = _noise(parts, axis=axis, count=count)
            made = _coded(exact, scales, noise=noise, decays=(self.b1, self.b2))
        m_hat = exact.m / (1 - self.b1**count)
        update = m_hat / (jnp.sqrt(exact.v / (1 - self.b2**count)) + self.eps)
        chosen = jax.tree.map(lambda new, old: jnp.where(is_good, new, old), made, parts)
        moments = (x.reshape(like.shape) for x, like in zip(chosen, old, strict=True))
        return update.reshape(gradient.shape), *moments

    def _exact(self, gradient, old: Moments) -> "_Exact":
        m, root = _powers(old.mu, old.mu_scale), _powers(old.nu, old.nu_scale)
        v = old.nu if old.nu.dtype == jnp.float32 else root * root
        return _Exact(
            self.b1 * m + (1 - self.b1) * gradient,
            self.b2 * v + (1 - self.b2) * (gradient * gradient),
        )


class _Exact(NamedTuple):
    """Moments in float32."""

    m: jax.Array
    v: jax.Array


def _axis_of_blocks(box) -> int | None:
    names = shd.axes_of(box) or ()
    return names.index(MODEL) if MODEL in names else None


def _split_axis(moments: Moments) -> int | None:
    """That in which scales are fewer than codes; None for float32."""
    if moments.mu_scale.ndim == 0:
        return None
    pairs = zip(moments.mu.shape, moments.mu_scale.shape, strict=True)
    return next(axis for axis, (size, blocks) in enumerate(pairs) if size != blocks)


def _in_blocks(x, axis: int | None, *, scale):
    """[..., blocks, block, ...]; of the scales themselves [..., blocks, 1, ...].

    JAX keeps what splits the axis on the blocks.
    """
    if axis is None:
        return x
    num = scale.shape[axis]
    return x.reshape(*x.shape[:axis], num, x.shape[axis] // num, *x.shape[axis + 1 :])


def _powers(codes, scale):
    """float32; codes that are float32 as they are."""
    if codes.dtype == jnp.float32:
        return codes
    codes = codes.astype(jnp.float32)
    return codes * jnp.abs(codes) * scale


def _scales(new: _Exact, *, axis: int) -> tuple:
    """Of m and of the root of v: with them the largest of a block has the largest code."""
    most_m, most_v = (
        jnp.max(_in_order(x), axis=axis + 1, keepdims=True) for x in (jnp.abs(new.m), new.v)
    )
    return most_m / MOST_M**2, jnp.sqrt(most_v) / MOST_V**2


def _in_order(x):
    """x, laid out by its dimensions: for a maximum over another than the last XLA turns it over."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def _coded(new: _Exact, scales: tuple, *, noise, decays: tuple[float, float]) -> Moments:
    """The codes, in blocks. decays: (b1, b2)."""
    (mu_scale, nu_scale), (b1, b2) = scales, decays
    m, root = jnp.abs(new.m), jnp.sqrt(new.v)
    mu = _rounded(m, mu_scale, most=MOST_M, power=2, noise=noise & 0xFFFF, decay=b1)
    nu = _rounded(root, nu_scale, most=MOST_V, power=4, noise=noise >> 16, decay=b2)
    nu = jnp.where(new.v > 0, jnp.maximum(nu, LEAST_V), 0)
    mu = jnp.where(new.m < 0, -mu, mu)
    return Moments(mu.astype(jnp.int8), mu_scale, nu.astype(jnp.uint8), nu_scale)


def _rounded(x, scale, *, most: int, power: int, noise, decay: float):
    """Codes whose squares, times the scale, are x >= 0; float32.

    The nearest where `decay` of code**power moves it by half a code or more; of smaller ones one of
    the two next to x, so that the mean of code**power is that of x. noise: below 2**16.
    """
    code = jnp.sqrt(jnp.where(scale > 0, x / scale, 0.0))
    low = jnp.floor(code)
    share = (code**power - low**power) / ((low + 1) ** power - low**power)
    is_up = (noise.astype(jnp.float32) + 0.5) * 2.0**-16 < share
    still = 0.5 / (1 - decay ** (1 / power))
    is_up = jnp.where(code < still, is_up, code - low >= 0.5)
    return jnp.minimum(low + is_up.astype(jnp.float32), most)


def _noise(old: Moments, *, axis: int, count):
    """uint32, like the codes in blocks: they, their place and the count, mixed.

    Not the new moments' bits: their last ones differ from mesh to mesh. The place is that from the
    model dimension on, as stages hold the layers before it in other orders; axis: of the blocks.
    The constants are those of C. Wellons' "lowbias32".
    """
    m, v = (x.astype(jnp.uint8).astype(jnp.uint32) for x in (old.mu, old.nu))
    x = _mixed((m << 8 | v) + count.astype(jnp.uint32) * np.uint32(0x9E3779B9))
    return _mixed(x ^ _place(old.mu, axis=axis))


def _place(x, *, axis: int):
    """uint32, like x: another number for each place from `axis` on."""
    sharding: Any = jax.typeof(x).sharding
    place, stride = jnp.uint32(0), 1
    for dim in range(x.ndim - 1, axis - 1, -1):
        iota = jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim, out_sharding=sharding)
        place, stride = place + iota * np.uint32(stride % 2**32), stride * x.shape[dim]
    return place


def _mixed(x):
    x = (x ^ x >> 16) * np.uint32(0x7FEB352D)
    x = (x ^ x >> 15) * np.uint32(0x846CA68B)
    return x ^ x >> 16
