"""What a stage has of each of its layers: weights, sums of their gradients, slots of residuals.

A store is a list: of the layers, where a chunk's are unrolled; else of the kinds of layers that
take turns, with a dimension for the turns. A layer of its own buffers is read and written in place,
and XLA does not gather the reads of all layers at the beginning. V chunks, L layers of one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxscale.parallel.placement import Placement

STAGE = "stage"
IN_PLACE: Any = dict(mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True)


class Place(NamedTuple):
    """Of a layer: its number in a store, and what to index the arrays there with, last."""

    number: int
    last: tuple


@dataclasses.dataclass(frozen=True)
class LayerStore:
    """The shape of the stores of a stage."""

    placement: Placement
    num_kinds: int
    is_unrolled: bool

    @property
    def num_turns(self) -> int:
        return self.placement.layers_per_chunk // self.num_kinds

    @property
    def adds_whole_leaves(self) -> bool:
        """Whether a layer's gradients are added to arrays that have no others in them."""
        return self.is_unrolled and self.placement.num_chunks == 1

    def place(self, turn, kind: int) -> Place:
        if self.is_unrolled:
            return Place(turn * self.num_kinds + kind, ())
        return Place(kind, (turn,))

    def of_chunk(self, chunk) -> tuple:
        """What to index weights with, first."""
        return () if self.placement.num_chunks == 1 else (chunk,)

    def apart(self, weights) -> list:
        """A store of weights with leaves [V, L, ...]; it has no V if that is 1."""
        first = 0 if self.placement.num_chunks == 1 else slice(None)
        return [
            jax.tree.map(lambda leaf, part=part: leaf[first, part], weights) for part in self.parts
        ]

    def chunk(self, weights, number) -> list:
        """A store of the weights of one of several chunks, without V.

        Out of leaves [V, L, ...] at once: layers apart are a copy of all of them.
        """
        chunk = jax.tree.map(lambda leaf: at(leaf, number), weights)
        return [jax.tree.map(lambda leaf, part=part: leaf[part], chunk) for part in self.parts]

    @property
    def parts(self) -> list:
        """What to index a chunk's L layers with, for each entry of a store."""
        if self.is_unrolled:
            return [*range(self.placement.layers_per_chunk)]
        return [slice(kind, None, self.num_kinds) for kind in range(self.num_kinds)]

    @property
    def for_sums(self) -> "LayerStore":
        """The shape of the store of gradients' sums, of which `place(layer, 0)` is a layer's place.

        One [V, L, ...] unless products add to arrays of their own: joined afterwards, 14 GB of a
        stage's sums of 8B are read and written once more.
        """
        return dataclasses.replace(self, num_kinds=1, is_unrolled=self.adds_whole_leaves)

    def joined(self, sums: list):
        """[V, L, ...] of a store for sums."""

        def join(*leaves):
            joined = jnp.stack(leaves) if self.is_unrolled else leaves[0]
            return joined[None] if self.placement.num_chunks == 1 else joined

        return jax.tree.map(join, *sums)

    def slots(self, types: list[list], *, depth: int) -> list[list]:
        """A store of `depth` slots for arrays of each kind's types, with anything in them."""
        if self.is_unrolled:
            types = [types[i % self.num_kinds] for i in range(self.placement.layers_per_chunk)]
            return [[room(leaf, depth) for leaf in each] for each in types]
        return [[room(leaf, depth, self.num_turns) for leaf in each] for each in types]

    def over_turns(self, turn: Callable, carried, *, reverse: bool = False):
        """`carried = turn(carried, number)` for each turn of the layers of a chunk."""
        if self.is_unrolled:
            for number in reversed(range(self.num_turns)) if reverse else range(self.num_turns):
                carried = turn(carried, number)
            return carried
        numbers = jnp.arange(self.num_turns, dtype=jnp.int32)
        return jax.lax.scan(lambda c, n: (turn(c, n), None), carried, numbers, reverse=reverse)[0]


def read(store: list, place: Place, *, first: tuple):
    """The layer's arrays there; first: the chunk, or the slot."""
    return jax.tree.map(lambda leaf: at(leaf, *first, *place.last), store[place.number])


def write(store: list, place: Place, *, values, first: tuple) -> list:
    """The store with other arrays there."""

    def written(leaf, value):
        return put(leaf, value, index=(*first, *place.last))

    return _with(store, place.number, mine=jax.tree.map(written, store[place.number], values))


def add(store: list, place: Place, *, values, first: tuple) -> list:
    """The store with these added to the arrays there."""
    mine, index = store[place.number], tuple(map(jnp.asarray, (*first, *place.last)))
    if not index:
        return _with(store, place.number, mine=jax.tree.map(jnp.add, mine, values))
    # A scatter is one kernel, in place. What is read and written by slices is two (jax 0.11.2).

    def scatter(mine, added):
        values, index = added
        return jax.tree.map(lambda leaf, v: leaf.at[index].add(v, **IN_PLACE), mine, values)

    return _with(store, place.number, mine=on_own_part(scatter, mine, (values, index)))


def on_own_part(function: Callable, first, *more):
    """`function` on each device's own part of arrays, as they are split; also by axes not manual.

    Its result is split as `first` is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    trees = (first, *more)
    specs = tuple(jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, t) for t in trees)
    mapped = jax.shard_map(
        function,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        in_specs=specs,
        out_specs=specs[0],
        check_vma=False,
    )
    return mapped(*trees)


def _with(store: list, number: int, *, mine) -> list:
    return [*store[:number], mine, *store[number + 1 :]]


# Arrays.


def zeros(like, *dims: int, dtype=None):
    """Zeros of this type, with leading dimensions; split as it is."""
    array = jnp.zeros((*dims, *like.shape), dtype or like.dtype)
    spec = like.sharding.spec.partitions
    return jax.sharding.reshard(array, P(*[None] * len(dims), *spec)) if any(spec) else array


def room(like, *dims: int):
    """As `zeros`, with whatever lies in memory: to be written before it is read.

    XLA makes the zeros of one shape once, and copies them to where each is needed: 52 GB an update
    of 8B (2 stages of 4 chunks, 28 GB of residuals). On CPUs they are zeros.
    """
    return on_own_part(lambda mine: jax.lax.empty(mine.shape, mine.dtype), zeros(like, *dims))


def at(array, *index):
    """`array[index]`. Indices are not negative, which spares XLA the code for those that are."""
    for each in index:
        starts, sizes = [each, *[0] * (array.ndim - 1)], (1, *array.shape[1:])
        array = jax.lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)
        array = jax.lax.squeeze(array, (0,))
    return array


def put(array, value, *, index: tuple):
    """The array with the value there."""
    value = jax.lax.expand_dims(value, range(len(index)))
    starts = [jnp.asarray(each, jnp.int32) for each in index]
    starts += [jnp.int32(0)] * (array.ndim - len(index))
    return jax.lax.dynamic_update_slice(array, value, starts, allow_negative_indices=False)
