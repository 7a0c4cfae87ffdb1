"""Dynamic loss scaling (Micikevicius et al. 2018, arXiv:1710.03740), with Megatron's hysteresis.

float16 ends at 6e-8 and at 65,504, and many gradients are below. So the loss is multiplied before
gradients are made of it, and they are divided once they are summed, in float32. Where they are not
finite then, the update is skipped and the scale lowered. Powers of two: nothing is rounded by them.
Everything is in the compiled step. Other dtypes have `()` in the place of a scale, and their
programs nothing of this.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.config import Config, Dtype, LossScaleConfig

# Of the state.
FIELD = "loss_scale"


class LossScale(NamedTuple):
    """scale: float32. num_good: int32, steps without overflow since it last changed or overflowed.

    credits: int32, overflows until it is halved.
    """

    scale: Any
    num_good: Any
    credits: Any


def init(config: Config) -> LossScale | tuple[()]:
    """What a run begins with."""
    if config.dtype != Dtype.FLOAT16:
        return ()
    settings = config.loss_scale
    return LossScale(
        jnp.asarray(settings.start, jnp.float32),
        jnp.zeros((), jnp.int32),
        jnp.asarray(settings.hysteresis, jnp.int32),
    )


def scaled(loss, *, by: LossScale | tuple[()]):
    """The loss, or a share of it, with the scale."""
    return loss * by.scale if by else loss


def of_logits(share, *, by: LossScale | tuple[()]):
    """By how much to enlarge the gradients of logits (`ops/loss.py`); None: not at all.

    share: what their loss is multiplied by, scaled. Where that makes them smaller they are left as
    they are: they are 1 at most.
    """
    return jnp.maximum(share, 1.0) if by else None


def unscaled(tree, *, by: LossScale | tuple[()]):
    """The tree, of float32, without the scale."""
    if not by:
        return tree
    inverse = 1.0 / by.scale
    return jax.tree.map(lambda leaf: leaf * inverse, tree)


def after(before: LossScale, *, has_overflow, settings: LossScaleConfig) -> LossScale:
    """That of the next step. has_overflow: bool, whether this step's gradients are not finite."""
    num_good = before.num_good + 1
    grows = num_good >= settings.growth_every
    grown = LossScale(
        jnp.where(grows, jnp.minimum(2 * before.scale, settings.most), before.scale),
        jnp.where(grows, 0, num_good),
        jnp.where(grows, settings.hysteresis, before.credits),
    )
    credits = jnp.maximum(before.credits - 1, 0)
    lower = jnp.maximum(before.scale / 2, settings.least)
    lowered = LossScale(
        jnp.where(credits == 0, lower, before.scale), jnp.zeros_like(num_good), credits
    )
    return jax.tree.map(lambda low, high: jnp.where(has_overflow, low, high), lowered, grown)


def metrics_of(before: LossScale, *, has_overflow, settings: LossScaleConfig) -> dict:
    """loss_scale, float32, which this step had; overflow, int32, 1 where it was too large.

    At the least scale it is not the scale that is wrong.
    """
    is_too_large = has_overflow & (before.scale > settings.least)
    return dict(loss_scale=before.scale, overflow=is_too_large.astype(jnp.int32))


# Checkpoints of runs that had another dtype.


def for_checkpoint(wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The wanted leaves of a state as a checkpoint with the saved ones can give them.

    Without a scale that is not there, and with one that is there and is not wanted.
    """
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=wanted["step"].sharding)
    unwanted = {
        name: scalar.update(dtype=jnp.dtype(leaf.dtype))
        for name, leaf in saved.items()
        if _is_ours(name) and name not in wanted
    }
    there = {name: leaf for name, leaf in wanted.items() if name in saved or not _is_ours(name)}
    return there | unwanted


def of_checkpoint(values: Mapping[str, Any], wanted: Mapping[str, Any], *, config: Config):
    """What was read for `for_checkpoint` as it is wanted; a scale that was not there begins."""
    kept = {name: value for name, value in values.items() if name in wanted}
    first = {f"{FIELD}.{name}": value for name, value in _fields(init(config)).items()}
    return {
        name: jax.device_put(value, wanted[name].sharding) for name, value in first.items()
    } | kept


def _fields(scale: LossScale | tuple[()]) -> dict[str, Any]:
    return scale._asdict() if isinstance(scale, LossScale) else {}


def _is_ours(name: str) -> bool:
    return name.startswith(f"{FIELD}.")
