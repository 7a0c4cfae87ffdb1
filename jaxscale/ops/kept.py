"""Attention over keys and values that are kept: how a model continues a text a token at a time.

B rows, S sequence, N query heads, K key heads, G query heads a key head, H head size, V head size
of the values, T tokens that a slot holds, P slots: texts that are continued at once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale import sharding as shd
from jaxscale.ops.documents import Documents

# Keys and values of a layer, each [P, K, T, H]: batched products read them as they lie.
AXES = "_ attn_kv_heads _ head"


@dataclasses.dataclass
class Kept:
    """Stands where `Documents` do, for tokens whose keys and values are kept.

    slots_BS, positions_BS: int32, where each token's key and value go; a slot of -1 (padding): to
    nowhere. fresh: the documents, if all begin in these rows; a kernel runs then. None: each row is
    the next token, [P, 1], of its slot. keys, values: of the layer that runs; attention puts the
    new ones in their place.
    """

    slots_BS: jax.Array
    positions_BS: jax.Array
    fresh: Documents | None
    keys: Any = None
    values: Any = None

    def keep(self, k_BSKH, v_BSKH) -> None:
        """Puts the tokens' keys and values into their slots."""
        put = _put_next if self.fresh is None else _put
        axes = "batch attn_seq attn_kv_heads head"
        tokens = ("batch attn_seq",) * 2
        write = shd.shard_map(put, in_axes=(AXES, axes, *tokens), out_axes=AXES)
        self.keys = write(self.keys, k_BSKH, self.slots_BS, self.positions_BS)
        self.values = write(self.values, v_BSKH, self.slots_BS, self.positions_BS)

    def attend(self, q_BSNH, *, scale: float, window: int | None, cap: float | None):
        """The next token of each slot over what the slot holds; [P, 1, N, V] as `q`."""

        def local(q_P1NH, k_PKTH, v_PKTV, positions_P1):
            slots, num_keys, _, head = k_PKTH.shape
            q_PKGH = q_P1NH.reshape(slots, num_keys, -1, head)
            scores = jnp.einsum(
                "PKGH,PKTH->PKGT", q_PKGH, k_PKTH, preferred_element_type=jnp.float32
            )
            scores = scores * scale
            if cap is not None:
                scores = cap * jnp.tanh(scores / cap)
            seen_PT = _seen(positions_P1, k_PKTH.shape[2], window=window)
            scores = jnp.where(seen_PT[:, None, None], scores, jnp.finfo(jnp.float32).min)
            weights = jax.nn.softmax(scores, axis=-1).astype(v_PKTV.dtype)
            out_PKGV = jnp.einsum("PKGT,PKTV->PKGV", weights, v_PKTV)
            return out_PKGV.reshape(*q_P1NH.shape[:3], -1)

        heads = "batch attn_seq attn_heads head"
        mapped = shd.shard_map(local, in_axes=(heads, AXES, AXES, "batch attn_seq"), out_axes=heads)
        return mapped(q_BSNH, self.keys, self.values, self.positions_BS)


def _put(kept_PKTH, x_BSKH, slots_BS, positions_BS):
    # Negative indices count from the end; those beyond it are dropped.
    slots_BS = jnp.where(slots_BS < 0, kept_PKTH.shape[0], slots_BS)
    x_BSKH = x_BSKH.astype(kept_PKTH.dtype)
    return kept_PKTH.at[slots_BS, :, positions_BS].set(x_BSKH, mode="drop")


def _put_next(kept_PKTH, x_P1KH, slots_P1, positions_P1):
    """As `_put`, of each slot's next token; one beyond its end, of a text that is over, anywhere.

    Without a question whether it is inside, which costs a launch for each layer's keys and values.
    """
    positions_P1 = jnp.minimum(positions_P1, kept_PKTH.shape[2] - 1)
    x_P1KH = x_P1KH.astype(kept_PKTH.dtype)
    return kept_PKTH.at[slots_P1, :, positions_P1].set(
        x_P1KH, mode="promise_in_bounds", unique_indices=True
    )


def _seen(positions_P1, num_tokens: int, *, window: int | None):
    """bool [P, T]: what the token at this position may look at."""
    token_T = jnp.arange(num_tokens, dtype=positions_P1.dtype)
    seen_PT = token_T[None] <= positions_P1
    if window is not None:
        seen_PT &= positions_P1 - token_T[None] < window
    return seen_PT


def empty(num_slots: int, num_tokens: int, *, num_kv_heads: int, head_size: int, dtype):
    """A layer's keys, or values, of slots that hold nothing."""
    return jnp.zeros((num_slots, num_kv_heads, num_tokens, head_size), dtype)
