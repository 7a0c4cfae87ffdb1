"""A run laid out on a mesh before any array exists."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxscale import config as run_config
from jaxscale import sharding as shd
from jaxscale.config import Config
from jaxscale.data.loader import Corpus
from jaxscale.ops.execution import Execution
from jaxscale.step import layout
from jaxscale.step.state import TrainState, split_model, to_flat
from jaxscale.xla import options


@dataclasses.dataclass(frozen=True)
class Plan:
    """What training, compiling ahead of time and benchmarks all start from.

    rules: of arrays as the model reads them. state: ShapeDtypeStructs with shardings.
    update_shardings: of the parameters while they are updated; those of the optimiser's state.
    landing: see step/layout.py. compiler_options: of the update; numerics_options: those of them
    that change results, for every other program of the run.
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
    compiler_options: dict[str, Any]
    numerics_options: dict[str, Any]

    @property
    def batch_shape(self) -> tuple[int, int, int]:
        """Microbatches, rows of each, tokens of a row."""
        num = self.config.grad_accumulation
        return num, self.config.batch_size // num, self.config.seq_len


def plan_of_run(config: Config, *, devices=None, corpus: Corpus | None = None) -> Plan:
    """devices: those of the mesh, all there are unless given; they may be elsewhere.

    corpus: the run's data, which bounds the documents of a row where the config leaves that open.
    Raises ValueError for a config that cannot be, or that these devices do not divide. Touches no
    memory of the devices.
    """
    run_config.validate(config)
    devices = jax.devices() if devices is None else devices
    sizes = run_config.validate_on(config, len(devices))
    if corpus is not None:
        bound = corpus.train.max_documents_per_row
        data = dataclasses.replace(config.data, max_documents_per_row=bound)
        config = dataclasses.replace(config, data=data)
    mesh = shd.make_mesh(sizes, devices=devices, axis_types=str(config.mesh.axis_types))
    split = layout.rules_of(config.mesh, model_rules=config.model.rules(sizes))
    rules = split if config.mesh.zero == 3 else split.replace(embed=None)
    schedule = config.schedule.build(config.steps)
    optimizer = config.optim.build(schedule)
    graphdef, abstract = _abstract_state(config, optimizer)
    shardings = functools.partial(shd.shardings, mesh=mesh, rules=rules)
    split_shardings = functools.partial(shd.shardings, mesh=mesh, rules=split)
    opt_axes = config.optim.state_axes(abstract.opt_state, params=abstract.params)
    state_shardings = TrainState(
        step=shardings(abstract.step),
        params=shardings(abstract.params),
        frozen=shardings(abstract.frozen),
        extra=shardings(abstract.extra),
        opt_state=split_shardings(abstract.opt_state, opt_axes),
    )
    update_shardings = split_shardings(abstract.params)
    device = devices[0]
    return Plan(
        config=config,
        mesh=mesh,
        rules=rules,
        execution=execution_of(config, device),
        graphdef=graphdef,
        schedule=schedule,
        optimizer=optimizer,
        state=jax.tree.map(_with_sharding, abstract, state_shardings),
        update_shardings=update_shardings,
        landing=layout.landing_of(
            config.mesh, abstract.params, whole=state_shardings.params, split=update_shardings
        ),
        compiler_options=options.compiler_options(
            config, sizes, platform=device.platform, device_kind=device.device_kind
        ),
        numerics_options=options.numerics_options(config, device.platform),
    )


def _abstract_state(config: Config, optimizer) -> tuple[Any, TrainState]:
    model = jax.eval_shape(lambda: config.model.build(nnx.Rngs(0)))
    graphdef, frozen, params, extra = split_model(model, frozen=config.frozen)
    _check_frozen(config.frozen, params=params, frozen=frozen)
    opt_state = jax.eval_shape(optimizer.init, params)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    return graphdef, TrainState(step, params, frozen, extra, opt_state)


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


def _with_sharding(leaf, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def execution_of(config: Config, device: Any) -> Execution:
    """The run's choices, on devices like this one."""
    return Execution(
        dtype=config.dtype,
        reduce_dtype=config.mesh.reduce_dtype,
        remat=config.remat,
        keep_gathered=not config.mesh.reshard_after_forward,
        scan_unroll=config.scan_unroll,
        attention=config.attention,
        max_documents=config.data.max_documents_per_row,
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", "9.0"),
    )
