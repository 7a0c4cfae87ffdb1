"""A run laid out on a mesh before any array exists."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxscale import config as run_config
from jaxscale import sharding as shd
from jaxscale import warned
from jaxscale.config import AsyncTensor, Config, Exchange, Recipe, num_weight_shards
from jaxscale.data.loader import Corpus, open_dataset
from jaxscale.kernels import block_scaled_matmul
from jaxscale.ops.execution import Execution
from jaxscale.ops.fp8 import fp8_of
from jaxscale.ops.layers import LAYERS
from jaxscale.parallel import choice
from jaxscale.parallel.choice import Pipeline
from jaxscale.step import delayed, layout, loss_scale
from jaxscale.step.state import TrainState, split_model, to_flat
from jaxscale.xla import options

# Ada and Hopper.
FP8_CAPABILITY = 8.9


@dataclasses.dataclass(frozen=True)
class Plan:
    """What training, compiling ahead of time and benchmarks all start from.

    rules: of arrays as the model reads them. state: ShapeDtypeStructs with shardings.
    update_shardings: of the parameters while they are updated; those of the optimiser's state.
    landing: see step/layout.py. pipeline: with stages, how they work; the stacks of layers in the
    state are then held as its placement says. compiler_options: of the update; shared_options:
    those of them that every other program of the run has too.
    """

    config: Config
    mesh: Mesh
    rules: shd.Rules
    execution: Execution
    graphdef: Any
    schedule: optax.Schedule
    optimizer: optax.GradientTransformation
    state: TrainState
    update_shardings: Any
    landing: Any
    pipeline: Pipeline | None
    compiler_options: dict[str, Any]
    shared_options: dict[str, Any]

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading dimensions of a stack's arrays in the state."""
        return self.pipeline.placement.lead if self.pipeline else (self.config.model.num_layers,)

    @property
    def batch_shape(self) -> tuple[int, int, int]:
        """Microbatches, rows of each, tokens of a row."""
        num = self.config.grad_accumulation
        return num, self.config.batch_size // num, self.config.seq_len


def corpus_of_run(config: Config) -> Corpus:
    """Raises ValueError, before any device is touched, for data that cannot be read or used."""
    return open_dataset(
        config.data,
        seed=config.seed,
        seq_len=config.seq_len,
        vocab_size=config.model.vocab_size,
    )


def plan_of_run(config: Config, *, devices=None, corpus: Corpus | None = None) -> Plan:
    """devices: those of the mesh, all there are unless given; they may be elsewhere.

    corpus: the run's data, which bounds the documents of a row where the config leaves that open.
    Raises ValueError for a config that cannot be, or that these devices do not divide. Touches no
    memory of the devices.
    """
    run_config.validate(config)
    devices = jax.devices() if devices is None else devices
    _check_precision(config, devices[0])
    run_config.validate_on(config, len(devices))
    # What `auto` becomes has needs of its own.
    config = _with_async_tensor(config, devices)
    sizes = run_config.validate_on(config, len(devices))
    if corpus is not None:
        bound = corpus.train.max_documents_per_row
        data = dataclasses.replace(config.data, max_documents_per_row=bound)
        config = dataclasses.replace(config, data=data)
    mesh = shd.make_mesh(sizes, devices=devices, axis_types=str(config.mesh.axis_types))
    exchange = layout.exchange_of(config, sizes)
    known: dict[str, Any] = dict(sizes)  # where the config may say -1
    mesh_config = dataclasses.replace(config.mesh, **known)
    model_rules = config.model.rules(sizes)
    split = layout.rules_of(
        mesh_config,
        model_rules=model_rules,
        exchange=exchange,
        splits_rows=run_config.splits_rows(config, sizes),
    )
    rules = split if config.mesh.zero == 3 else split.replace(embed=None)
    schedule = config.schedule.build(config.steps)
    optimizer = config.optim.build(schedule)
    model = jax.eval_shape(lambda: config.model.build(nnx.Rngs(0)))
    pipeline = None
    if sizes["stage"] > 1:
        pipeline = _pipeline_of(config, model, sizes=sizes)
    graphdef, abstract = _abstract_state(config, model, optimizer=optimizer, pipeline=pipeline)
    shardings = functools.partial(shd.shardings, mesh=mesh, rules=rules)
    split_shardings = functools.partial(shd.shardings, mesh=mesh, rules=split)
    update_shardings = split_shardings(abstract.params)
    opt_axes = config.optim.state_axes(abstract.opt_state, params=abstract.params)
    params, frozen = shardings(abstract.params), shardings(abstract.frozen)
    state_shardings = TrainState(
        step=shardings(abstract.step),
        params=params,
        frozen=frozen,
        extra=shardings(abstract.extra),
        opt_state=_of_optimizer(config, split_shardings, state=abstract.opt_state, axes=opt_axes),
        loss_scale=shardings(abstract.loss_scale),
        amax=delayed.shardings(
            abstract.amax,
            to_flat(params) | to_flat(frozen),
            num_leading=len(pipeline.placement.lead) if pipeline else 1,
        ),
    )
    device = devices[0]
    return Plan(
        config=config,
        mesh=mesh,
        rules=rules,
        execution=execution_of(config, device, exchange=exchange, sizes=sizes),
        graphdef=graphdef,
        schedule=schedule,
        optimizer=optimizer,
        state=jax.tree.map(_with_sharding, abstract, state_shardings),
        update_shardings=update_shardings,
        landing=layout.landing_of(
            mesh_config,
            abstract.params,
            whole=state_shardings.params,
            split=update_shardings,
        ),
        pipeline=pipeline,
        compiler_options=options.compiler_options(
            config, sizes, platform=device.platform, device_kind=device.device_kind
        ),
        shared_options=options.shared_options(config, device.platform),
    )


def _with_async_tensor(config: Config, devices) -> Config:
    """The config without an `auto` that these devices decide."""
    sizes = config.mesh.sizes(len(devices))
    num_processes = len({device.process_index for device in devices})
    kind = run_config.async_tensor_of(config, sizes, num_processes=num_processes)
    if config.mesh.async_tensor == AsyncTensor.AUTO and kind == AsyncTensor.HALVES:
        objection = run_config.ring_objection(config, sizes, num_processes=num_processes)
        warned.once(f"config.mesh.async_tensor='auto' runs layers on halves of rows: {objection}")
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, async_tensor=kind))


def _of_optimizer(config: Config, shardings: Callable, *, state, axes):
    """The shardings of its state; the parameters' have been found to be possible."""
    try:
        return shardings(state, axes)
    except ValueError as error:
        block = getattr(config.optim, "block", None)
        if block is None:
            raise
        raise ValueError(
            f"config.optim.block={block}: a device's part of a parameter must be whole blocks; set "
            f"it to a divisor of that part. {error}"
        ) from None


def _pipeline_of(config: Config, model, *, sizes: dict[str, int]) -> Pipeline:
    """Raises ValueError for a model that stages cannot share."""
    stacks, (_, _, _, extra) = model.stacks(), split_model(model)
    if len(stacks) > 1 or jax.tree.leaves(extra):
        what = f"{len(stacks)} stacks of layers" if len(stacks) > 1 else "variables besides weights"
        raise ValueError(
            f"config.mesh.stage={sizes['stage']}: stages share one stack of layers, and "
            f"config.model has {what}; set config.mesh.stage=1"
        )
    return choice.choose(config, sizes=sizes, turn=len(stacks[0].blocks))


def _abstract_state(
    config: Config, model, *, optimizer, pipeline: Pipeline | None
) -> tuple[Any, TrainState]:
    hold = pipeline.placement.hold if pipeline else lambda tree: tree
    graphdef, frozen, params, extra = split_model(model, frozen=config.frozen)
    _check_frozen(config.frozen, params=params, frozen=frozen)
    stacked = _stacked(model)
    _check_weights(config.precision.weights, stacked)
    params, frozen = (jax.eval_shape(hold, tree) for tree in (params, frozen))
    opt_state = jax.eval_shape(optimizer.init, params)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    scale = jax.eval_shape(lambda: loss_scale.init(config))
    weights = to_flat(params) | to_flat(frozen)
    amax = delayed.histories_of(
        {name: weights[name] for name in stacked},
        config=config.precision,
        num_leading=len(pipeline.placement.lead) if pipeline else 1,
    )
    return graphdef, TrainState(step, params, frozen, extra, opt_state, scale, amax)


def _check_frozen(names: tuple[str, ...], *, params, frozen) -> None:
    held, trained = list(to_flat(frozen)), list(to_flat(params))
    for name in names:
        if not any(name in path for path in held):
            raise ValueError(
                f"config.frozen: no parameter has {name!r} in its path; there are "
                f"{', '.join(sorted(held + trained))}"
            )
    if names and not trained:
        raise ValueError(
            f"config.frozen={names!r} leaves no parameter to train; name fewer of them"
        )


def _check_precision(config: Config, device: Any) -> None:
    """Raises ValueError for a recipe that the device cannot run."""
    precision = config.precision
    if precision.recipe == Recipe.DTYPE or precision.emulate:
        return
    is_gpu = device.platform in ("gpu", "cuda")
    capability = getattr(device, "compute_capability", "0") if is_gpu else "0"
    reason = None
    if float(capability) < FP8_CAPABILITY:
        shown = f"{device.device_kind}" + f" (sm_{capability})" * is_gpu
        reason = f"{shown} has no products in 8 bits"
    elif precision.recipe == Recipe.FP8_BLOCKWISE:
        reason = block_scaled_matmul.device_supported(device.platform, capability)
    if reason:
        raise ValueError(
            f"config.precision.recipe={precision.recipe.value!r}: {reason}; set "
            "config.precision.emulate=True for the same numbers, slowly, or "
            "config.precision.recipe='dtype'"
        )


def _stacked(model) -> list[str]:
    """The names of the layers' weights, as in the state."""
    return [
        ".".join(map(str, path))
        for path, box in nnx.to_flat_state(nnx.state(model, nnx.Param))
        if (axes := shd.axes_of(box)) and axes[0] == LAYERS and "embed" in axes
    ]


def _check_weights(names: tuple[str, ...], stacked: list[str]) -> None:
    """Raises ValueError for a part of a name that no weight of a layer has."""
    for name in names:
        if not any(name in path for path in stacked):
            raise ValueError(
                f"config.precision.weights: no weight of a layer has {name!r} in its name; there "
                f"are {', '.join(sorted(stacked))}"
            )


def _with_sharding(leaf, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def execution_of(
    config: Config, device: Any, *, exchange: Exchange, sizes: dict[str, int]
) -> Execution:
    """The run's choices, on devices like this one. sizes: of the mesh axes.

    Stages keep no gathered weights: they would, for every microbatch in flight.
    """
    has_stages = sizes["stage"] > 1
    return Execution(
        dtype=config.dtype,
        reduce_dtype=config.mesh.reduce_dtype,
        fp8=fp8_of(config.precision),
        remat=config.remat,
        leaner_layers=config.leaner_layers,
        keep_gathered=not config.mesh.reshard_after_forward and not has_stages,
        sums_parts=sizes["data"] > 1 and num_weight_shards(sizes) > 1 and not has_stages,
        scan_unroll=config.scan_unroll,
        async_tensor=config.mesh.async_tensor,
        attention=config.attention,
        norm=config.norm,
        exchange=exchange,
        balance=config.context.balance,
        max_documents=config.data.max_documents_per_row,
        deterministic=config.deterministic,
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", "9.0"),
    )
