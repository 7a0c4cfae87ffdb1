"""An update's loss and gradients where the stages of a pipeline share the layers.

The model's own code runs on each stage, manual over `stage` and over the axes that split rows and
no weight: data, and fsdp too with ZeRO-1 and 2. Each device of those sums its own gradients over
the microbatches, and they are added up once an update. XLA would do that in every microbatch.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxscale import sharding as shd
from jaxscale.config import num_row_shards
from jaxscale.data.batch import Batch
from jaxscale.ops.delayed import Factors
from jaxscale.ops.layers import layers_of, map_axes
from jaxscale.parallel import pipeline
from jaxscale.parallel.layer_store import STAGE, on_own_part
from jaxscale.parallel.schedules import Table
from jaxscale.step import delayed, loss_scale
from jaxscale.step.loss import cross_entropy_of, documents_of_batch
from jaxscale.step.plan import Plan, plan_of_run
from jaxscale.step.relayout import Relayout
from jaxscale.step.state import TrainState, from_flat, metered, to_flat


def loss_and_gradients(state: TrainState, batch: Batch, *, plan: Plan, num_tokens):
    """(counts, loss, gradients like the parameters), over all microbatches of the batch.

    With float16 the latter two are multiplied by the loss scale. counts: for `delayed.after`.
    """
    assert plan.pipeline is not None
    table = plan.pipeline.table(batch.tokens.shape[0])

    def on_stage(params, frozen, meters, batch, scale):
        split = _Split(params, frozen, meters=meters, plan=plan)
        parts = split.parts(
            lambda loss: loss * scale,
            z_loss=plan.config.z_loss,
            enlarged=loss_scale.of_logits(scale, by=state.loss_scale),
        )
        loss, weights, outer = split.run(parts, batch, table=table)
        gradients, counts = split.gradients(weights, outer)
        gradients = jax.tree.map(added_up, gradients, plan.update_shardings)
        return counts, jax.lax.psum(loss, axes), gradients

    def added_up(gradient, sharding):
        """Over the axes that split rows; in parts where one of them splits what is optimised."""

        def local(gradient):
            left = axes
            for dim, entry in enumerate(sharding.spec.partitions):
                if here := tuple(axis for axis in axes if axis in jax.tree.leaves((entry,))):
                    gradient = jax.lax.psum_scatter(
                        gradient, here, scatter_dimension=dim, tiled=True
                    )
                    left = tuple(axis for axis in left if axis not in here)
            return jax.lax.psum(gradient, left)

        return on_own_part(local, gradient)

    axes = row_axes(plan)
    scale = 1.0 / jnp.maximum(num_tokens, 1).astype(jnp.float32)
    scale = loss_scale.scaled(scale, by=state.loss_scale)
    specs = jax.tree.map(lambda s: shd.only(s.spec, (STAGE, *axes)), plan.update_shardings)
    meters = _meters(state, plan)
    of_counts = _meter_specs(plan)["counts"]
    mapped = _on_stages(on_stage, plan, more=(BATCH, P()), out_specs=(of_counts, P(), specs))
    counts, loss, gradients = mapped(state.params, state.frozen, meters, batch, scale)
    return counts, loss, shd.constrain(gradients, plan.update_shardings)


def held_out_loss(state: TrainState, batch: Batch, *, plan: Plan):
    """The sum of -log p over the batch's tokens, float32, without z-loss."""
    assert plan.pipeline is not None
    table = plan.pipeline.table(batch.tokens.shape[0], is_training=False)

    def on_stage(params, frozen, meters, batch):
        split = _Split(params, frozen, meters=meters, plan=plan)
        loss = split.run(split.parts(lambda loss: loss, z_loss=0.0), batch, table=table)[0]
        return jax.lax.psum(loss, row_axes(plan))

    meters = _meters(state, plan)
    mapped = _on_stages(on_stage, plan, more=(BATCH,), out_specs=P())
    return mapped(state.params, state.frozen, meters, batch)


def _meters(state: TrainState, plan: Plan) -> dict[str, dict]:
    """The factors of an update, and what its largest values are counted in."""
    return dict(
        factors=delayed.factors(state.amax, config=plan.config),
        counts=delayed.zero_counts(plan),
    )


def row_axes(plan: Plan) -> tuple[str, ...]:
    """The mesh axes that split rows and no parameter."""
    leaves = jax.tree.leaves((plan.state.params, plan.state.frozen))
    taken = {axis for leaf in leaves for axis in jax.tree.leaves(tuple(leaf.sharding.spec))}
    return tuple(
        axis
        for axis in plan.rules.mesh_axes("batch")
        if plan.mesh.shape[axis] > 1 and axis not in taken
    )


def _meter_specs(plan: Plan) -> dict[str, dict]:
    """How the manual axes split `_meters`."""
    manual = (STAGE, *row_axes(plan))
    of_layers = {
        name: shd.only(leaf.sharding.spec, manual) for name, leaf in dict(plan.state.amax).items()
    }
    of_counts = delayed.count_shardings(plan)
    return dict(
        factors={name: Factors(spec, spec) for name, spec in of_layers.items()},
        counts={name: shd.only(sharding.spec, manual) for name, sharding in of_counts.items()},
    )


# Of the batch: [microbatches, rows, seq], of which row_axes split the rows.
BATCH = "batch"


def _on_stages(function: Callable, plan: Plan, *, more: tuple, out_specs):
    axes = row_axes(plan)
    manual = (STAGE, *axes)
    specs = [
        jax.tree.map(lambda leaf: shd.only(leaf.sharding.spec, manual), tree)
        for tree in (plan.state.params, plan.state.frozen)
    ]
    specs.append(_meter_specs(plan))
    of_batch = P(None, axes) if axes else P()
    in_specs = *specs, *(of_batch if spec == BATCH else spec for spec in more)
    # check_vma: jax has none around the shard_maps of kernels (0.10.2 and 0.11.2).
    return jax.shard_map(
        function, axis_names=set(manual), in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def without_stages(state: TrainState, plan: Plan) -> tuple[TrainState, Plan]:
    """The parameters of a run, and the run, on a mesh that has shards in the place of stages.

    For what goes through the model forwards and not often. The state has no optimiser's.
    """
    sizes = dict(plan.mesh.shape)
    num_shards = sizes["fsdp"] * sizes["stage"]
    axis = "data" if plan.config.model.model_dim % num_shards else "fsdp"
    sizes |= {"stage": 1, axis: sizes[axis] * sizes["stage"]}
    config = dataclasses.replace(
        plan.config,
        mesh=dataclasses.replace(plan.config.mesh, **sizes),
        batch_size=num_row_shards(sizes),
        grad_accumulation=1,
    )
    there = plan_of_run(config, devices=list(plan.mesh.devices.flat))
    relayout = Relayout(plan.lead, there.lead, num_layers=config.model.num_layers)
    wanted = to_flat(there.state._replace(opt_state=()))
    values = relayout.as_wanted(to_flat(state._replace(opt_state=())), wanted)
    values = {name: jax.device_put(value, wanted[name].sharding) for name, value in values.items()}
    return from_flat(there.state._replace(opt_state=()), values), there


class _Split:
    """A stage's parameters, as those of its layers and the others."""

    def __init__(self, params, frozen, *, meters: dict[str, dict], plan: Plan):
        assert plan.pipeline is not None
        self._plan, self._meters = plan, meters
        self._frozen = metered(frozen, **meters)
        self._placement = plan.pipeline.placement
        self._params, self._tree = jax.tree.flatten(params)
        (self._stack,) = self._model(self._params).stacks()
        stacked = {id(leaf) for leaf in jax.tree.leaves(self._stack.weights)}
        self._outer = [i for i, leaf in enumerate(self._params) if id(leaf) not in stacked]

    def _model(self, params: list):
        params = metered(jax.tree.unflatten(self._tree, params), **self._meters)
        return nnx.merge(self._plan.graphdef, self._frozen, params)

    def _model_with(self, outer: list):
        params = [*self._params]
        for number, leaf in zip(self._outer, outer, strict=True):
            params[number] = leaf
        return self._model(params)

    def parts(self, finish: Callable, *, z_loss: float, enlarged=None) -> pipeline.Parts:
        """What the pipeline asks of the model; finish: of a microbatch's summed loss.

        enlarged: as `ops.loss.cross_entropy` has it.
        """
        plan, stack = self._plan, self._stack

        def embed(outer, microbatch):
            return self._model_with(outer).embed(microbatch.tokens, plan.execution)

        def share(microbatch):
            return stack.share(documents_of_batch(microbatch, plan))

        def head(outer, x, microbatch):
            output = self._model_with(outer).output(x)
            loss = cross_entropy_of(
                output,
                microbatch.targets,
                plan=plan,
                z_loss=z_loss,
                enlarged=enlarged,
            )
            return finish(loss)

        layers = tuple(map(_without_aux, layers_of(stack, plan.execution)))
        return pipeline.Parts(embed, share, layers, head, self._cast)

    def run(self, parts: pipeline.Parts, batch: Batch, *, table: Table):
        """(loss, gradients of the layers' weights, gradients of the others)."""
        weights = self._stack.weights
        if self._placement.num_chunks > 1:
            weights = map_axes(lambda axes: axes[1:], weights)
        else:
            weights = jax.tree.map(lambda leaf: leaf[None], weights)
        return pipeline.run(
            parts,
            batch,
            weights=weights,
            outer=[self._params[number] for number in self._outer],
            table=table,
            placement=self._placement,
            is_unrolled=self._plan.execution.scan_unroll >= self._placement.num_layers,
        )

    def _cast(self, weights):
        """What products read (it has the model dimension) is cast here, and not in every op."""
        execution = self._plan.execution
        if execution.gradient_dtype != jnp.dtype(execution.dtype):
            return weights

        def cast(box):
            if "embed" not in (shd.axes_of(box) or ()):
                return box
            return jax.tree.map(lambda leaf: leaf.astype(execution.dtype), box)

        return jax.tree.map(cast, weights, is_leaf=_is_variable)

    def gradients(self, weights, outer: list):
        """Like the parameters, and like the counts. What is held fixed gets none."""
        if self._placement.num_chunks == 1:
            weights = jax.tree.map(lambda leaf: leaf[0], weights)
        ours = jax.tree.leaves(self._stack.weights)
        found = {id(leaf): g for leaf, g in zip(ours, jax.tree.leaves(weights), strict=True)}
        found |= {id(self._params[i]): g for i, g in zip(self._outer, outer, strict=True)}
        gradients = jax.tree.unflatten(self._tree, [found[id(leaf)] for leaf in self._params])
        return gradients, jax.tree.map(lambda leaf: found[id(leaf)], self._meters["counts"])


def _is_variable(box) -> bool:
    return isinstance(box, nnx.Variable)


def _without_aux(layer: Callable) -> Callable:
    def run(weights, x, shared):
        x, aux = layer(x, weights, shared)
        assert not jax.tree.leaves(aux), "layers with losses of their own have no stages yet"
        return x

    return run
