"""Token embedding, with the table split over any of its two axes.

B rows, S sequence, V vocabulary, D model, P devices that share the table's rows.
"""

import jax
import jax.numpy as jnp

from jaxscale import sharding as shd


def embed(tokens_BS, table_VD, *, dtype):
    """The tokens' rows of the table as [B, S, D] in `dtype`; an unknown token gives zeros.

    The table is never gathered: where `embed` splits it, the devices that share it exchange
    activations instead (134 MB against 1 GiB for Llama-3-8B and 16,384 tokens), and its gradient is
    summed in float32 and is made in shards.
    """
    vocab_axes, embed_axes = shd.mesh_axes("vocab"), shd.mesh_axes("embed")
    splits_sequence = bool(vocab_axes) and shd.mesh_axes("residual_seq") == vocab_axes

    def local(tokens_BS, table_VD):
        if embed_axes:
            tokens_BS = jax.lax.all_gather(tokens_BS, embed_axes, axis=0, tiled=True)
        x_BSD = _rows(tokens_BS, table_VD, vocab_axes=vocab_axes).astype(dtype)
        if embed_axes:
            x_BSD = _exchange(x_BSD, embed_axes)
        # Each value comes from the one device that has it: adding the others' zeros rounds nothing.
        if splits_sequence:
            return jax.lax.psum_scatter(x_BSD, vocab_axes, scatter_dimension=1, tiled=True)
        return jax.lax.psum(x_BSD, vocab_axes) if vocab_axes else x_BSD

    out_axes = f"batch {'residual_seq' if splits_sequence else 'seq'} act_embed"
    mapped = shd.shard_map(local, in_axes=("batch seq", "vocab embed"), out_axes=out_axes)
    with jax.named_scope("embedding"):
        return mapped(tokens_BS, table_VD)


def _rows(tokens_BS, table_VD, *, vocab_axes):
    first = jax.lax.axis_index(vocab_axes) * table_VD.shape[0] if vocab_axes else 0
    local_BS = tokens_BS - first
    inside_BS = (local_BS >= 0) & (local_BS < table_VD.shape[0])
    x_BSD = table_VD.at[local_BS].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return jnp.where(inside_BS[..., None], x_BSD, jnp.zeros((), x_BSD.dtype))


def _exchange(x_BSD, axes):
    """All rows' part of D to this device's rows' whole D.

    Exchanged along a leading dimension of its own and transposed after it. An all-to-all that
    concatenates D makes XLA lay its result out with D first, and the residual stream of every layer
    follows: norms then reduce over strided memory.
    """
    num_devices = jax.lax.axis_size(axes)
    rows, seq, part = x_BSD.shape
    x_PBSD = x_BSD.reshape(num_devices, rows // num_devices, seq, part)
    x_PBSD = jax.lax.all_to_all(x_PBSD, axes, 0, 0)
    return x_PBSD.transpose(1, 2, 0, 3).reshape(rows // num_devices, seq, num_devices * part)
