"""Parameters out of a model folder of Hugging Face, into whatever layout a run has.

Tensor by tensor: the host holds one of theirs, each device its own part of ours and no more.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxscale import config as run_config
from jaxscale.checkpoint.leaves import different_keys
from jaxscale.config import Config
from jaxscale.models.hugging_face import Tensor, as_ours
from jaxscale.models.model_folder import ModelFolder, parse
from jaxscale.step.plan import Plan
from jaxscale.step.state import TrainState, from_flat, to_flat

log = logging.getLogger(__name__)

# Each device writes its own part by itself.
NO_MESH = jax.sharding.Mesh(np.empty((), dtype=object), ())
NOT_OF_THE_WEIGHTS = ("max_seq_len", "init_scale")


def open_pretrained(config: Config) -> ModelFolder | None:
    """The folder that config.init_from names, once its weights are known to fit config.model.

    Raises ValueError naming what differs.
    """
    if not config.init_from:
        return None
    try:
        folder = ModelFolder(parse(config.init_from))
    except ValueError as error:
        raise ValueError(f"config.init_from={config.init_from!r}: {error}") from None
    theirs, ours = run_config.to_json(folder.model), run_config.to_json(config.model)
    # The limit is theirs, and init_scale is of weights that are drawn.
    ours |= {key: theirs.get(key) for key in NOT_OF_THE_WEIGHTS}
    unlike = different_keys(theirs, ours, prefix="config.model")
    if type(folder.model) is not type(config.model) or unlike:
        raise ValueError(
            f"config.init_from={config.init_from!r} holds another model than config.model "
            f"({type(folder.model).__module__}):\n  "
            + "\n  ".join(unlike)
            + f"\nSet --config.model={config.init_from}"
        )
    return folder


def with_pretrained(state: TrainState, folder: ModelFolder, *, plan: Plan) -> TrainState:
    """The state with the folder's weights for parameters, trained and frozen.

    Raises ValueError for a folder that lacks one, or has it in another shape.
    """
    named = to_flat(state)
    prefixes = ("params.", "frozen.")
    ours = {
        name.partition(".")[2]: leaf for name, leaf in named.items() if name.startswith(prefixes)
    }
    abstract = {path: _abstract(leaf) for path, leaf in ours.items()}
    for leaf in ours.values():
        leaf.delete()  # the new ones take their place in memory
    loaded = read_params(abstract, folder, lead=plan.lead)
    changed = {name: loaded[name.partition(".")[2]] for name in named if name.startswith(prefixes)}
    return from_flat(state, named | changed)


def read_params(
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    folder: ModelFolder,
    *,
    lead: tuple[int, ...] | None = None,
) -> dict[str, jax.Array]:
    """The folder's weights by our paths ("layers.qkv"), in these shapes, dtypes and shardings.

    What no tensor covers is padding, and zero. lead: the leading dimensions of a stack's arrays,
    (layers,) unless given.
    """
    tensors = folder.tensors()
    if missing := abstract.keys() - {tensor.path for tensor in tensors}:
        raise ValueError(f"{folder.path}: no tensor is our {', '.join(sorted(missing))}")
    params = {path: _zeros(leaf) for path, leaf in abstract.items()}
    with jax.set_mesh(NO_MESH):
        for tensor in tensors:
            values = folder.read(tensor.name)
            try:
                values = as_ours(tensor, values)
            except ValueError as error:
                raise ValueError(f"{folder.path}: {error}") from None
            part = _part_of(tensor, lead)
            params[tensor.path] = _placed(params[tensor.path], part, values=values)
    log.info("%d tensors read from %s", len(tensors), folder.path)
    return params


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    zeros = functools.partial(jnp.zeros, leaf.shape, leaf.dtype)
    return jax.jit(zeros, out_shardings=leaf.sharding)()


def _part_of(tensor: Tensor, lead: tuple[int, ...] | None) -> tuple:
    """Where the tensor goes; a layer's begins with its number, which counts all of `lead`."""
    layer, *rest = tensor.part or (slice(None),)
    if not isinstance(layer, int) or lead is None:
        return tensor.part
    return (*(int(i) for i in np.unravel_index(layer, lead)), *rest)


def _placed(array: jax.Array, part: tuple, *, values: np.ndarray) -> jax.Array:
    """The array with the values in this part of it; each device takes its own of them."""
    of_part = _intervals(part, array.shape)
    values = values.reshape([end - start for start, end in of_part])
    shards = [
        _shard_with(shard, values, of_part=of_part, whole=array.shape)
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _shard_with(shard: Any, values: np.ndarray, *, of_part, whole) -> jax.Array:
    of_shard = _intervals(shard.index, whole)
    both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(of_part, of_shard, strict=True)]
    if any(start >= end for start, end in both):
        return jax.device_put(shard.data, SingleDeviceSharding(shard.device))
    mine = values[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, of_part, strict=True))]
    starts = [a - c for (a, _), (c, _) in zip(both, of_shard, strict=True)]
    mine = jax.device_put(np.ascontiguousarray(mine), shard.device)
    # The only shard of an array is the array, with its mesh.
    data = jax.device_put(shard.data, SingleDeviceSharding(shard.device), donate=True)
    return _write(data, mine, starts=starts)


@functools.partial(jax.jit, donate_argnums=0)
def _write(data, values, *, starts):
    return jax.lax.dynamic_update_slice(data, values.astype(data.dtype), starts)


def _intervals(index, shape) -> list[tuple[int, int]]:
    """(start, end) along each axis of an array of this shape."""
    index = (*index, *(slice(None),) * (len(shape) - len(index)))
    return [
        (i, i + 1) if isinstance(i, int) else i.indices(size)[:2]
        for i, size in zip(index, shape, strict=True)
    ]
