"""Stacks of layers that were saved for other stages than those that want them.

A checkpoint has them as they were held (`parallel/placement.py`), and says so: `lead` are the
leading dimensions of a stack's arrays, (layers,) without stages.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.config import Config

# In the metadata of a checkpoint.
LEAD = "layers"


def saved_lead(metadata: Mapping[str, Any], config: Config) -> tuple[int, ...]:
    """Of the checkpoint with this metadata."""
    return tuple(metadata.get(LEAD) or (config.model.num_layers,))


class Relayout:
    """From one lead to another, of those leaves whose shapes differ by it.

    num_layers: how many there are; what is held beyond them is padding, and zero.
    """

    def __init__(self, saved: tuple[int, ...], wanted: tuple[int, ...], *, num_layers: int):
        self._saved, self._wanted, self._num_layers = saved, wanted, num_layers

    def as_saved(self, wanted: Mapping[str, jax.ShapeDtypeStruct], leaves: Mapping[str, Any]):
        """The wanted leaves in the shapes in which they were saved, split as far as they can be.

        leaves: what was saved, with shapes.
        """
        return {
            name: self._saved_struct(leaf)
            if name in leaves and self._differs(leaf.shape, saved=leaves[name].shape)
            else leaf
            for name, leaf in wanted.items()
        }

    def as_wanted(self, values: Mapping[str, jax.Array], wanted: Mapping[str, Any]):
        """What was read for `as_saved`, a leaf at a time, as it is wanted."""
        return {
            name: value
            if value.shape == wanted[name].shape
            else self._moved(value, wanted[name].sharding)
            for name, value in values.items()
        }

    def _differs(self, wanted: tuple[int, ...], *, saved: tuple[int, ...]) -> bool:
        old, new = len(self._saved), len(self._wanted)
        return (
            saved != wanted
            and saved[old:] == wanted[new:]
            and saved[:old] == self._saved
            and wanted[:new] == self._wanted
        )

    def _saved_struct(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (*self._saved, *leaf.shape[len(self._wanted) :])
        sharding: Any = leaf.sharding
        *_, stages = sharding.spec.partitions[: len(self._wanted)] or [None]
        names = jax.tree.leaves((stages,))
        parts = math.prod(sharding.mesh.shape[name] for name in names)
        entry = stages if self._saved[-1] % parts == 0 else None
        rest = sharding.spec.partitions[len(self._wanted) :]
        spec = P(*[None] * (len(self._saved) - 1), entry, *rest)
        placed = NamedSharding(_auto(sharding.mesh), spec)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=placed)

    def _moved(self, value: jax.Array, sharding: Any) -> jax.Array:
        """By XLA on the mesh that the value is on, and then to where it is wanted."""
        here: Any = value.sharding
        mesh = _auto(here.mesh)
        rest = here.spec.partitions[len(self._saved) :]
        is_same = here.mesh.shape == sharding.mesh.shape
        spec = sharding.spec if is_same else P(*[None] * len(self._wanted), *rest)
        there = NamedSharding(mesh, spec)
        with jax.set_mesh(mesh):
            value = jax.device_put(value, NamedSharding(mesh, here.spec))
            moved = jax.jit(self._in_wanted_order, out_shardings=there)(value)
        return jax.device_put(moved, sharding)

    def _in_wanted_order(self, value):
        rest = value.shape[len(self._saved) :]
        flat = value.reshape(-1, *rest)[: self._num_layers]
        missing = math.prod(self._wanted) - self._num_layers
        flat = jnp.pad(flat, [(0, missing)] + [(0, 0)] * len(rest)) if missing else flat
        return flat.reshape(*self._wanted, *rest)


def on_auto_axes(sharding: Any) -> NamedSharding:
    """The same sharding, which XLA may choose to reach as it will."""
    return NamedSharding(_auto(sharding.mesh), sharding.spec)


def _auto(mesh: Any) -> Mesh:
    """The mesh on which XLA lays out what is between the two."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
