"""cuDNN flash attention with packed documents, for H100 and later.

`jax.nn.dot_product_attention(implementation="cudnn")` knows no document boundaries. This binds
jax's own cuDNN primitives, which do ("ragged" batches), and differs from jax's internal entry point
in three ways: the offsets are computed here (jax < 0.11.2 scales the key offsets by the query's
head count: wrong for grouped heads); the residuals carry checkpoint names, so that a remat policy
can keep them and the backward pass never repeats the forward pass; and the log-sum-exp is kept as
[B, S, N] instead of cuDNN's [E, N, S] (64 times smaller at 64 documents a row).

The backward primitive takes any output and log-sum-exp, so attention to some of the keys is here
too (`partial_forward`, `partial_backward`), whose parts are merged elsewhere.

B rows, S sequence, T key sequence, N query heads, K key heads, H head size, M documents a row at
most, E = B * M.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.ad_checkpoint import checkpoint_name

from jaxscale.kernels.xla_attention import NOTHING, places
from jaxscale.kernels.xla_attention import reference as reference

HAS_QUADRATIC_MEMORY = False
TRACKS_VMA = False

MAX_HEAD_SIZE = 256


def supported(
    q_BSNH,
    k_BSKH,
    *,
    platform: str,
    compute_capability: str = "9.0",
    cap: float | None = None,
    v_head_size: int | None = None,
) -> str | None:
    """None if `attention` can run these shapes on this platform ("gpu"), else the reason."""
    if platform not in ("gpu", "cuda"):
        return f"cuDNN needs an NVIDIA GPU, not {platform}"
    if float(compute_capability) < 9.0:
        return (
            f"cuDNN attends to packed documents on H100 and later (compute capability 9.0), not "
            f"{compute_capability}"
        )
    return _objection(q_BSNH, k_BSKH, cap=cap, v_head_size=v_head_size)


def _objection(q_BSNH, k_BSKH, *, cap: float | None, v_head_size: int | None) -> str | None:
    """What is wrong with arrays that fit each other, or with the option, if anything."""
    *_, num_heads, head_size = q_BSNH.shape
    if q_BSNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attention takes bfloat16 or float16, not {q_BSNH.dtype}"
    if head_size > MAX_HEAD_SIZE or head_size % 8:
        return f"head_size={head_size} is not a multiple of 8 up to {MAX_HEAD_SIZE}"
    if v_head_size not in (None, head_size):
        return f"cuDNN attention is bound for one head size here, not {head_size}/{v_head_size}"
    if num_heads % k_BSKH.shape[2]:
        return f"num_heads={num_heads} is not a multiple of num_kv_heads={k_BSKH.shape[2]}"
    if cap is not None:
        return f"cuDNN attention has no soft cap on its scores, and the model asks for {cap}"
    return None


def attention(
    q_BSNH,
    k_BSKH,
    v_BSKH,
    *,
    documents,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    deterministic: bool = False,
):
    """Causal attention inside each document; padding comes out as zeros.

    documents: with `lengths_BM`, int32 tokens of each document in order from the row's start, 0 for
    none; tokens past the last document are padding. window: a token sees itself and the
    `window - 1` before it. deterministic: XLA's option decides (xla/options.py), and takes 28 GiB a
    row of 8192 tokens and 16 heads. Returns [B, S, N, H] in the input dtype; statistics are
    float32. Raises ValueError for what `supported` would refuse.
    """
    if reason := _objection(q_BSNH, k_BSKH, cap=cap, v_head_size=v_BSKH.shape[-1]):
        raise ValueError(reason)
    return _attention(q_BSNH, k_BSKH, v_BSKH, documents.lengths_BM, scale, window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(q_BSNH, k_BSKH, v_BSKH, lengths_BM, scale, window):
    return _attention_fwd(q_BSNH, k_BSKH, v_BSKH, lengths_BM, scale, window)[0]


def _attention_fwd(q_BSNH, k_BSKH, v_BSKH, lengths_BM, scale, window):
    options = dict(parts=_whole(lengths_BM), **_options(scale, window))
    out_BSNH, lse_BSN = _forward(q_BSNH, k_BSKH, v_BSKH, **options)
    out_BSNH = checkpoint_name(out_BSNH, "attention_out")
    lse_BSN = checkpoint_name(lse_BSN, "attention_lse")
    return out_BSNH, (q_BSNH, k_BSKH, v_BSKH, lengths_BM, out_BSNH, lse_BSN)


def _attention_bwd(scale, window, residuals, grad_BSNH):
    *qkv, lengths_BM, out_BSNH, lse_BSN = residuals
    options = dict(parts=_whole(lengths_BM), **_options(scale, window))
    grads = _backward(*qkv, out_BSNH=out_BSNH, lse_BSN=lse_BSN, grad_BSNH=grad_BSNH, **options)
    return *grads, None


_attention.defvjp(_attention_fwd, _attention_bwd)


def partial_forward(q_BSNH, k_BTKH, v_BTKH, *, parts, causal: bool, scale: float):
    """As that of `xla_attention`; of 2 documents or more, as jax hands no starts of one to cuDNN.

    Without a causal mask a document may have any number of queries and of keys.
    """
    options = _options(scale, None, causal=causal)
    return _forward(q_BSNH, k_BTKH, v_BTKH, parts=parts, **options)


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
    """As that of `xla_attention`."""
    options = dict(parts=parts, **_options(scale, None, causal=causal))
    options |= dict(out_BSNH=out_BSNH, lse_BSN=lse_BSN, grad_BSNH=grad_BSNH)
    return _backward(q_BSNH, k_BTKH, v_BTKH, **options)


def _forward(q_BSNH, k_BTKH, v_BTKH, *, parts, **options):
    """The output and the log-sum-exp [B, S, N], zeros and `NOTHING` where there is no document."""
    out_BSNH, stats_ENS = cudnn._dot_product_attention_fwd_p.bind(
        q_BSNH,
        k_BTKH,
        v_BTKH,
        *_operands(q_BSNH, k_BTKH, parts=parts),
        is_training=True,
        **options,
    )
    rows, documents = parts.q_lengths_BM.shape
    document_BS, place_BS = places(parts.q_starts_BM, parts.q_lengths_BM, seq=q_BSNH.shape[1])
    # cuDNN's statistics are by document, head and token of the document.
    stats_BMNS = stats_ENS.reshape(rows, documents, *stats_ENS.shape[1:])
    lse_BSN = stats_BMNS[jnp.arange(rows)[:, None], document_BS, :, place_BS]
    lse_BSN = jnp.where((document_BS >= 0)[..., None], lse_BSN, NOTHING)
    return _where_read(out_BSNH, document_BS), lse_BSN


def _backward(q_BSNH, k_BTKH, v_BTKH, *, parts, out_BSNH, lse_BSN, grad_BSNH, **options):
    """dq, dk and dv."""
    dq_BSNH, dk_BTKH, dv_BTKH, *_ = cudnn._dot_product_attention_bwd_p.bind(
        q_BSNH,
        k_BTKH,
        v_BTKH,
        *_operands(q_BSNH, k_BTKH, parts=parts),
        _by_document(lse_BSN, parts.q_starts_BM),
        out_BSNH,
        grad_BSNH,
        **options,
    )
    document_BS, _ = places(parts.q_starts_BM, parts.q_lengths_BM, seq=q_BSNH.shape[1])
    document_BT, _ = places(parts.k_starts_BM, parts.k_lengths_BM, seq=k_BTKH.shape[1])
    dk_BTKH, dv_BTKH = (_where_read(x, document_BT) for x in (dk_BTKH, dv_BTKH))
    return _where_read(dq_BSNH, document_BS), dk_BTKH, dv_BTKH


def _where_read(x_BSNH, document_BS):
    """Zeros where there is no document: cuDNN leaves those rows unwritten."""
    return jnp.where((document_BS >= 0)[..., None, None], x_BSNH, jnp.zeros((), x_BSNH.dtype))


def _options(scale, window, *, causal: bool = True):
    mask = cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING
    return dict(
        scale=scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=mask,
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=window,
    )


class _Whole(NamedTuple):
    """Documents whose queries and keys are the same tokens, as `partial_forward` has its parts."""

    q_starts_BM: Any
    q_lengths_BM: Any
    k_starts_BM: Any
    k_lengths_BM: Any


def _whole(lengths_BM) -> _Whole:
    starts_BM = jnp.cumsum(lengths_BM, axis=1, dtype=jnp.int32) - lengths_BM
    return _Whole(starts_BM, lengths_BM, starts_BM, lengths_BM)


def _operands(q_BSNH, k_BTKH, *, parts):
    """The primitive's operands after q, k, v: bias, lengths, element offsets, page tables.

    Unused ones are empty.
    """
    unused = jnp.zeros(0, q_BSNH.dtype)

    def offsets(starts_BM, x_BTKH):
        # cuDNN reads one flat list of B * M starts and an end; jax shapes it [B, M + 1].
        (rows, documents), (_, seq, heads, head_size) = starts_BM.shape, x_BTKH.shape
        flat_BM = starts_BM + jnp.arange(rows, dtype=jnp.int32)[:, None] * seq
        flat = jnp.pad(flat_BM.reshape(-1), (0, rows), constant_values=rows * seq)
        return (flat * (heads * head_size)).reshape(rows, documents + 1)

    q_offsets, kv_offsets = offsets(parts.q_starts_BM, q_BSNH), offsets(parts.k_starts_BM, k_BTKH)
    return unused, parts.q_lengths_BM, parts.k_lengths_BM, q_offsets, kv_offsets, unused, unused


def _by_document(lse_BSN, starts_BM):
    """cuDNN's statistics [E, N, S]; places that it never reads hold arbitrary values."""
    (rows, documents), (_, seq, num_heads) = starts_BM.shape, lse_BSN.shape
    token_BMS = jnp.minimum(starts_BM[..., None] + jnp.arange(seq, dtype=jnp.int32), seq - 1)
    stats_BMSN = lse_BSN[jnp.arange(rows)[:, None, None], token_BMS]
    return stats_BMSN.transpose(0, 1, 3, 2).reshape(rows * documents, num_heads, seq)
