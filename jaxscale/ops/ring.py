"""Rows passed on in a ring: what `tensor` sends is sent beside the products of other rows.

With tensor parallelism each product of a layer waits for the rows of all devices, or its sums are
waited for by them. Here a device multiplies the rows that it has while those of the device before
it come, and sends on the sums of a part while it makes the next (Wang et al. 2023, "Overlap
Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS).
Each message is one copy between two GPUs, which their copy engines make (`xla/options.py`): no
multiprocessor is taken from the products, as NCCL's kernels do.

B rows, S sequence, D model, G devices of `tensor`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxscale import sharding as shd
from jaxscale.config import AsyncTensor
from jaxscale.ops.documents import AXES, Documents
from jaxscale.ops.execution import Execution
from jaxscale.ops.halves import RESIDUAL

AXIS = "tensor"


def run(layers: Callable, weights, x_BSD, *, documents: Documents):
    """`layers(weights, x_BSD, parts=) -> (x_BSD, aux)` of each device's own rows, manual over AXIS.

    x_BSD: split over AXIS by rows. parts: the documents of G parts of the rows, its own, then those
    of the devices before it. weights: a module, of which a device has its part of heads and of
    `mlp`; aux: int32, the least of all devices.
    """
    size = jax.sharding.get_abstract_mesh().shape[AXIS]

    def on_device(operands):
        weights, x_1BSD, documents = operands
        x_BSD, aux = layers(weights, x_1BSD[0], parts=_parts(documents, size))
        return x_BSD[None], jax.tree.map(lambda leaf: jax.lax.pmin(leaf, AXIS), aux)

    # With an axis of its own: JAX would put AXIS before the others that split the rows.
    together = shd.spec_of(RESIDUAL)
    apart = P(AXIS, *shd.spec_of("batch seq act_embed").partitions)
    x_GBSD = shd.map_parts(lambda x_BSD: x_BSD[None], (x_BSD,), specs=(together,), out=apart)
    # check_vma: jax has none around the shard_maps of kernels (0.10.2 and 0.11.2).
    mapped = jax.shard_map(
        on_device,
        axis_names={AXIS},
        in_specs=((_splits(weights), P(AXIS), P()),),
        out_specs=(P(AXIS), P()),
        check_vma=False,
    )
    x_GBSD, aux = mapped((weights, x_GBSD, _by_device(documents, size)))
    return shd.map_parts(lambda x_1BSD: x_1BSD[0], (x_GBSD,), specs=(apart,), out=together), aux


def _splits(weights):
    """How AXIS splits a module's arrays."""

    def of_box(box):
        axes = shd.axes_of(box)
        spec = P() if axes is None else shd.only(shd.spec_of(axes), (AXIS,))
        return jax.tree.map(lambda _: spec, box)

    return jax.tree.map(of_box, weights, is_leaf=lambda box: isinstance(box, nnx.Variable))


def _by_device(documents: Documents, size: int) -> Documents:
    """With a first axis for the devices whose rows they are of."""

    def local(x):
        return x.reshape(size, x.shape[0] // size, *x.shape[1:])

    parts = {}
    for name, axes in AXES.items():
        spec = shd.spec_of(axes)
        whole = getattr(documents, name)
        parts[name] = shd.map_parts(local, (whole,), specs=(spec,), out=P(None, *spec.partitions))
    return dataclasses.replace(documents, **parts)


def _parts(documents: Documents, size: int) -> list[Documents]:
    at = jax.lax.axis_index(AXIS)

    def part(number: int) -> Documents:
        place = (at - number) % size
        return jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, axis=0, keepdims=False),
            documents,
        )

    return [part(number) for number in range(size)]


def summed(function: Callable, x_BSD, shared: Any, *, execution: Execution):
    """`function(x_BSD, shared)`, of the whole rows of all devices, at the rows of the stream.

    In a ring (`run`) shared is a list for the parts, and the function is called with each: the rows
    of the device before come first, as their sum has the longest way to go. A device's own come
    last; their sum needs no further way.
    """
    if execution.async_tensor != AsyncTensor.RING:
        return function(x_BSD, shared)
    size, y_BSD = len(shared), None
    parts = [x_BSD]
    for _ in range(size - 1):
        parts.append(_passed_on(parts[-1], size))
    for number in (*range(1, size), 0):
        made_BSD = function(parts[number], shared[number])
        y_BSD = made_BSD if y_BSD is None else _passed_on(y_BSD, size) + made_BSD
    return y_BSD


def _passed_on(x, size: int):
    return jax.lax.ppermute(x, AXIS, [(i, (i + 1) % size) for i in range(size)])
