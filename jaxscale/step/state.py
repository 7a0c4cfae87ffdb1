"""What a run carries from update to update."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class TrainState(NamedTuple):
    """step: int32, updates done; the others are trees of arrays, parameters in float32.

    params: trained. frozen: parameters that are held fixed, without gradient or optimiser state.
    extra: the model's other variables (scales, counters), carried and not trained.
    """

    step: Any
    params: Any
    frozen: Any
    extra: Any
    opt_state: Any


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

    def init(key):
        model = plan.config.model.build(nnx.Rngs(key))
        _, frozen, params, extra = split_model(model, frozen=plan.config.frozen)
        opt_state = plan.optimizer.init(params)
        return TrainState(jnp.zeros((), jnp.int32), params, frozen, extra, opt_state)

    # Outside of `use`: the partitioner splits the generation of the values by what the outputs
    # ask for.
    shardings = jax.tree.map(lambda leaf: leaf.sharding, plan.state)
    return jax.jit(init, out_shardings=shardings)(jax.random.key(plan.config.seed))


def to_flat(state) -> dict[str, Any]:
    """The leaves of a state, or a part of it, by name ("params.layers.qkv"), for checkpoints."""
    return {_leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def from_flat(like: TrainState, flat: dict[str, Any]) -> TrainState:
    """The inverse of `to_flat`."""
    return jax.tree_util.tree_map_with_path(lambda path, _: flat[_leaf_name(path)], like)


def replaced(tree, values: dict[str, Any]):
    """The tree with these values in place of the leaves of their names ("layers.amax")."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: values.get(_leaf_name(path), leaf), tree
    )


def _leaf_name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
