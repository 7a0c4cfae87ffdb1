"""Which layers each stage holds, and how a stack of layers is laid out for it.

A stack [layers, ...] is held as [stages * layers of a chunk, ...], or, where stages have several
chunks, as [chunks, stages * layers of a chunk, ...]. Flat, that is the model's own order, so what
`stage` splits along the second-to-last of them is chunk v * P + s of stage s. Where the layers do
not fill the chunks, the last ones are short, and zeros stand for what is missing.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxscale import sharding as shd
from jaxscale.ops.layers import LAYERS, map_axes

CHUNKS = "chunks"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Chunk v of stage s holds layers (v * num_stages + s) * layers_per_chunk and following."""

    num_layers: int
    num_stages: int
    num_chunks: int
    layers_per_chunk: int

    @property
    def num_places(self) -> int:
        return self.num_stages * self.num_chunks * self.layers_per_chunk

    @property
    def is_full(self) -> bool:
        return self.num_places == self.num_layers

    def number_of(self, layer, *, chunk, stage):
        """The model's number of a chunk's layer."""
        return (chunk * self.num_stages + stage) * self.layers_per_chunk + layer

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading dimensions of a stack's arrays."""
        per_chunk = self.num_stages * self.layers_per_chunk
        return (per_chunk,) if self.num_chunks == 1 else (self.num_chunks, per_chunk)

    def hold(self, tree):
        """The tree with its stacks, [layers, ...], as they are held."""

        def held(box):
            axes = shd.axes_of(box) or ()
            if axes[:1] != (LAYERS,):
                return box
            box = jax.tree.map(self.held, box)
            return map_axes(lambda axes: (CHUNKS, *axes), box) if len(self.lead) == 2 else box

        return jax.tree.map(held, tree, is_leaf=lambda x: shd.axes_of(x) is not None)

    def held(self, leaf):
        """[layers, ...] as it is held."""
        missing = self.num_places - leaf.shape[0]
        leaf = jnp.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1)) if missing else leaf
        return leaf.reshape(*self.lead, *leaf.shape[1:])

    def in_order(self, leaf):
        """The inverse of `held`."""
        rest = leaf.shape[len(self.lead) :]
        return leaf.reshape(self.num_places, *rest)[: self.num_layers]


def placement_of(num_layers: int, *, num_stages: int, num_chunks: int, turn: int) -> Placement:
    """Chunks of equal length, a whole number of turns of `turn` kinds of layers."""
    per_chunk = math.ceil(num_layers / (num_stages * num_chunks * turn)) * turn
    return Placement(num_layers, num_stages, num_chunks, per_chunk)
