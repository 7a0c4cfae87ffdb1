"""Where a step's values stop being finite: the first place forwards, or else backwards."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale import sharding as shd
from jaxscale.data.batch import Batch
from jaxscale.ops.layers import LAYERS, is_finite
from jaxscale.step import layout
from jaxscale.step.plan import Plan
from jaxscale.step.state import TrainState, to_flat
from jaxscale.step.update import count_tokens, loss_and_gradients

# The last that a backward pass comes to: not finite wherever that begins, so named last of all.
EMBEDDING = "embedding"


def program(plan: Plan) -> jax.stages.Wrapped:
    """(state, batch) -> what `first_place` reads, on every process; for a plan without stages.

    int32, 1 where all values are finite, else 0. parameters, gradients: by name; [layers] of those
    of layers, else []. outputs: [layers + 2], of the embedding, each layer and the final norm.
    loss: [].
    """
    execution = dataclasses.replace(plan.execution, watches_finite=True)
    plan = dataclasses.replace(plan, execution=execution)
    return jax.jit(
        functools.partial(_finite_parts, plan=plan),
        compiler_options=plan.shared_options,
        out_shardings=NamedSharding(plan.mesh, PartitionSpec()),
    )


def _finite_parts(state: TrainState, batch: Batch, *, plan: Plan) -> dict[str, Any]:
    num_tokens = count_tokens(batch)
    _, loss, gradients, outputs = loss_and_gradients(
        state, batch, plan=plan, num_tokens=num_tokens, observe=lambda output: output.finite
    )
    gradients = layout.summed(gradients, plan)
    frozen = _by_layer(state.frozen, plan.state.frozen)
    return dict(
        parameters=_by_layer(state.params, plan.state.params) | frozen,
        outputs=outputs.min(axis=0),
        loss=is_finite(loss),
        gradients=_by_layer(gradients, plan.state.params),
    )


def first_place(parts: dict[str, Any]) -> str | None:
    """In words, of what `program` gives; None if all is finite.

    Forwards the first; if the loss is finite, the first that a backward pass comes to.
    """
    parts = jax.tree.map(np.asarray, parts)
    if (where := _parameter(parts["parameters"])) is not None:
        return f"{where} (the weights themselves)"
    places = ["the embedding's output"]
    places += [f"the output of layer {number}" for number in range(len(parts["outputs"]) - 2)]
    places += ["the output of the final norm", "the loss"]
    finite = [*parts["outputs"], parts["loss"]]
    if not all(finite):
        return places[finite.index(0)]
    return _gradient(parts["gradients"])


def _parameter(finite: dict[str, np.ndarray]) -> str | None:
    for name, of_name in finite.items():
        if not of_name.all():
            return f"{name} of layer {of_name.argmin()}" if of_name.ndim else name
    return None


def _gradient(finite: dict[str, np.ndarray]) -> str | None:
    """Behind the layers first, then the last layer's, and so on down to the first."""
    bad = {name: of_name for name, of_name in finite.items() if not of_name.all()}
    outer = [name for name, of_name in bad.items() if not of_name.ndim and name != EMBEDDING]
    if not bad or outer:
        return f"the gradient of {' and '.join(outer)}" if outer else None
    layers = {name: of_name for name, of_name in bad.items() if of_name.ndim}
    if not layers:
        return f"the gradient of {EMBEDDING}"
    last = max(int(np.flatnonzero(of_name == 0)[-1]) for of_name in layers.values())
    names = [name for name, of_name in layers.items() if not of_name[last]]
    return f"the gradient of {', '.join(names)} of layer {last}"


def _by_layer(tree, described) -> dict[str, Any]:
    """By name; described: the like tree whose boxes know their axes."""

    def of_box(box, leaf):
        is_stacked = (shd.axes_of(box) or ("",))[0] == LAYERS
        dims = slice(1 if is_stacked else 0, None)
        return jax.tree.map(
            lambda x: jnp.isfinite(x).astype(jnp.int32).min(axis=range(x.ndim)[dims]), leaf
        )

    is_box = dict(is_leaf=lambda x: shd.axes_of(x) is not None)
    return to_flat(jax.tree.map(of_box, described, tree, **is_box))
