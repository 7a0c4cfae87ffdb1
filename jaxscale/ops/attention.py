"""Attention over packed documents: chooses a kernel and runs it on each device's own rows and heads.

B rows, S sequence, N query heads, K key heads, H head size, M documents a row at most.
"""

import functools
import logging

import jax
import jax.numpy as jnp

from jaxscale import sharding as shd
from jaxscale.config import Attention
from jaxscale.kernels import cudnn_attention, xla_attention
from jaxscale.ops.execution import Execution

log = logging.getLogger(__name__)

# XLA's attention holds [B, N, S, S] scores in float32: 8 GiB a row and layer at 32 heads and 8192 tokens.
MAX_XLA_SEQ_LEN_ON_GPU = 2048


def choose(
    kind: Attention, q_BSNH, k_BSKH, *, platform: str, compute_capability: str = "9.0"
) -> Attention:
    """The kernel that will run. Raises ValueError rather than fall back to quadratic memory on a GPU."""
    reason = cudnn_attention.supported(
        q_BSNH, k_BSKH, platform=platform, compute_capability=compute_capability
    )
    if kind == Attention.CUDNN and reason:
        raise ValueError(
            f"config.attention='cudnn' cannot run: {reason}; set config.attention='auto'"
        )
    if kind != Attention.AUTO:
        return kind
    if reason is None:
        return Attention.CUDNN
    if platform != "cpu" and q_BSNH.shape[1] > MAX_XLA_SEQ_LEN_ON_GPU:
        raise ValueError(
            f"no memory-saving attention for config.seq_len={q_BSNH.shape[1]}: {reason}. Mend that, or accept quadratic "
            f"memory with config.attention='xla'"
        )
    if platform != "cpu":
        _say_once(f"attention runs as plain XLA operations: {reason}")
    return Attention.XLA


@functools.cache
def _say_once(message: str) -> None:
    log.warning("%s", message)


def attention(
    q_BSNH, k_BSKH, v_BSKH, segments_BS, lengths_BM, *, window: int | None, execution: Execution
):
    """Causal attention that stays inside each document. Returns [B, S, N, H]; padding comes out as zeros.

    segments_BS: int32, 0 is padding; lengths_BM: the same as tokens a document (`document_lengths`). Heads may be split
    over more devices than there are key heads: then every device gets the one key head that its query heads share.
    """
    scale = q_BSNH.shape[-1] ** -0.5
    group = q_BSNH.shape[2] // k_BSKH.shape[2]
    hardware = dict(platform=execution.platform, compute_capability=execution.compute_capability)
    kind = choose(execution.attention, q_BSNH, k_BSKH, **hardware)
    kv_is_whole = shd.mesh_axes("kv_heads") != shd.mesh_axes("heads")

    def local(q_BSNH, k_BSKH, v_BSKH, segments_BS, lengths_BM):
        if kv_is_whole:
            first_head = jax.lax.axis_index(shd.mesh_axes("heads")) * q_BSNH.shape[2]
            k_BSKH, v_BSKH = (
                jax.lax.dynamic_slice_in_dim(x, first_head // group, 1, axis=2)
                for x in (k_BSKH, v_BSKH)
            )
        if kind == Attention.CUDNN:
            return cudnn_attention.attention(q_BSNH, k_BSKH, v_BSKH, lengths_BM, scale, window)
        return xla_attention.attention(q_BSNH, k_BSKH, v_BSKH, segments_BS, scale, window)

    q_axes, kv_axes = "batch seq heads head", "batch seq kv_heads head"
    mapped = shd.shard_map(
        local, in_axes=(q_axes, kv_axes, kv_axes, "batch seq", "batch _"), out_axes=q_axes
    )
    with jax.named_scope("attention"):
        return mapped(q_BSNH, k_BSKH, v_BSKH, segments_BS, lengths_BM)


def document_lengths(segments_BS, max_documents: int):
    """int32 [B, M]: tokens of segments 1 to M of each row."""
    document_M = jnp.arange(1, max_documents + 1, dtype=segments_BS.dtype)
    return (segments_BS[:, :, None] == document_M).sum(1, dtype=jnp.int32)
