"""What a run carries from update to update."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.ops.delayed import Metered
from jaxscale.ops.layers import Parted
from jaxscale.step import delayed, loss_scale
from jaxscale.step.relayout import Relayout, on_auto_axes


class TrainState(NamedTuple):
    """step: int32, updates done; the others are trees of arrays, parameters in float32.

    params: trained. frozen: parameters that are held fixed, without gradient or optimiser state.
    extra: the model's other variables (scales, counters), carried and not trained. loss_scale: with
    float16, else () (`step/loss_scale.py`). amax: with delayed scales, else () (`step/delayed.py`).
    """

    step: Any
    params: Any
    frozen: Any
    extra: Any
    opt_state: Any
    loss_scale: Any = ()
    amax: Any = ()


def split_model(model: nnx.Module, *, frozen: tuple[str, ...] = ()) -> tuple[Any, Any, Any, Any]:
    """(graphdef, frozen, params, extra); frozen: parts of the paths of parameters to hold fixed."""

    def is_frozen(path, _) -> bool:
        name = ".".join(map(str, path))
        return any(part in name for part in frozen)

    held = nnx.All(nnx.Param, is_frozen)
    graphdef, *states = nnx.split(model, held, nnx.Param, ...)
    fixed, params, extra = states
    return graphdef, fixed, params, extra


def init_state(plan) -> TrainState:
    """The first state, made in shards; the same values on every mesh."""

    def weights(key):
        model = plan.config.model.build(nnx.Rngs(key))
        _, frozen, params, extra = split_model(model, frozen=plan.config.frozen)
        return params, frozen, extra

    def init(key):
        params, frozen, extra = weights(key)
        opt_state = plan.optimizer.init(params)
        step, scale = jnp.zeros((), jnp.int32), loss_scale.init(plan.config)
        amax = delayed.init(plan.state.amax)
        return TrainState(step, params, frozen, extra, opt_state, scale, amax)

    # Outside of `use`: the partitioner splits the generation of the values by what the outputs
    # ask for.
    key, shardings = jax.random.key(plan.config.seed), jax.tree.map(_sharding_of, plan.state)
    if plan.pipeline is None:
        return jax.jit(init, out_shardings=shardings)(key)
    params, frozen, extra = _laid_out(weights, key, plan=plan)
    opt_state = jax.jit(plan.optimizer.init, out_shardings=shardings.opt_state)(params)
    scalars = jnp.zeros((), jnp.int32), loss_scale.init(plan.config)
    step, scale = jax.device_put(scalars, (shardings.step, shardings.loss_scale))
    amax = delayed.begin(plan.state.amax)
    return TrainState(step, params, frozen, extra, opt_state, scale, amax)


def _laid_out(weights: Callable, key, *, plan):
    """What `weights(key)` gives, as the stages of the plan hold it.

    Made in the model's own order, and then moved: made where it is held, XLA would generate every
    stage's values on each, and they would differ in the last bit.
    """
    held = plan.state.params, plan.state.frozen, plan.state.extra
    wanted, num_layers = to_flat(held), plan.config.model.num_layers
    relayout = Relayout((num_layers,), plan.lead, num_layers=num_layers)
    asked = relayout.as_saved(wanted, to_flat(jax.eval_shape(weights, key)))
    shardings = {name: on_auto_axes(leaf.sharding) for name, leaf in asked.items()}
    made = jax.jit(lambda key: to_flat(weights(key)), out_shardings=shardings)(key)
    moved = relayout.as_wanted(made, wanted)
    return from_flat(
        held, {name: jax.device_put(value, wanted[name].sharding) for name, value in moved.items()}
    )


def _sharding_of(leaf):
    return leaf.sharding


def to_flat(state) -> dict[str, Any]:
    """The leaves of a state, or a part of it, by name ("params.layers.qkv"), for checkpoints."""
    return {_leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def from_flat(like, flat: dict[str, Any]):
    """The inverse of `to_flat`."""
    return jax.tree_util.tree_map_with_path(lambda path, _: flat[_leaf_name(path)], like)


def replaced(tree, values: dict[str, Any]):
    """The tree with these values in place of the leaves of their names ("layers.amax")."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: values.get(_leaf_name(path), leaf), tree
    )


def metered(tree, *, factors: Mapping[str, Any], counts: Mapping[str, Any]):
    """A tree of parameters with `Metered` around those of these names."""

    def metered(path, leaf):
        name = _leaf_name(path)
        return Metered(leaf, factors[name], counts[name]) if name in factors else leaf

    def is_parted(leaf) -> bool:
        return isinstance(leaf, Parted)

    return jax.tree_util.tree_map_with_path(metered, tree, is_leaf=is_parted) if factors else tree


def _leaf_name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
