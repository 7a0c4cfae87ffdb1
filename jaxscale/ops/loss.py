"""Cross-entropy from the last hidden states, without ever holding the logits of a batch.

Tokens go through the head a chunk at a time; each chunk's logits exist in the compute dtype only,
and the forward pass forms the gradients as well (dlogits = softmax - onehot, by comparing an iota
with the target: no scatter), so that the head costs three matrix products and nothing is repeated.
B rows, S sequence, T tokens of a chunk, D model, V vocabulary.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from jaxscale import sharding as shd
from jaxscale.ops.embedding import scattered_over_vocab

# bfloat16 logits of a chunk: 1 GiB at a vocabulary of 128k.
CHUNK_TOKENS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    vocab_size: int
    z_loss: float
    cap: float | None
    dtype: jnp.dtype


def cross_entropy(
    x_BSD,
    head_DV,
    targets_BS,
    *,
    vocab_size: int,
    dtype,
    z_loss: float = 0.0,
    cap: float | None = None,
    enlarged=None,
):
    """The sum over tokens of -log p(target) + z_loss * logsumexp**2, float32.

    A target of -1 counts nothing. head_DV: float32 as stored ("embed vocab"); columns from
    `vocab_size` on are padding and get no probability. Its gradient is float32 and comes out as
    stored, reduce-scattered once. cap: logits become cap * tanh(logit / cap). dtype: of the
    products.

    enlarged: float32, a scalar, for a `dtype` of little range. The forward pass makes gradients,
    before they are multiplied by what the loss is: so many times as large they do not vanish, and
    the backward pass makes them smaller again.
    """
    options = _Options(vocab_size=vocab_size, z_loss=z_loss, cap=cap, dtype=jnp.dtype(dtype))
    # Outside of the derivative, whose gradient is laid out as what comes in.
    x_BSD = shd.constrain(x_BSD, scattered_over_vocab().axes)
    return _cross_entropy(x_BSD, head_DV, targets_BS, enlarged, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(x_BSD, head_DV, targets_BS, enlarged, options):
    del enlarged
    return _run(x_BSD, head_DV, targets_BS, options=options, with_gradients=False)[0]


def _cross_entropy_fwd(x_BSD, head_DV, targets_BS, enlarged, options):
    loss, dx_BSD, dhead_DV = _run(
        x_BSD,
        head_DV,
        targets_BS,
        options=options,
        with_gradients=True,
        enlarged=enlarged,
    )
    return loss, (dx_BSD, dhead_DV, enlarged)


def _cross_entropy_bwd(options, residuals, dloss):
    dx_BSD, dhead_DV, enlarged = residuals
    if enlarged is not None:
        dloss = dloss / enlarged
    dx_BSD = (dx_BSD.astype(jnp.float32) * dloss).astype(dx_BSD.dtype)
    return dx_BSD, dhead_DV * dloss, None, None


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def _run(x_BSD, head_DV, targets_BS, *, options, with_gradients, enlarged=None):
    embed_axes = shd.mesh_axes("embed")
    # Stages of a pipeline share the vocabulary too, each within its own region.
    vocab_axes = shd.mesh_axes("vocab", with_manual=True)
    token_axes = shd.mesh_axes("batch seq")
    # x comes in parts along these, and its gradient goes so. A chunk has as many tokens of each
    # part, so that x is whole a chunk at a time, and of a sum over the vocabulary each device gets
    # its part. Over stages, which may be on other hosts, those alone are sent.
    scattered = scattered_over_vocab()
    part_axes = scattered.mesh_axes

    def varying(x, axes):
        return jax.lax.pcast(x, axes, to="varying") if axes else x

    def local(x_BSD, head_DV, targets_BS, *enlarged):
        head_DV = head_DV.astype(options.dtype)
        if embed_axes:
            head_DV = jax.lax.all_gather(head_DV, embed_axes, axis=0, tiled=True)
        rows, part, dim = x_BSD.shape
        parts = targets_BS.shape[0] // rows, targets_BS.shape[1] // part
        num_parts, tokens = math.prod(parts), rows * part
        num_chunks, size = _chunks(tokens, num_parts=num_parts)
        padding = num_chunks * size - tokens
        x_TD = jnp.pad(x_BSD.reshape(-1, dim), ((0, padding), (0, 0)))
        targets = targets_BS.reshape(parts[0], rows, parts[1], part).swapaxes(1, 2)
        targets = targets.reshape(num_parts, -1)
        targets = jnp.pad(targets, ((0, 0), (0, padding)), constant_values=-1)
        targets = targets.reshape(num_parts, num_chunks, size).swapaxes(0, 1)
        chunks = (x_TD.reshape(num_chunks, size, dim), targets.reshape(num_chunks, -1))

        def step(carry, chunk):
            loss, dhead_DV = carry
            x_TD, targets_T = chunk
            if part_axes:
                x_TD = jax.lax.all_gather(x_TD, part_axes, axis=0, tiled=True)
            chunk_loss, dlogits_TV = _chunk(
                x_TD,
                head_DV,
                targets_T,
                options=options,
                vocab_axes=vocab_axes,
                enlarged=enlarged,
            )
            if not with_gradients:
                return (loss + chunk_loss, dhead_DV), None
            dx_TD = jnp.einsum("TV,DV->TD", dlogits_TV, head_DV)
            if part_axes:
                dx_TD = jax.lax.psum_scatter(dx_TD, part_axes, scatter_dimension=0, tiled=True)
            dhead_DV += jnp.einsum(
                "TD,TV->DV", x_TD, dlogits_TV, preferred_element_type=jnp.float32
            )
            return (loss + chunk_loss, dhead_DV), dx_TD

        loss = varying(jnp.zeros((), jnp.float32), token_axes)
        dhead_DV = jnp.zeros(head_DV.shape if with_gradients else (), jnp.float32)
        dhead_DV = varying(dhead_DV, (*token_axes, *vocab_axes) if with_gradients else ())
        (loss, dhead_DV), dx = jax.lax.scan(step, (loss, dhead_DV), chunks)
        loss = jax.lax.psum(loss, token_axes) if token_axes else loss
        if not with_gradients:
            return (loss,)
        if left := tuple(axis for axis in vocab_axes if axis not in part_axes):
            dx = jax.lax.psum(dx, left)
        if embed_axes:
            dhead_DV = jax.lax.psum_scatter(dhead_DV, embed_axes, scatter_dimension=0, tiled=True)
        if replicated := tuple(axis for axis in token_axes if axis not in embed_axes):
            dhead_DV = jax.lax.psum(dhead_DV, replicated)
        return loss, dx.reshape(-1, dim)[:tokens].reshape(x_BSD.shape), dhead_DV

    in_axes = (scattered.axes, "embed vocab", "batch seq")
    out_axes = ("", in_axes[0], in_axes[1]) if with_gradients else ("",)
    more = () if enlarged is None else (enlarged,)
    mapped = shd.shard_map(local, in_axes=(*in_axes, *[""] * len(more)), out_axes=out_axes)
    return mapped(x_BSD, head_DV, targets_BS, *more)


def _chunk(x_TD, head_DV, targets_T, *, options, vocab_axes, enlarged):
    """The chunk's summed loss and its dlogits [T, V] in x's dtype; V is this device's part.

    enlarged: what dlogits are multiplied by, one number or none.
    """
    logits_TV = jnp.einsum("TD,DV->TV", x_TD, head_DV)
    width = head_DV.shape[1]
    first = jax.lax.axis_index(vocab_axes) * width if vocab_axes else 0
    word_V = first + jnp.arange(width, dtype=jnp.int32)
    logits32_TV = _capped(logits_TV, options.cap)
    slope_TV = 1.0 if options.cap is None else 1 - (logits32_TV / options.cap) ** 2
    if width * math.prod(jax.lax.axis_size(axis) for axis in vocab_axes) > options.vocab_size:
        logits32_TV = jnp.where(word_V < options.vocab_size, logits32_TV, -jnp.inf)
    max_T = logits32_TV.max(-1)
    max_T = jax.lax.pmax(max_T, vocab_axes) if vocab_axes else max_T
    exp_TV = jnp.exp(logits32_TV - max_T[:, None])
    # Looked up: as a second sum over the vocabulary it would be a sixth of the instructions.
    index_T = targets_T - first
    is_here_T = (index_T >= 0) & (index_T < width)
    index_T1 = jnp.clip(index_T, 0, width - 1)[:, None]
    logit_T = _capped(jnp.take_along_axis(logits_TV, index_T1, axis=1)[:, 0], options.cap)
    sums = exp_TV.sum(-1), jnp.where(is_here_T, logit_T, 0.0)
    sum_T, target_logit_T = jax.lax.psum(sums, vocab_axes) if vocab_axes else sums
    lse_T = max_T + jnp.log(sum_T)
    counts_T = (targets_T >= 0).astype(jnp.float32)
    loss = jnp.sum(counts_T * (lse_T - target_logit_T + options.z_loss * lse_T**2))
    for factor in enlarged:
        counts_T = counts_T * factor
    share_T = counts_T * (1 + 2 * options.z_loss * lse_T) / sum_T
    is_target_TV = word_V == targets_T[:, None]
    dlogits_TV = exp_TV * share_T[:, None] - jnp.where(is_target_TV, counts_T[:, None], 0.0)
    return loss, (dlogits_TV * slope_TV).astype(x_TD.dtype)


def _capped(logits, cap: float | None):
    logits32 = logits.astype(jnp.float32)
    return logits32 if cap is None else cap * jnp.tanh(logits32 / cap)


def _chunks(tokens: int, *, num_parts: int) -> tuple[int, int]:
    """The fewest chunks of at most CHUNK_TOKENS, and how many of a part's tokens each has.

    The last is padded by less than a token a chunk.
    """
    num_chunks = -(-tokens * num_parts // CHUNK_TOKENS)
    return num_chunks, -(-tokens // num_chunks)
