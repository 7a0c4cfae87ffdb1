"""Delayed scaling: operands are rounded by the largest values of the updates before.

So nothing looks at a tensor before it is rounded; its largest value is found as it is, for the
updates to come. Sources: FP8 Formats for Deep Learning (Micikevicius et al. 2022,
arXiv:2209.05433); Transformer Engine's DelayedScaling.

A largest value is wanted as the exponent of the scale that would have brought it into range. It
leaves the backward pass as a count: of a vector of zeros that goes in beside the weight, the
gradient is 1 at that exponent. The pass adds such vectors, over microbatches and over products that
share a weight, and the highest entry of their sum is the maximum. Devices have vectors of their
own, so that nothing is sent before the update.

L layers, N devices, E exponents.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.kernels.quantize import exponent_of
from jaxscale.ops import fp8

# Operands that have a history: what goes into a product, and what comes back. Weights have none:
# they are scaled by themselves once an update, in float32, and one pass finds all shards' largest.
X, GRADIENT = 0, 1
NUM_OPERANDS = 2


class Factors(NamedTuple):
    """One over the scales of operands, float32: [L] of a stack, scalars of a layer.

    Not the scales: XLA divides at another place forwards than backwards, no longer sees that the
    values are the same, and rounds them twice.
    """

    x: Any
    gradient: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metered:
    """A stack's weight, and what its products know of their other operands.

    counts_LN2E: zeros; the gradient is how often which scale would have been right, on each device.
    """

    weight: Any
    factors: Factors
    counts_LN2E: Any


class Meter(NamedTuple):
    """Of one layer's weight: `Metered` without the layers."""

    factors: Factors
    counts_N2E: Any


class Meters:
    """Those of a layer, by the weights' names."""

    def __init__(self, of: Mapping[str, Meter]):
        self._of = of
        self._scaled: list[tuple[Any, Any]] = []

    def of(self, name: str, *, x) -> Meter:
        """Products that read the same x take the factor of the first: it is rounded once.

        Their histories of it are the same. Raises ValueError for a name that no weight has.
        """
        if name not in self._of:
            raise ValueError(
                f"linear(name={name!r}): with delayed scales a product's name is that of its "
                f"weight; there are {', '.join(sorted(self._of)) or 'none'}"
            )
        meter = self._of[name]
        for known, factor in self._scaled:
            if known is x:
                return meter._replace(factors=meter.factors._replace(x=factor))
        self._scaled.append((x, meter.factors.x))
        return meter


def taken_out(weights) -> tuple[Any, Meters]:
    """A layer's weights without `Metered`, and the meters by name."""
    of: dict[str, Meter] = {}

    def take(path, leaf):
        if not _is_metered(leaf):
            return leaf
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        of[name] = Meter(leaf.factors, leaf.counts_LN2E)
        return leaf.weight

    weights = jax.tree_util.tree_map_with_path(take, weights, is_leaf=_is_metered)
    return weights, Meters(of)


def _is_metered(leaf) -> bool:
    return isinstance(leaf, Metered)


def quantise(x, factor, *, dtype) -> tuple[fp8.Quantised, jax.Array]:
    """x times `factor`, rounded to nearest or to the most there is; and its largest value.

    The latter is of what was rounded, float32 [1]: XLA then finds it in the kernel that rounds,
    where of x itself it is a second pass, or has x written in 16 bits first. What is at the end of
    the range may have been beyond, and counts as twice that. What is not finite is NaN in both.
    """
    most = float(jnp.finfo(dtype).max)
    factor = factor.astype(jnp.float32)  # stages hold it in x's dtype
    wide, scale = x.astype(jnp.float32) * factor, 1 / factor
    wide = jnp.where(jnp.isfinite(wide), jnp.clip(wide, -most, most), jnp.nan)
    values = wide.astype(dtype)
    amax = jnp.max(jnp.abs(values.astype(jnp.float32)))
    amax = jnp.where(amax == most, 2 * most, amax) * scale
    return fp8.Quantised(values, scale.reshape((1,) * x.ndim)), amax[None]


def counts_of(amax_N, *, of_gradient_N, dtypes):
    """float32 [N, 2, E]: 1 at the exponent of the scale for x and for the gradient.

    dtypes: in which they are rounded. Zeros where the gradient is: on a device whose tokens count
    in no loss, and in a stage of a pipeline that has nothing to do.
    """
    is_wanted = jnp.isfinite(of_gradient_N) & (of_gradient_N > 0)

    def counted(amax_N, dtype):
        exponents = jnp.arange(fp8.EXPONENTS.start, fp8.EXPONENTS.stop)
        is_right = exponent_of(amax_N, dtype)[:, None] == exponents
        return is_right & (is_wanted & jnp.isfinite(amax_N) & (amax_N > 0))[:, None]

    both = [counted(a, dtype) for a, dtype in zip((amax_N, of_gradient_N), dtypes, strict=True)]
    return jnp.stack(both, axis=1).astype(jnp.float32)
