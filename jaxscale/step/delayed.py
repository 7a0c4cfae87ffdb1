"""What a run with delayed scales knows of its operands' largest values: of the last updates.

`ops/delayed.py` says how they get out of a backward pass. Everything is in the compiled step. Other
recipes have `()` in the place of histories, and their programs nothing of this.

L layers (with stages: the leading dimensions of a stack as they hold it), N devices, E exponents,
H updates.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale import sharding as shd
from jaxscale.config import Config, PrecisionConfig, Recipe
from jaxscale.ops import fp8
from jaxscale.ops.delayed import GRADIENT, NUM_OPERANDS, Factors, X
from jaxscale.ops.layers import LAYERS

# Of the state.
FIELD = "amax"
# In a history: nothing is known of that update.
EMPTY = -128
# Of the scale that is taken where nothing is known. x: values up to 28 are in range, those above
# 6e-5 are seen. Gradients: up to 32 times one over the tokens of an update, by which their losses
# are multiplied, and in e5m2 down to 2**-32 times that.
START_X, START_GRADIENT = -4, 5
# By so many powers of two that scale is raised where it was too small; others by one at a time.
FIRST_STEP = 6

log = logging.getLogger(__name__)


def histories_of(weights: Mapping[str, Any], *, config: PrecisionConfig, num_leading: int):
    """What a run knows, as ShapeDtypeStructs: int8 [L, 2, H] of each weight that has it, else ().

    They hold exponents of scales, the latest first. weights: of all layers, by name; their first
    num_leading dimensions are L.
    """
    how = fp8.fp8_of(config)
    if how is None or how.recipe != Recipe.FP8_DELAYED:
        return ()
    return {
        name: jax.ShapeDtypeStruct(
            (*leaf.shape[:num_leading], NUM_OPERANDS, config.history), jnp.int8
        )
        for name, leaf in weights.items()
        if how.is_for(name)
    }


def shardings(histories, weights: Mapping[str, NamedSharding], *, num_leading: int):
    """Split as the layers of the weights are, whose shardings are given by name."""
    return {
        name: NamedSharding(weights[name].mesh, P(*weights[name].spec[:num_leading]))
        for name in dict(histories)
    } or ()


def init(like):
    """What a run begins with: histories like these, in which nothing is known."""
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, EMPTY, leaf.dtype), like)


def begin(like):
    """`init`, laid out as these ShapeDtypeStructs with shardings are."""
    return jax.device_put(init(like), jax.tree.map(lambda leaf: leaf.sharding, like))


def factors(histories, *, config: Config) -> dict[str, Factors]:
    """Of each weight, [L]."""

    def of_weight(history):
        factor = jnp.ldexp(jnp.float32(1), -_exponents(history, config=config))
        return Factors(factor[..., X], factor[..., GRADIENT])

    return {name: of_weight(history) for name, history in dict(histories).items()}


def _exponents(history_L2H, *, config: Config):
    """int32 [L, 2]: of the scales that an update takes."""
    how = fp8.fp8_of(config.precision)
    assert how is not None
    _, most = math.frexp(float(jnp.finfo(how.gradient_dtype).max))
    share = -math.ceil(math.log2(config.batch_size * config.seq_len))
    start = jnp.array([START_X, share + START_GRADIENT - most + 1], jnp.int32)
    seen_L2 = history_L2H.max(axis=-1).astype(jnp.int32)
    wanted_L2 = jnp.where(seen_L2 == EMPTY, start, seen_L2 + config.precision.margin)
    return jnp.clip(wanted_L2, fp8.EXPONENTS.start, fp8.EXPONENTS.stop - 1)


def zero_counts(plan) -> dict[str, jax.Array]:
    """float32 [L, N, 2, E] of each weight, to be differentiated by; each device has its own."""

    def zeros(history, sharding):
        (axes,) = sharding.spec[-1:]
        num_devices = math.prod(plan.mesh.shape[axis] for axis in axes)
        shape = (*history.shape[:-2], num_devices, NUM_OPERANDS, len(fp8.EXPONENTS))
        return shd.constrain(jnp.zeros(shape, jnp.float32), sharding)

    of = count_shardings(plan)
    return {name: zeros(plan.state.amax[name], sharding) for name, sharding in of.items()}


def count_shardings(plan) -> dict[str, NamedSharding]:
    """Of `zero_counts`: N split by all mesh axes that do not split L."""
    axes = tuple(a for a in plan.mesh.axis_names if a not in plan.rules.mesh_axes(LAYERS))

    def of_weight(history):
        layers = history.sharding.spec.partitions
        rest = [None] * (history.ndim - 2 - len(layers))
        return NamedSharding(history.sharding.mesh, P(*layers, *rest, axes))

    return {name: of_weight(history) for name, history in dict(plan.state.amax).items()}


def after(histories, counts, *, config: Config):
    """(histories with one update more, the metric saturated).

    saturated: how many operands, of all layers, had values beyond the range of 8 bits, int32.
    counts: the gradients of `zero_counts`, over all microbatches.
    """
    if not histories:
        return histories, {}
    latest, num_beyond = {}, []
    for name, history in histories.items():
        used, seen = _exponents(history, config=config), _highest(counts[name])
        is_beyond = seen > used
        is_first = (history == EMPTY).all(axis=-1)
        latest[name] = jnp.where(is_beyond & is_first, used + FIRST_STEP, seen)
        num_beyond.append(is_beyond.sum(dtype=jnp.int32))
    following = {
        name: jnp.concatenate([latest[name].astype(jnp.int8)[..., None], of[..., :-1]], axis=-1)
        for name, of in histories.items()
    }
    return following, dict(saturated=jnp.stack(num_beyond).sum(dtype=jnp.int32))


def _highest(counts_LN2E):
    """int32 [L, 2]: the highest exponent that was counted on any device, or EMPTY."""
    exponents = jnp.arange(fp8.EXPONENTS.start, fp8.EXPONENTS.stop)
    return jnp.where(counts_LN2E > 0, exponents, EMPTY).max(axis=(-3, -1))


# Checkpoints of runs that had another recipe, other weights in 8 bits or a longer history.


def for_checkpoint(wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The wanted leaves of a state as a checkpoint with the saved ones can give them.

    Without histories that are not there, with those that are there and not wanted, and as long as
    they are there.
    """
    whole = wanted["step"]
    ours = {
        name: wanted[name].update(shape=(*wanted[name].shape[:-1], leaf.shape[-1]))
        if name in wanted
        else whole.update(shape=tuple(leaf.shape), dtype=jnp.dtype(leaf.dtype))
        for name, leaf in saved.items()
        if _is_ours(name)
    }
    return {name: leaf for name, leaf in wanted.items() if not _is_ours(name)} | ours


def of_checkpoint(values: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What was read for `for_checkpoint` as it is wanted; histories that were not there begin."""
    missing = [name for name in wanted if _is_ours(name) and name not in values]
    if missing:
        log.info(
            "the checkpoint has no largest values for delayed scales of %s: they begin with what "
            "is usual, and are known after an update",
            ", ".join(name.removeprefix(f"{FIELD}.") for name in missing),
        )
    fitted = {
        name: _fitted(values.get(name), leaf) for name, leaf in wanted.items() if _is_ours(name)
    }
    return {name: value for name, value in values.items() if name in wanted} | fitted


def _fitted(history, like: jax.ShapeDtypeStruct) -> jax.Array:
    """The latest that there is room for."""

    def fitted(history):
        *lead, length = like.shape
        history = jnp.full((*lead, 0), EMPTY, jnp.int8) if history is None else history
        history = history[..., :length]
        missing = length - history.shape[-1]
        return jnp.pad(history, [(0, 0)] * len(lead) + [(0, missing)], constant_values=EMPTY)

    return jax.device_put(jax.jit(fitted)(history), like.sharding)


def _is_ours(name: str) -> bool:
    return name.startswith(f"{FIELD}.")
