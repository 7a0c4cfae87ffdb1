"""Flash attention of our own for Hopper: packed documents cost what they hold.

Written for wgmma, so compute capability 9.0 and no other. Causal attention, windows, packed
documents and parts of a ring are spans of keys (`flash_spans.py`), of which tiles are skipped in
both directions: no bound on documents, and no memory that grows with them. The programs are in
`flash_forward.py` and `flash_backward.py`.

B rows, S sequence, T key sequence, N query heads, K key heads, H head size, V head size of the
values, M documents a row at most.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxscale.kernels import (
    attention_arguments,
    flash_backward,
    flash_forward,
    flash_forward_dealt,
    flash_spans,
    hopper,
)
from jaxscale.kernels.flash_spans import Pairs
from jaxscale.kernels.xla_attention import NOTHING
from jaxscale.kernels.xla_attention import reference as reference

HAS_QUADRATIC_MEMORY = False
TRACKS_VMA = False

# Of queries and keys, and of values.
HEAD_SIZES = ((64, 64), (128, 128), (192, 128), (256, 256))
# Of tokens: rows are padded to it.
TILE = 128


def supported(
    q_BSNH,
    k_BTKH,
    *,
    platform: str,
    compute_capability: str = "9.0",
    cap: float | None = None,
    v_head_size: int | None = None,
) -> str | None:
    """None if `attention` can run these shapes on this platform ("gpu"), else the reason."""
    reason = hopper.objection(
        "flash attention", platform=platform, compute_capability=compute_capability
    )
    return reason or _objection(q_BSNH, k_BTKH, v_head_size=v_head_size)


def _objection(q_BSNH, k_BTKH, *, v_head_size: int | None) -> str | None:
    """What is wrong with arrays that fit each other, if anything."""
    *_, num_heads, head_size = q_BSNH.shape
    head_sizes = head_size, v_head_size or head_size
    if q_BSNH.dtype != jnp.bfloat16:
        return f"flash attention takes bfloat16, not {q_BSNH.dtype}"
    if head_sizes not in HEAD_SIZES:
        has = ", ".join(_named(*sizes) for sizes in HEAD_SIZES)
        return f"flash attention has head sizes {has}, not {_named(*head_sizes)}"
    if num_heads % k_BTKH.shape[2]:
        return f"num_heads={num_heads} is not a multiple of num_kv_heads={k_BTKH.shape[2]}"
    return None


def _named(head_size: int, v_head_size: int) -> str:
    return f"{head_size}" if v_head_size == head_size else f"{head_size}/{v_head_size}"


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

    documents: with `segments_BS`, int32, 0 for padding; tokens of a document stand together, and
    documents in the order of their numbers.
    window: a token sees itself and the `window - 1` before it. cap: scores become
    cap * tanh(score / cap), by the GPU's own tanh, which is right to 5e-4 of itself. deterministic:
    the backward pass gives the same bits each time, for two products more up to head size 128 and
    for nothing beyond. Returns [B, S, N, V] in the input dtype; statistics are float32.

    Raises ValueError, which names the array or option, for what does not belong together, and for
    what `supported` would refuse.
    """
    segments_BS = documents.segments_BS
    attention_arguments.check(q_BSNH, k_BTKH, v_BTKV)
    attention_arguments.check_options(scale=scale, window=window, cap=cap)
    attention_arguments.check_segments(segments_BS, q_BSNH)
    pairs = flash_spans.of_segments(segments_BS, window=window)
    return _attention(q_BSNH, k_BTKH, v_BTKV, pairs, _Options(scale, cap, deterministic))


@dataclasses.dataclass(frozen=True)
class _Options:
    scale: float
    cap: float | None
    deterministic: bool

    @property
    def of_scores(self) -> dict[str, Any]:
        return dict(scale=self.scale, cap=self.cap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q_BSNH, k_BTKH, v_BTKV, pairs, options):
    return _forward(q_BSNH, k_BTKH, v_BTKV, pairs=pairs, **options.of_scores)[0]


def _attention_fwd(q_BSNH, k_BTKH, v_BTKV, pairs, options):
    out_BSNV, lse_BNS = _forward(q_BSNH, k_BTKH, v_BTKV, pairs=pairs, **options.of_scores)
    out_BSNV = checkpoint_name(out_BSNV, "attention_out")
    lse_BNS = checkpoint_name(lse_BNS, "attention_lse")
    return out_BSNV, (q_BSNH, k_BTKH, v_BTKV, pairs, out_BSNV, lse_BNS)


def _attention_bwd(options, residuals, grad_BSNV):
    q_BSNH, k_BTKH, v_BTKV, pairs, out_BSNV, lse_BNS = residuals
    grads = _backward(
        q_BSNH,
        k_BTKH,
        v_BTKV,
        out_BSNV=out_BSNV,
        lse_BNS=lse_BNS,
        grad_BSNV=grad_BSNV,
        pairs=pairs,
        in_order=options.deterministic,
        **options.of_scores,
    )
    return *grads, None


_attention.defvjp(_attention_fwd, _attention_bwd)


# Jitted, as a ring of N has 1 + 2 N calls: those of the same shapes are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("causal", "scale"))
def partial_forward(q_BSNH, k_BTKH, v_BTKH, *, parts, causal: bool, scale: float):
    """As that of `xla_attention`."""
    pairs = _pairs_of(parts, q_BSNH, k_BTKH=k_BTKH, causal=causal)
    out_BSNH, lse_BNS = _forward(q_BSNH, k_BTKH, v_BTKH, pairs=pairs, scale=scale)
    return out_BSNH, jnp.maximum(lse_BNS, NOTHING).transpose(0, 2, 1)


@functools.partial(jax.jit, static_argnames=("causal", "scale", "deterministic"))
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
    return _backward(
        q_BSNH,
        k_BTKH,
        v_BTKH,
        out_BSNV=out_BSNH,
        lse_BNS=lse_BSN.transpose(0, 2, 1),
        grad_BSNV=grad_BSNH,
        pairs=_pairs_of(parts, q_BSNH, k_BTKH=k_BTKH, causal=causal),
        scale=scale,
        in_order=deterministic,
    )


def _pairs_of(parts, q_BSNH, *, k_BTKH, causal: bool) -> Pairs:
    seq, num_keys = q_BSNH.shape[1], k_BTKH.shape[1]
    return flash_spans.of_parts(parts, seq=seq, num_keys=num_keys, causal=causal)


# Of any length.


def _forward(q_BSNH, k_BTKH, v_BTKV, *, pairs: Pairs, scale: float, cap: float | None = None):
    _check(q_BSNH, k_BTKH, v_BTKV)
    seq = q_BSNH.shape[1]
    q_BSNH, k_BTKH, v_BTKV = (_padded(x) for x in (q_BSNH, k_BTKH, v_BTKV))
    spans = pairs.keys_of_queries.padded(TILE)
    is_dealt = flash_forward_dealt.is_for(q_BSNH.shape[-1], v_BTKV.shape[-1])
    make = flash_forward_dealt.forward if is_dealt else flash_forward.forward
    out_BSNV, lse_BNS = make(q_BSNH, k_BTKH, v_BTKV, spans=spans, scale=scale, cap=cap)
    return out_BSNV[:, :seq], lse_BNS[..., :seq]


def _backward(
    q_BSNH,
    k_BTKH,
    v_BTKV,
    *,
    out_BSNV,
    lse_BNS,
    grad_BSNV,
    pairs: Pairs,
    scale: float,
    in_order: bool,
    cap: float | None = None,
):
    _check(q_BSNH, k_BTKH, v_BTKV)
    seq, num_keys = q_BSNH.shape[1], k_BTKH.shape[1]
    seen_BNS = jnp.einsum("BSNV,BSNV->BNS", out_BSNV, grad_BSNV, preferred_element_type=jnp.float32)
    # Of a query that sees nothing any will do that is finite. NaN stays, and spoils what it did.
    lse_BNS = jnp.where(lse_BNS <= NOTHING / 2, 0.0, lse_BNS)
    dq_BSNH, dk_BTKH, dv_BTKV = flash_backward.backward(
        *(_padded(x) for x in (q_BSNH, k_BTKH, v_BTKV)),
        grad_BSNV=_padded(grad_BSNV.astype(q_BSNH.dtype)),
        lse_BNS=_padded(lse_BNS, axis=2),
        seen_BNS=_padded(seen_BNS, axis=2),
        pairs=pairs.padded(TILE),
        scale=scale,
        cap=cap,
        in_order=in_order,
    )
    return dq_BSNH[:, :seq], dk_BTKH[:, :num_keys], dv_BTKV[:, :num_keys]


def _check(q_BSNH, k_BTKH, v_BTKV) -> None:
    if reason := _objection(q_BSNH, k_BTKH, v_head_size=v_BTKV.shape[-1]):
        raise ValueError(f"q, k and v: {reason}")


def _padded(x, *, axis: int = 1):
    """To whole tiles, with zeros."""
    if not (size := -x.shape[axis] % TILE):
        return x
    return jnp.pad(x, [(0, size if i == axis else 0) for i in range(x.ndim)])
