"""The rules of a run's mesh, and where the gradients of its weights land.

ZeRO is a choice of rules: the fsdp axis, and the context axis with it, splits the optimiser's state
(1), also the gradients (2), also the weights (3). On Explicit axes the gradients of a layer's
matrices leave the backward pass
  3: as shards, reduce-scattered where the weight was gathered (`ops/linear.py`);
  2: as shards too, though the weight is whole (`ops.layers.Parted`);
  1: as each device's own sums. They are reduce-scattered once an update, in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxscale import sharding as shd
from jaxscale.config import (
    OF_WHOLE_ROWS,
    ROW_AXES,
    Attention,
    AxisTypes,
    Config,
    Exchange,
    MeshConfig,
    rows_of_group,
)
from jaxscale.ops.attention import CUDNN_ENDS
from jaxscale.ops.layers import LAYERS, Parted


def rules_of(
    config: MeshConfig,
    *,
    model_rules: dict[str, Any],
    exchange: Exchange = Exchange.ALL_TO_ALL,
    splits_rows: bool = False,
) -> shd.Rules:
    """What DP, HSDP, FSDP, TP, SP and context parallelism are, as ZeRO-3 has them.

    config: with every size known. model_rules: the model's own. exchange: with all-to-all,
    attention has whole rows and a part of the heads; else its sequence stays split, and
    `ops/context.py` brings the keys. The stages of a pipeline share the layers, and the vocabulary.
    splits_rows: whether sequence parallelism splits rows, and not the sequence.
    """
    context = ("context",) if config.context > 1 else ()
    is_all_to_all = exchange == Exchange.ALL_TO_ALL
    splits_sequence = config.sequence_parallel and not splits_rows
    rules: dict[str, Any] = dict(
        batch=ROW_AXES,
        seq=context,
        residual_rows=(*ROW_AXES, "tensor") if splits_rows else ROW_AXES,
        residual_seq=(*context, "tensor") if splits_sequence else context,
        act_embed=None,
        embed=("fsdp", *context),
        vocab="tensor",
        heads="tensor",
        attn_seq=None if is_all_to_all else context,
        # In this order: each device's heads are then a part of those it has before the exchange.
        attn_heads=("tensor", *context) if is_all_to_all else "tensor",
        head=None,
        mlp="tensor",
        norm=None,
        layers=None,
    )
    if config.stage > 1:
        rules |= dict(layers="stage", chunks=None, vocab=("stage", "tensor"))
    rules |= model_rules
    if not is_all_to_all:
        rules["attn_kv_heads"] = rules["kv_heads"]
    return shd.Rules(rules)


# GPUs that NVLink joins, and bytes of a layer's keys and values that are no matter on one.
NODE, GATHERED_BYTES = 8, 4 * 2**30


def exchange_of(config: Config, sizes: dict[str, int]) -> Exchange:
    """How attention's devices exchange what `context` splits: config.context.exchange, or the best.

    `auto` is the first of these that can be. With t = tensor and c = context, for n query and k key
    heads of size h and a device's rows of s tokens in all, 2 bytes a value, a layer sends and
    receives forward, (c - 1) / c of
      all_to_all: 4 s h (n + k) / (t c) bytes: q, k, v and the output, a part each; one kernel call.
      all_gather: 4 s h k / t bytes, of keys and values alone; 4 calls. For a layer it holds those,
        and in the backward pass their float32 gradients: 12 s h k / t bytes.
      ring: as many bytes, beside the kernels; 1 + 2 c calls, of which none sees more than the
        c-th part of a row; it holds a c-th part, twice.
    So all_to_all wherever it can, since its kernel call is the one of a whole row; it can if each
    device gets heads, and key heads or a share of one. Beyond that all_gather; ring where the 12
    s h k / t bytes are over GATHERED_BYTES, or if t * c GPUs are more than a NODE.

    Raises ValueError for what cannot be, with the key to change.
    """
    wanted, context = config.context.exchange, sizes["context"]
    if context == 1:
        return Exchange.ALL_TO_ALL
    objection = _objection_to_all_to_all(config.model, sizes)
    if wanted == Exchange.AUTO:
        wanted = _cheapest(config, sizes) if objection else Exchange.ALL_TO_ALL
    elif wanted == Exchange.ALL_TO_ALL and objection:
        raise ValueError(f"{objection}, or config.context.exchange='all_gather'")
    if wanted == Exchange.ALL_TO_ALL:
        return wanted
    for key in OF_WHOLE_ROWS:
        if (value := getattr(config.model, key, None)) is not None:
            raise ValueError(
                f"config.model.{key}={value} needs whole rows, which all-to-all alone gives: "
                f"{objection}"
            )
    is_replayed = config.deterministic or config.integrity.replay_every > 0
    if CUDNN_ENDS and is_replayed and config.attention == Attention.CUDNN:
        raise ValueError(
            f"config.attention='cudnn' cannot run with config.context.exchange={wanted.value!r} "
            f"here: {CUDNN_ENDS}; set config.attention='auto'"
        )
    if config.seq_len % (2 * context):
        raise ValueError(
            f"config.seq_len={config.seq_len}: config.context.exchange={wanted.value!r} deals "
            f"each row as 2 * config.mesh.context = {2 * context} chunks; make it a multiple"
        )
    return wanted


def _cheapest(config: Config, sizes: dict[str, int]) -> Exchange:
    """Of the two that split no heads."""
    model, gpus = config.model, sizes["tensor"] * sizes["context"]
    kv_heads = max(1, model.num_kv_heads // sizes["tensor"])
    num_bytes = 12 * rows_of_group(config, sizes) * config.seq_len * kv_heads * model.head_dim()
    is_light = num_bytes <= GATHERED_BYTES and gpus <= NODE
    return Exchange.ALL_GATHER if is_light else Exchange.RING


def _objection_to_all_to_all(model, sizes: dict[str, int]) -> str | None:
    tensor, context = sizes["tensor"], sizes["context"]
    parts, heads, kv_heads = tensor * context, model.num_heads, model.num_kv_heads
    where = f"tensor={tensor} * context={context}" if tensor > 1 else f"context={context}"
    if heads % parts:
        return (
            f"config.model.num_heads={heads} cannot be split over {where} by all-to-all; set "
            f"config.mesh.context to a divisor of {heads // tensor}"
        )
    mine, group = heads // parts, heads // kv_heads
    if mine % group and group % mine:
        return (
            f"config.model.num_kv_heads={kv_heads} cannot be split over {where} by all-to-all, "
            f"nor shared: {mine} query heads a device, {group} a key head; set "
            "config.mesh.context so that one divides the other"
        )
    return None


def landing_of(config: MeshConfig, params, *, whole, split):
    """A tree of bools: the weights whose gradients land elsewhere than the weights are.

    Matrices of stacks, with ZeRO-1 and 2 on Explicit axes. whole, split: trees of the parameters'
    NamedShardings, as the model reads them and as the optimiser does.
    """
    # jax has no gradients that are yet to be summed where some axes are manual, as stages are.
    applies = config.zero < 3 and config.axis_types == AxisTypes.EXPLICIT and config.stage == 1

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
