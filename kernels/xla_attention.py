"""Attention in plain XLA operations: the reference of every attention kernel, and the CPU's path.

B rows, S sequence, T key sequence, N query heads, K key heads, G query heads a key head, H head
size, M documents a row at most.
"""

import jax
import jax.numpy as jnp

HAS_QUADRATIC_MEMORY = True
TRACKS_VMA = True


def supported(
    q_BSNH,
    k_BTKH,
    *,
    platform: str,
    compute_capability: str = "9.0",
    cap: float | None = None,
) -> str | None:
    """None if `attention` can run these shapes on this platform, else the reason why not."""
    num_heads, num_kv_heads = q_BSNH.shape[2], k_BTKH.shape[2]
    if num_heads % num_kv_heads:
        return f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}"
    return None


def attention(
    q_BSNH,
    k_BTKH,
    v_BTKH,
    *,
    documents,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
):
    """Causal attention inside each document; padding comes out as zeros.

    documents: with `segments_BS`, int32, 0 for padding. window: a token sees itself and the
    `window - 1` before it. cap: scores become cap * tanh(score / cap). Scores and softmax are
    float32; returns [B, S, N, H] in the input dtype. Holds [B, N, S, T] scores: memory grows with
    the square of the sequence.
    """
    rows, seq, _, head_size = q_BSNH.shape
    q_BSKGH = q_BSNH.reshape(rows, seq, k_BTKH.shape[2], -1, head_size)
    scores_BKGST = jnp.einsum(
        "BSKGH,BTKH->BKGST", q_BSKGH, k_BTKH, preferred_element_type=jnp.float32
    )
    scores_BKGST = scores_BKGST * scale
    if cap is not None:
        scores_BKGST = cap * jnp.tanh(scores_BKGST / cap)
    mask_BST = visible(documents.segments_BS, window)
    scores_BKGST = jnp.where(mask_BST[:, None, None], scores_BKGST, jnp.finfo(jnp.float32).min)
    weights_BKGST = jax.nn.softmax(scores_BKGST, axis=-1)
    weights_BKGST = jnp.where(mask_BST[:, None, None], weights_BKGST, 0.0).astype(v_BTKH.dtype)
    return jnp.einsum("BKGST,BTKH->BSKGH", weights_BKGST, v_BTKH).reshape(q_BSNH.shape)


reference = attention


def visible(segments_BS, window: int | None):
    """bool [B, S, T]: whether token s may look at token t.

    That is one of the same segment, not padding, not ahead, and inside the window.
    """
    token = jnp.arange(segments_BS.shape[1])
    seen = token[:, None] >= token[None, :]
    if window is not None:
        seen &= token[:, None] - token[None, :] < window
    same = segments_BS[:, :, None] == segments_BS[:, None, :]
    return seen[None] & same & (segments_BS > 0)[:, :, None]
