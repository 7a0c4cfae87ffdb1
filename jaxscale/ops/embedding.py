"""Token embedding, with the table split over any of its two axes.

B rows, S sequence, T tokens of all rows, V vocabulary, D model, P devices that have a part of D
each.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxscale import sharding as shd
from jaxscale.ops.ordered_rows import rows_in_order


def embed(tokens_BS, table_VD, *, dtype, in_order: bool = False):
    """The tokens' rows of the table as [B, S, D] in `dtype`; an unknown token gives zeros.

    in_order: the gradient is the same, bit by bit, each time (`ordered_rows.py`).

    The table is never gathered: where `embed` splits it, the devices that share it exchange
    activations instead (134 MB against 1 GiB for Llama-3-8B and 16,384 tokens), and its gradient is
    summed in float32 and is made in shards.
    """
    # Stages of a pipeline share the vocabulary too, each within its own region.
    vocab_axes = shd.mesh_axes("vocab", with_manual=True)
    embed_axes = shd.mesh_axes("embed")
    scattered = scattered_over_vocab()

    rows = functools.partial(_rows, vocab_axes=vocab_axes, in_order=in_order)

    def local(tokens_BS, table_VD):
        if embed_axes:
            # Those of each device, whether it has other rows than this one or other parts of them.
            tokens_PBS = jax.lax.all_gather(tokens_BS, embed_axes)
            x_PBSD = rows(tokens_PBS, table_VD).astype(dtype)
            x_BSD = _exchange(x_PBSD, embed_axes)
        else:
            x_BSD = rows(tokens_BS, table_VD).astype(dtype)
        # Each value comes from the one device that has it: adding the others' zeros rounds nothing.
        for dim, axes in enumerate(scattered):
            if axes:
                x_BSD = jax.lax.psum_scatter(x_BSD, axes, scatter_dimension=dim, tiled=True)
        left = tuple(a for a in vocab_axes if a not in scattered.mesh_axes)
        return jax.lax.psum(x_BSD, left) if left else x_BSD

    in_axes = "batch seq", "vocab embed"
    mapped = shd.shard_map(local, in_axes=in_axes, out_axes=scattered.axes)
    with jax.named_scope("embedding"):
        return mapped(tokens_BS, table_VD)


class Scattered(NamedTuple):
    """Mesh axes that split the residual stream's rows, or its sequence, where they share tokens."""

    rows: tuple[str, ...]
    seq: tuple[str, ...]

    @property
    def axes(self) -> str:
        """The logical axes of x."""
        rows = "residual_rows" if self.rows else "batch"
        return f"{rows} {'residual_seq' if self.seq else 'seq'} act_embed"

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        return self.rows + self.seq


def scattered_over_vocab() -> Scattered:
    """Sequence parallelism, if over devices that share the vocabulary, whose sums are scattered."""
    vocab_axes = shd.mesh_axes("vocab", with_manual=True)

    def beyond(split: str, shared: str) -> tuple[str, ...]:
        axes = tuple(a for a in shd.mesh_axes(split) if a not in shd.mesh_axes(shared))
        return axes if set(axes) <= set(vocab_axes) else ()

    return Scattered(beyond("residual_rows", "batch"), beyond("residual_seq", "seq"))


def _rows(tokens, table_VD, *, vocab_axes, in_order: bool):
    """The rows of tokens of any shape; zeros for those that this device has not."""
    first = jax.lax.axis_index(vocab_axes) * table_VD.shape[0] if vocab_axes else 0
    local = tokens - first
    if in_order:
        x_TD = rows_in_order(table_VD, local.reshape(-1))
        return x_TD.reshape(*local.shape, -1)
    inside = (local >= 0) & (local < table_VD.shape[0])
    x = table_VD.at[local].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return jnp.where(inside[..., None], x, jnp.zeros((), x.dtype))


def _exchange(x_PBSD, axes):
    """A part of D of all devices' tokens to the whole D of this device's.

    Exchanged along a leading dimension of its own and transposed after it. An all-to-all that
    concatenates D makes XLA lay its result out with D first, and the residual stream of every layer
    follows: norms then reduce over strided memory.
    """
    x_PBSD = jax.lax.all_to_all(x_PBSD, axes, 0, 0)
    devices, rows, seq, part = x_PBSD.shape
    return x_PBSD.transpose(1, 2, 0, 3).reshape(rows, seq, devices * part)
