"""Attention in plain XLA operations: the reference of every attention kernel, and the CPU's path.

B rows, S sequence, T key sequence, N query heads, K key heads, G query heads a key head, H head
size, V head size of the values, M documents a row at most.
"""

import functools

import jax
import jax.numpy as jnp

# The log-sum-exp of no keys: far below any score, and differences of it are finite.
NOTHING = -1e30

HAS_QUADRATIC_MEMORY = True
TRACKS_VMA = True


def supported(
    q_BSNH,
    k_BTKH,
    *,
    platform: str,
    compute_capability: str = "9.0",
    cap: float | None = None,
    v_head_size: int | None = None,
) -> str | None:
    """None if `attention` can run these shapes on this platform, else the reason why not."""
    num_heads, num_kv_heads = q_BSNH.shape[2], k_BTKH.shape[2]
    if num_heads % num_kv_heads:
        return f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}"
    return None


def attention(
    q_BSNH,
    k_BTKH,
    v_BTKV,
    *,
    documents,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    deterministic: bool = False,
):
    """Causal attention inside each document; padding comes out as zeros.

    documents: with `segments_BS`, int32, 0 for padding. window: a token sees itself and the
    `window - 1` before it. cap: scores become cap * tanh(score / cap). deterministic: it always is.
    Scores and softmax are float32; returns [B, S, N, V] in the input dtype. Holds [B, N, S, T]
    scores: memory grows with the square of the sequence.
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
    weights_BKGST = jnp.where(mask_BST[:, None, None], weights_BKGST, 0.0).astype(v_BTKV.dtype)
    out_BSKGV = jnp.einsum("BKGST,BTKV->BSKGV", weights_BKGST, v_BTKV)
    return out_BSKGV.reshape(*q_BSNH.shape[:3], -1)


reference = attention


def partial_forward(q_BSNH, k_BTKH, v_BTKH, *, parts, causal: bool, scale: float):
    """Attention to some of the keys: (output [B, S, N, H] in the input dtype, log-sum-exp of the
    scores float32 [B, S, N]), 0 and -1e30 where a query sees none of them.

    parts: with `q_starts_BM`, `q_lengths_BM`, `k_starts_BM` and `k_lengths_BM`, int32: document m
    is those queries and those keys. causal: its query i sees its keys up to the ith, else all.
    """
    scores_BKGST, seen_BKGST = _partial_scores(
        q_BSNH, k_BTKH, parts=parts, causal=causal, scale=scale
    )
    masked_BKGST = jnp.where(seen_BKGST, scores_BKGST, NOTHING)
    lse_BKGS = jax.nn.logsumexp(masked_BKGST, axis=-1)
    lse_BKGS = jnp.where(seen_BKGST.any(-1), lse_BKGS, NOTHING)
    weights_BKGST = _weights(scores_BKGST, seen_BKGST, lse_BKGS=lse_BKGS).astype(v_BTKH.dtype)
    out_BSKGH = jnp.einsum("BKGST,BTKH->BSKGH", weights_BKGST, v_BTKH)
    return out_BSKGH.reshape(q_BSNH.shape), _by_token(lse_BKGS)


def partial_backward(
    q_BSNH,
    k_BTKH,
    v_BTKH,
    *,
    parts,
    causal: bool,
    scale: float,
    out_BSNH,
    lse_BSN,
    grad_BSNH,
    deterministic: bool = False,
):
    """This call's parts of dq, dk and dv, in the input dtypes; those of all calls add up.

    out_BSNH, lse_BSN, grad_BSNH: of the attention to all keys, merged of the calls that saw them.
    """
    scores_BKGST, seen_BKGST = _partial_scores(
        q_BSNH, k_BTKH, parts=parts, causal=causal, scale=scale
    )
    num_keys = k_BTKH.shape[2]
    q_BSKGH, out_BSKGH, grad_BSKGH = (
        x.reshape(*x.shape[:2], num_keys, -1, x.shape[-1]) for x in (q_BSNH, out_BSNH, grad_BSNH)
    )
    lse_BKGS = lse_BSN.reshape(*lse_BSN.shape[:2], num_keys, -1).transpose(0, 2, 3, 1)
    weights_BKGST = _weights(scores_BKGST, seen_BKGST, lse_BKGS=lse_BKGS)
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    dweights_BKGST = einsum("BSKGH,BTKH->BKGST", grad_BSKGH, v_BTKH)
    seen_BKGS = einsum("BSKGH,BSKGH->BKGS", out_BSKGH, grad_BSKGH)
    dscores_BKGST = weights_BKGST * (dweights_BKGST - seen_BKGS[..., None]) * scale
    weights_BKGST, dscores_BKGST = (x.astype(q_BSNH.dtype) for x in (weights_BKGST, dscores_BKGST))
    dq_BSKGH = jnp.einsum("BKGST,BTKH->BSKGH", dscores_BKGST, k_BTKH)
    dk_BTKH = jnp.einsum("BKGST,BSKGH->BTKH", dscores_BKGST, q_BSKGH)
    dv_BTKH = jnp.einsum("BKGST,BSKGH->BTKH", weights_BKGST, grad_BSKGH)
    return dq_BSKGH.reshape(q_BSNH.shape), dk_BTKH, dv_BTKH


def _partial_scores(q_BSNH, k_BTKH, *, parts, causal: bool, scale: float):
    """Scores, float32 [B, K, G, S, T], and which of them count."""
    rows, seq, _, head_size = q_BSNH.shape
    q_BSKGH = q_BSNH.reshape(rows, seq, k_BTKH.shape[2], -1, head_size)
    scores_BKGST = jnp.einsum(
        "BSKGH,BTKH->BKGST", q_BSKGH, k_BTKH, preferred_element_type=jnp.float32
    )
    q_document_BS, q_place_BS = places(parts.q_starts_BM, parts.q_lengths_BM, seq=seq)
    k_document_BT, k_place_BT = places(parts.k_starts_BM, parts.k_lengths_BM, seq=k_BTKH.shape[1])
    seen_BST = (q_document_BS[:, :, None] == k_document_BT[:, None]) & (q_document_BS >= 0)[
        ..., None
    ]
    if causal:
        seen_BST &= q_place_BS[:, :, None] >= k_place_BT[:, None]
    return scores_BKGST * scale, seen_BST[:, None, None]


def _weights(scores_BKGST, seen_BKGST, *, lse_BKGS):
    return jnp.where(seen_BKGST, jnp.exp(scores_BKGST - lse_BKGS[..., None]), 0.0)


def _by_token(x_BKGS):
    """[B, S, N]."""
    rows, _, _, seq = x_BKGS.shape
    return x_BKGS.transpose(0, 3, 1, 2).reshape(rows, seq, -1)


def places(starts_BM, lengths_BM, *, seq: int):
    """Of each token: its document, from 0, or -1 for none, and its place in it; int32 [B, S]."""
    token_S = jnp.arange(seq, dtype=jnp.int32)
    place_BMS = token_S - starts_BM[..., None]
    inside_BMS = (place_BMS >= 0) & (place_BMS < lengths_BM[..., None])
    document_BS = jnp.argmax(inside_BMS, axis=1).astype(jnp.int32)
    place_BS = jnp.where(inside_BMS, place_BMS, 0).sum(1, dtype=jnp.int32)
    return jnp.where(inside_BMS.any(1), document_BS, -1), place_BS


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
