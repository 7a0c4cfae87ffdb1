"""What a run carries from step to step, and where each of its arrays lives."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxscale import sharding as shd
from jaxscale.config import Config
from jaxscale.data.loader import Corpus
from jaxscale.ops.execution import Execution, execution_of
from jaxscale.xla import options as xla


class TrainState(NamedTuple):
    """step: int32, updates done; params and opt_state: float32 trees."""

    step: Any
    params: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run laid out on a mesh before any array exists: abstract state, shardings, optimiser.

    ZeRO is a choice of rules: the fsdp axis splits the optimiser state (1), also the gradients (2), also the weights (3).
    """

    config: Config
    mesh: Mesh
    rules: shd.Rules
    execution: Execution
    graphdef: Any
    schedule: optax.Schedule
    optimizer: optax.GradientTransformation
    abstract: TrainState
    shardings: TrainState
    gradient_shardings: Any
    # Of the parameters while they are updated: those of the optimiser's state.
    update_shardings: Any
    # Of the train step.
    compiler_options: dict[str, Any]


def make_plan(config: Config, sizes: dict[str, int], *, devices=None) -> Plan:
    """devices: those of the mesh, all there are unless given; they may be of a topology that is elsewhere.

    Raises ValueError for sizes that the mesh axes do not divide. Touches no memory of the devices.
    """
    mesh = shd.make_mesh(sizes, devices=devices, axis_types=str(config.mesh.axis_types))
    device = mesh.devices.flat[0]
    split = make_rules(config, sizes)
    whole = split.replace(embed=None)
    rules = split if config.mesh.zero == 3 else whole
    schedule = config.schedule.build(config.steps)
    optimizer = config.optim.build(schedule)
    model = jax.eval_shape(lambda: config.model.build(nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    opt_state = jax.eval_shape(optimizer.init, params)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    specs = functools.partial(shd.shardings, mesh=mesh)
    return Plan(
        config=config, mesh=mesh, rules=rules, execution=execution_of(config, device), graphdef=graphdef, schedule=schedule, optimizer=optimizer,
        abstract=TrainState(step, params, opt_state),
        shardings=TrainState(specs(step, rules=rules), specs(params, rules=rules), specs(opt_state, rules=split)),
        gradient_shardings=specs(params, rules=split if config.mesh.zero >= 2 else whole),
        update_shardings=specs(params, rules=split),
        compiler_options=xla.compiler_options(config, sizes, platform=device.platform, device_kind=device.device_kind),
    )  # fmt: skip


def plan_for_data(config: Config, corpus: Corpus, sizes: dict[str, int]) -> Plan:
    """`make_plan` with the bound on documents a row that the data needs, where the config leaves it open."""
    data = dataclasses.replace(
        config.data, max_documents_per_row=corpus.train.max_documents_per_row
    )
    return make_plan(dataclasses.replace(config, data=data), sizes)


def make_rules(config: Config, sizes: dict[str, int]) -> shd.Rules:
    """The rules of the mesh axes: what DP, HSDP, FSDP, TP and SP are."""
    splits_kv_heads = config.model.num_kv_heads % sizes["tensor"] == 0
    return shd.Rules(
        batch=("data", "fsdp", "expert"),
        seq=None,
        residual_seq="tensor" if config.mesh.sequence_parallel else None,
        act_embed=None,
        embed="fsdp",
        vocab="tensor",
        heads="tensor",
        kv_heads="tensor" if splits_kv_heads else None,
        head=None,
        mlp="tensor",
        norm=None,
        layers=None,
    )


def init_state(plan: Plan) -> TrainState:
    """The first state, made in shards; the same values on every mesh."""

    def init(key):
        params = nnx.split(plan.config.model.build(nnx.Rngs(key)))[1]
        return TrainState(jnp.zeros((), jnp.int32), params, plan.optimizer.init(params))

    # Outside of `use`: the partitioner splits the generation of the values by what the outputs ask for.
    return jax.jit(init, out_shardings=plan.shardings)(jax.random.key(plan.config.seed))


def to_flat(state: TrainState) -> dict[str, Any]:
    """The leaves by name ("params.layers.qkv"), for checkpoints."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {_leaf_name(path): leaf for path, leaf in leaves}


def from_flat(like: TrainState, flat: dict[str, Any]) -> TrainState:
    """The inverse of `to_flat`."""
    return jax.tree_util.tree_map_with_path(lambda path, _: flat[_leaf_name(path)], like)


def _leaf_name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def abstract_state(plan: Plan) -> TrainState:
    """Shapes, dtypes and shardings of the state: for a restore, or to compile before it exists."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        plan.abstract, plan.shardings,
    )  # fmt: skip
