"""What attention's arrays must be to one another, said before a kernel is chosen or traced.

B rows, S sequence, N query heads, K key heads, H head size, V head size of the values.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


def check(q_BSNH, k_BSKH, v_BSKV) -> None:
    """Raises ValueError, which names the array, unless they can be attended to together."""
    arrays = {"q": q_BSNH, "k": k_BSKH, "v": v_BSKV}
    for name, x in arrays.items():
        if x.ndim != 4:
            raise ValueError(
                f"{name} has the shape {x.shape}; it must be [rows, tokens, heads, head size]"
            )
        if not x.size:
            raise ValueError(f"{name} has the shape {x.shape}; no size may be 0")
        if x.dtype != q_BSNH.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
            wanted = "of floats" if name == "q" else f"{q_BSNH.dtype} as q"
            raise ValueError(f"{name} is {x.dtype}; it must be {wanted}")
    if k_BSKH.shape[:2] != q_BSNH.shape[:2]:
        raise ValueError(f"k has {_counted(k_BSKH)}; it must have those of q, {_counted(q_BSNH)}")
    if k_BSKH.shape[3] != q_BSNH.shape[3]:
        raise ValueError(
            f"k has the head size {k_BSKH.shape[3]}; it must have that of q, {q_BSNH.shape[3]}"
        )
    if v_BSKV.shape[:3] != k_BSKH.shape[:3]:
        raise ValueError(
            f"v has {_counted(v_BSKV)} and {v_BSKV.shape[2]} heads; it must have those of k, "
            f"{_counted(k_BSKH)} and {k_BSKH.shape[2]} heads"
        )
    num_heads, num_kv_heads = q_BSNH.shape[2], k_BSKH.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(
            f"q has {num_heads} heads and k {num_kv_heads}; those of q must be a multiple of "
            f"those of k"
        )


def check_options(*, scale: float, window: int | None, cap: float | None) -> None:
    """Raises ValueError, which names the option, for what no kernel can do."""
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale={scale}; it must be over 0 and finite")
    if window is not None and window < 1:
        raise ValueError(f"window={window}; it must be 1 or more, a token sees itself, or None")
    if cap is not None and not cap > 0:
        raise ValueError(f"cap={cap}; it must be over 0, or None")


def _counted(x_BSKH) -> str:
    return f"{x_BSKH.shape[0]} rows of {x_BSKH.shape[1]} tokens"


def check_segments(
    segments_BS, q_BSNH, *, is_dealt: bool = False, is_padding_last: bool = False
) -> None:
    """Raises ValueError unless they are the documents' numbers of q's tokens, 0 for padding.

    Whether documents stand together, in the order of their numbers, is looked at where values are
    at hand: not of what is being traced, or lies on other hosts. is_dealt: they do not, as rows
    are dealt to devices that share them. is_padding_last: padding may only end a row.
    """
    if segments_BS.shape != q_BSNH.shape[:2]:
        raise ValueError(
            f"segments has the shape {segments_BS.shape}; it must be {q_BSNH.shape[:2]}, the rows "
            f"and tokens of q"
        )
    if not jnp.issubdtype(segments_BS.dtype, jnp.integer):
        raise ValueError(f"segments is {segments_BS.dtype}; it must be of integers")
    if not is_dealt and _is_at_hand(segments_BS):
        _check_documents(np.asarray(segments_BS), is_padding_last=is_padding_last)


def _is_at_hand(x) -> bool:
    is_traced = isinstance(x, jax.core.Tracer)
    return not is_traced and (not isinstance(x, jax.Array) or x.is_fully_addressable)


def _check_documents(segments_BS: np.ndarray, *, is_padding_last: bool) -> None:
    for row, segments_S in enumerate(segments_BS):
        begins = np.flatnonzero(np.diff(segments_S, prepend=0))
        numbers, counts = np.unique(segments_S[begins], return_counts=True)
        if (numbers < 0).any():
            raise ValueError(
                f"segments has the number {numbers.min()} in row {row}; documents are numbered "
                f"from 1, and 0 is padding"
            )
        if apart := [int(n) for n in numbers[(counts > 1) & (numbers > 0)]]:
            raise ValueError(
                f"segments has tokens of document {apart[0]} in {counts[numbers == apart[0]][0]} "
                f"places of row {row}; a document's tokens must stand together"
            )
        documents_S = segments_S[segments_S > 0]
        if (falls := np.flatnonzero(np.diff(documents_S) < 0)).size:
            before, after = documents_S[falls[0] : falls[0] + 2]
            raise ValueError(
                f"segments has document {after} behind {before} in row {row}; documents stand in "
                f"the order of their numbers"
            )
        if is_padding_last and (segments_S[: len(documents_S)] == 0).any():
            raise ValueError(
                f"segments has padding before a document in row {row}; it must end the row"
            )
