"""The rules of a run's mesh, and where the gradients of its weights land.

ZeRO is a choice of rules: the fsdp axis splits the optimiser's state (1), also the gradients (2),
also the weights (3). On Explicit axes the gradients of a layer's matrices leave the backward pass
  3: as shards, reduce-scattered where the weight was gathered (`ops/linear.py`);
  2: as shards too, though the weight is whole (`ops.layers.Parted`);
  1: as each device's own sums. They are reduce-scattered once an update, in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxscale import sharding as shd
from jaxscale.config import AxisTypes, MeshConfig
from jaxscale.ops.layers import LAYERS, Parted


def rules_of(config: MeshConfig, *, model_rules: dict[str, Any]) -> shd.Rules:
    """What DP, HSDP, FSDP, TP and SP are, as ZeRO-3 has them; model_rules: the model's own."""
    rules: dict[str, Any] = dict(
        batch=("data", "fsdp", "expert"),
        seq=None,
        residual_seq="tensor" if config.sequence_parallel else None,
        act_embed=None,
        embed="fsdp",
        vocab="tensor",
        heads="tensor",
        attn_seq=None,
        attn_heads="tensor",
        head=None,
        mlp="tensor",
        norm=None,
        layers=None,
    )
    return shd.Rules(rules | model_rules)


def landing_of(config: MeshConfig, params, *, whole, split):
    """A tree of bools: the weights whose gradients land elsewhere than the weights are.

    Matrices of stacks, with ZeRO-1 and 2 on Explicit axes. whole, split: trees of the parameters'
    NamedShardings, as the model reads them and as the optimiser does.
    """
    applies = config.zero < 3 and config.axis_types == AxisTypes.EXPLICIT

    def lands(box, whole, split):
        is_stacked = (shd.axes_of(box) or ("",))[0] == LAYERS
        is_split = jax.tree.leaves(whole) != jax.tree.leaves(split)
        return jax.tree.map(lambda _: applies and is_stacked and is_split, box)

    boxes = dict(is_leaf=lambda x: shd.axes_of(x) is not None)
    return jax.tree.map(lands, params, whole, split, **boxes)


def hold(params, plan):
    """The parameters as the tree to differentiate; the gradients take its types."""
    tokens = set(shd.mesh_axes("batch seq"))

    def held(leaf, lands, split):
        if not lands:
            return leaf
        if plan.config.mesh.zero == 2:
            return jax.sharding.reshard(leaf, split)
        return jax.sharding.reshard(leaf, P(*jax.typeof(leaf).sharding.spec, reduced=tokens))

    return jax.tree.map(held, params, plan.landing, plan.update_shardings)


def read(held, params, *, plan):
    """The parameters as the model reads them, out of the tree that is differentiated."""
    if plan.config.mesh.zero != 2:
        return held
    return jax.tree.map(
        lambda part, whole, lands: Parted(whole=whole, part=part) if lands else part,
        held,
        params,
        plan.landing,
    )


def land(gradients, plan):
    """A microbatch's gradients where they are added up: as ZeRO says, whole or in shards."""
    if plan.config.mesh.zero >= 2:
        return shd.constrain(gradients, plan.update_shardings)
    return jax.tree.map(
        lambda leaf, lands, like: leaf if lands else shd.constrain(leaf, like.sharding),
        gradients,
        plan.landing,
        plan.state.params,
    )


def summed(gradients, plan):
    """The gradients of an update as the optimiser reads them; sums yet to be made are made."""

    def reduce_scattered(leaf, sharding):
        left = jax.typeof(leaf).sharding.spec.unreduced
        if not left:
            return leaf
        # In two steps, the second of which sums the shares; in one XLA sums whole gradients.
        spec = sharding.spec
        left = left - set(jax.tree.leaves(tuple(spec.partitions)))
        return jax.sharding.reshard(leaf, P(*spec.partitions, unreduced=left))

    gradients = jax.tree.map(reduce_scattered, gradients, plan.update_shardings)
    return shd.constrain(gradients, plan.update_shardings)


def zero_gradients(held, plan):
    """Zeros of the types that `land` gives."""

    def zeros(leaf):
        reduced = jax.typeof(leaf).sharding.spec.reduced
        if not reduced:
            return jnp.zeros_like(leaf)
        # Each device adds up sums of its own tokens.
        zeros = jnp.zeros(leaf.shape, leaf.dtype)
        spec = jax.typeof(leaf).sharding.spec
        return jax.sharding.reshard(zeros, P(*spec.partitions, unreduced=reduced))

    return land(jax.tree.map(zeros, held), plan)
