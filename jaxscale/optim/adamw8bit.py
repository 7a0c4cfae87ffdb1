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

The arithmetic is in `kernels/adamw8bit.py`, with a program that makes an update in one pass.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxscale import sharding as shd
from jaxscale import warned
from jaxscale.config import number
from jaxscale.kernels import adamw8bit as kernel
from jaxscale.kernels.adamw8bit import Moments, Numbers, Settings
from jaxscale.optim import adamw

# The axis along which blocks are.
MODEL = "embed"


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


@dataclasses.dataclass(slots=True, kw_only=True)
class Config(adamw.Config):
    """Takes 2 bytes and 8 / block a value instead of 8 for the moments."""

    # A device's part of the model dimension has to be a multiple of it: 64 splits 4096 over 64.
    block: int = number(least=2, most=1024, default=64)

    def build(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
        return optax.chain(
            self._clip(),
            self._scale_by_adam(),
            optax.add_decayed_weights(self.weight_decay, mask=self.decays),
            optax.scale_by_learning_rate(learning_rate),
        )

    def moved(
        self,
        gradients,
        state,
        *,
        params,
        schedule: optax.Schedule,
        is_good,
        shardings,
        platform: str,
        compute_capability: str,
    ) -> tuple[Any, Any] | None:
        """(params, state) after an update, each parameter in one pass and in place where it can be.

        None where the program of `kernels/adamw8bit.py` does not run; that is said once. The
        numbers are those of what `build` gives. shardings: of params and gradients.
        """
        reason = kernel.device_supported(platform, compute_capability)
        if reason and platform == "cpu":
            return None
        if reason:
            warned.once(f"XLA updates moments of 8 bits, in more than one pass: {reason}")
            return None
        clip, adam, decay, scheduled = state
        count = optax.safe_increment(adam.count)
        numbers = self._numbers(
            count, clip=self._factor(gradients), rate=-schedule(scheduled.count), is_good=is_good
        )
        trees = (gradients, *adam[1:], params, self.decays(params), shardings)
        leaves = zip(*map(jax.tree.leaves, trees), strict=True)
        made = [
            self._moved(
                p,
                gradient,
                old=Moments(*old),
                numbers=numbers,
                spec=sharding.spec,
                shard=sharding.shard_shape,
                settings=self._settings(self.weight_decay if decays else 0.0),
                compute_capability=compute_capability,
            )
            for gradient, *old, p, decays, sharding in leaves
        ]
        new, moments = zip(*made, strict=True)
        tree = jax.tree.structure(adam.mu)
        columns = (jax.tree.unflatten(tree, column) for column in zip(*moments, strict=True))
        adam = State(jnp.where(is_good, count, adam.count), *columns)
        scheduled = scheduled._replace(count=optax.safe_increment(scheduled.count))
        return jax.tree.unflatten(jax.tree.structure(params), new), (clip, adam, decay, scheduled)

    def _moved(
        self,
        p,
        gradient,
        *,
        old: Moments,
        numbers: Numbers,
        settings: Settings,
        spec: PartitionSpec,
        shard: Callable,
        compute_capability: str,
    ) -> tuple[Any, Moments]:
        """A parameter and its moments."""
        axis = kernel.axis_of_blocks(old)
        if axis is None:
            return kernel.reference(p, gradient, old=old, numbers=numbers, settings=settings)
        if reason := _objection(p, gradient, old=old, axis=axis, spec=spec, shard=shard):
            warned.once(f"XLA updates {list(p.shape)} in 8 bits, in more than one pass: {reason}")
            return kernel.reference(p, gradient, old=old, numbers=numbers, settings=settings)
        behind = int(np.prod(p.shape[axis + 1 :]))

        def local(p, gradient, old, numbers):
            return kernel.update(
                p,
                gradient,
                old=old,
                numbers=numbers,
                settings=settings,
                place=_place(p.shape, axis=axis, spec=spec, behind=behind),
                behind=behind,
                compute_capability=compute_capability,
            )

        specs = Moments(spec, spec, spec, spec)
        everywhere = jax.tree.map(lambda _: PartitionSpec(), numbers)
        arrays, given = (p, gradient, old, numbers), (spec, spec, specs, everywhere)
        return shd.map_parts(local, arrays, specs=given, out=(spec, specs))

    def _settings(self, decay: float = 0.0) -> Settings:
        return Settings(self.b1, self.b2, self.eps, decay)

    def _numbers(self, count, *, is_good, clip: Any = 1.0, rate: Any = 0.0) -> Numbers:
        of_m, of_v = (1 / (1 - decay**count) for decay in (self.b1, self.b2))
        clip, of_m, of_v, rate = (jnp.asarray(x, jnp.float32) for x in (clip, of_m, of_v, rate))
        return Numbers(clip, of_m, of_v, rate, count, jnp.asarray(is_good))

    def _factor(self, gradients):
        """What brings them to `clip_norm` where they are above it."""
        if not self.clip_norm:
            return 1.0
        norm = optax.tree.norm(gradients)
        return jnp.where(norm < self.clip_norm, 1.0, self.clip_norm / norm)

    def _clip(self) -> optax.GradientTransformation:
        """`optax.clip_by_global_norm` that multiplies by one number, as the program does."""

        def update(gradients, state, params=None):
            del params
            factor = self._factor(gradients)
            return jax.tree.map(lambda gradient: factor * gradient, gradients), state

        return optax.GradientTransformation(lambda _: optax.EmptyState(), update)

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
            numbers, settings = self._numbers(count, is_good=is_good), self._settings()
            made = [
                kernel.stepped(gradient, Moments(*parts), numbers=numbers, settings=settings)
                for gradient, parts in zip(leaves, old, strict=True)
            ]
            updates, moments = zip(*made, strict=True)
            tree_of_state = jax.tree.structure(state.mu)
            count = jnp.where(is_good, count, state.count)
            columns = (
                jax.tree.unflatten(tree_of_state, column) for column in zip(*moments, strict=True)
            )
            return jax.tree.unflatten(tree, updates), State(count, *columns)

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


def _axis_of_blocks(box) -> int | None:
    names = shd.axes_of(box) or ()
    return names.index(MODEL) if MODEL in names else None


def _objection(
    p, gradient, *, old: Moments, axis: int, spec: PartitionSpec, shard: Callable
) -> str | None:
    """Why the program does not take a device's part of this parameter, if anything."""
    if any(_split(entry) for entry in spec.partitions[axis + 2 :]):
        return "a dimension that is not the first behind the model's is split"

    def part(x):
        return jax.ShapeDtypeStruct(shard(x.shape) if x.ndim else (), x.dtype)

    return kernel.supported(part(p), part(gradient), old=Moments(*map(part, old)))


def _place(shape: tuple[int, ...], *, axis: int, spec: PartitionSpec, behind: int):
    """Of the first value of a device's part, of this shape, from the model dimension on."""
    entries = (*spec.partitions, *(None,) * len(shape))
    strides = (behind, int(np.prod(shape[axis + 2 :])))
    place = jnp.uint32(0)
    for entry, size, stride in zip(entries[axis:], shape[axis:], strides, strict=False):
        if names := _split(entry):
            index = jax.lax.axis_index(names).astype(jnp.uint32)
            place += index * np.uint32(size * stride % 2**32)
    return place


def _split(entry) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
