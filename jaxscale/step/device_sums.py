"""Checksums of what each device itself holds of arrays, copies included, inside a program."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxscale import distributed

# Of a checksum: the sum of the bits, and the sum of the bits mixed with their place.
NUM_WORDS = 2


def device_sums(leaves: Sequence[jax.Array], specs: Sequence[PartitionSpec], *, mesh: Mesh):
    """uint32 [devices, leaves, NUM_WORDS], a row on each device: of its own part of each leaf.

    specs: of the leaves on the mesh. To be called in a compiled program. Reads every byte once, in
    integer arithmetic, so that any NaN is told from another; sends nothing. A bit that is flipped
    changes both words for certain, and anything else goes unseen once in 2**32 or less.
    """

    def on_device(*parts):
        return jnp.stack([_checksum(part) for part in parts])[None]

    # Without check_vma: what JAX takes for the same on all devices is read on each of them.
    mapped = jax.shard_map(
        on_device,
        mesh=None if _is_in_use(mesh) else mesh,
        in_specs=tuple(specs),
        out_specs=PartitionSpec(mesh.axis_names),
        axis_names=set(mesh.axis_names),
        check_vma=False,
    )
    return mapped(*leaves)


def jitted_sums(leaves: Sequence[jax.ShapeDtypeStruct], *, mesh: Mesh) -> jax.stages.Wrapped:
    """A compiled program of a list of such arrays, with these shardings: their `device_sums`."""
    specs = [leaf.sharding.spec for leaf in leaves]
    return jax.jit(lambda arrays: device_sums(arrays, specs, mesh=mesh))


def _is_in_use(mesh: Mesh) -> bool:
    return jax.sharding.get_abstract_mesh() == mesh.abstract_mesh


def of_every_device(sums: jax.Array, mesh: Mesh) -> np.ndarray:
    """What `device_sums` gave, on the host: [devices, ...] in the order of `mesh.devices.flat`.

    An agreement: every process calls it, and all get the same.
    """
    rows = {shard.device: np.asarray(shard.data)[0] for shard in sums.addressable_shards}
    devices = list(mesh.devices.flat)
    mine = [rows[device] for device in devices if device in rows]
    # A process may have more devices than another.
    most = int(distributed.largest([len(mine)])[0])
    padded = np.zeros((most, *sums.shape[1:]), np.uint32)
    padded[: len(mine)] = mine
    theirs = [iter(row) for row in distributed.every_process_has(padded)]
    return np.stack([next(theirs[device.process_index]) for device in devices])


def _checksum(x):
    """uint32 [NUM_WORDS]."""
    words = _bits(x).reshape(-1)
    place = jax.lax.iota(jnp.uint32, words.size)
    # A bijection of each word, another one at each place: the finaliser of MurmurHash3, less its
    # first shift. XOR alone would let two words that differ in one bit change places.
    mixed = (words ^ (place * np.uint32(0x9E3779B1))) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    mixed = mixed ^ (mixed >> np.uint32(16))
    return jnp.stack([words.sum(dtype=jnp.uint32), mixed.sum(dtype=jnp.uint32)])


def _bits(x):
    """As uint32; of 8 bytes two, of less than 4 one each."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def num_bytes_read(leaves: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Of one device, of leaves with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )
