"""Two halves of every device's rows: collectives of one run beside products of the other.

With tensor parallelism each product of a layer waits for a gather of the residual stream, or is
waited for by a reduce-scatter. Two halves of a batch do not wait for each other (Wang et al. 2024,
Domino, arXiv:2409.15241), and XLA's scheduler finds that by itself. Nothing else changes: no
product is cut along its weight, and nothing is copied but the rows, once for all layers.

B rows, S sequence, D model, M documents.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from jaxscale import sharding as shd
from jaxscale.ops.documents import AXES, Documents

RESIDUAL = "residual_rows residual_seq act_embed"


def split(x_BSD, axes: str = RESIDUAL):
    """The first and the second half of each device's rows. Raises ValueError if they are odd.

    Of rows that devices share, and that are split between blocks, the halves of each one's part.
    """
    shares = [a for a in shd.mesh_axes("residual_rows") if a not in shd.mesh_axes(axes.split()[0])]
    sizes = jax.sharding.get_abstract_mesh().shape
    num_parts = math.prod(sizes[axis] for axis in shares)

    def local(x):
        if x.shape[0] % (2 * num_parts):
            raise ValueError(
                f"config.mesh.async_tensor='halves': {x.shape[0]} rows cannot be halved; "
                "make the rows of a microbatch a multiple of 2 * data * fsdp"
            )
        size, rest = x.shape[0] // 2, x.shape[1:]
        halves = x.reshape(num_parts, 2, size // num_parts, *rest)
        # Its transpose is one concatenation; that of slices is a sum of padded arrays.
        return tuple(half.reshape(size, *rest) for half in jax.lax.split(halves, (1, 1), axis=1))

    return shd.shard_map(local, in_axes=(axes,), out_axes=(axes, axes))(x_BSD)


def join(halves):
    """The inverse of `split`."""
    local = functools.partial(jnp.concatenate, axis=0)
    mapped = shd.shard_map(
        lambda a, b: local([a, b]), in_axes=(RESIDUAL, RESIDUAL), out_axes=RESIDUAL
    )
    return mapped(*halves)


def split_documents(documents: Documents) -> tuple[Documents, Documents]:
    parts = {name: split(getattr(documents, name), of) for name, of in AXES.items()}
    first, second = (
        dataclasses.replace(documents, **{name: pair[i] for name, pair in parts.items()})
        for i in range(2)
    )
    return first, second
