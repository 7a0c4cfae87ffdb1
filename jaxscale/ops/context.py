"""Attention where `context` splits rows, and keys and values are exchanged: all-gather and ring.

Rows are dealt head-tail: of 2 C chunks, device i of C has chunks i and 2 C - 1 - i, so that under a
causal mask all have the same number of pairs to look at (head_tail). Between two chunks of a row at
most one document reaches over, so the queries of a chunk and the keys before it are one kernel call
without a mask: a prefix of the queries, a suffix of the keys. A chunk with itself is the causal
call of packed documents. What the calls give is merged by log-sum-exp; the backward kernels take
the merged output and log-sum-exp, and their dq, dk and dv add up (Ring Attention, arXiv:2310.01889;
head-tail order: Llama 3, arXiv:2407.21783, section 3.3.2).

B rows, S sequence of a device (its two chunks) or of one chunk, T key sequence, N query heads,
K key heads, H head size, M documents a row at most, C devices that share a row, P = 2: keys and
values in one array, which travel together.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxscale.config import Exchange

# The log-sum-exp of no keys: far below any score, and differences of it are finite.
NOTHING = -1e30


def head_tail(seq_len: int, num_devices: int) -> np.ndarray:
    """int [seq_len]: the tokens of a row in the order in which the devices hold them.

    seq_len is a multiple of 2 * num_devices. For 2 devices and 4 chunks: 0, 3, then 1, 2.
    """
    chunks = np.arange(seq_len).reshape(2, num_devices, -1)
    return np.stack([chunks[0], chunks[1, ::-1]], axis=1).reshape(-1)


class Parts(NamedTuple):
    """The parts of documents in some queries, and in the keys that they look at; int32 [B, M].

    Each of a kernel's documents is those queries and keys, and nothing else is looked at.
    """

    q_starts_BM: Any
    q_lengths_BM: Any
    k_starts_BM: Any
    k_lengths_BM: Any


def attention(
    q_BSNH,
    k_BSKH,
    v_BSKH,
    *,
    lengths_BM,
    kernel: ModuleType,
    exchange: Exchange,
    axis: str | tuple[str, ...],
    scale: float,
):
    """As a kernel's `attention`, of a device's two chunks, inside a shard_map over `axis`.

    lengths_BM: of the documents of whole rows, in order. kernel: with `partial_forward` and
    `partial_backward`. Holds, besides this device's own, the keys and values of all devices
    (all-gather) or of two (ring). Not proven by JAX to vary as it does: check_vma=False.
    """
    way = {Exchange.ALL_GATHER: _AllGather, Exchange.RING: _Ring}[exchange]

    def of_rows(lengths_BM):
        return way(
            functools.partial(kernel.partial_forward, scale=scale),
            functools.partial(kernel.partial_backward, scale=scale),
            rows=_Rows.of(lengths_BM),
            axis=axis,
            size=jax.lax.axis_size(axis),
            chunk=q_BSNH.shape[1] // 2,
        )

    def run_and_lse(q_BSNH, k_BSKH, v_BSKH, lengths_BM):
        total = of_rows(lengths_BM).forward(q_BSNH, jnp.stack((k_BSKH, v_BSKH)))
        return total.out_BSNH.astype(q_BSNH.dtype), total.lse_BSN

    @jax.custom_vjp
    def run(q_BSNH, k_BSKH, v_BSKH, lengths_BM):
        return run_and_lse(q_BSNH, k_BSKH, v_BSKH, lengths_BM)[0]

    def forward(q_BSNH, k_BSKH, v_BSKH, lengths_BM):
        out_BSNH, lse_BSN = run_and_lse(q_BSNH, k_BSKH, v_BSKH, lengths_BM)
        out_BSNH = checkpoint_name(out_BSNH, "attention_out")
        lse_BSN = checkpoint_name(lse_BSN, "attention_lse")
        return out_BSNH, (q_BSNH, k_BSKH, v_BSKH, lengths_BM, out_BSNH, lse_BSN)

    def backward(residuals, grad_BSNH):
        q_BSNH, k_BSKH, v_BSKH, lengths_BM, out_BSNH, lse_BSN = residuals
        queries = q_BSNH, out_BSNH, lse_BSN, grad_BSNH
        dq_BSNH, dkv_PBSKH = of_rows(lengths_BM).backward(queries, jnp.stack((k_BSKH, v_BSKH)))
        dk_BSKH, dv_BSKH = dkv_PBSKH.astype(k_BSKH.dtype)
        return dq_BSNH.astype(q_BSNH.dtype), dk_BSKH, dv_BSKH, None

    run.defvjp(forward, backward)
    return run(q_BSNH, k_BSKH, v_BSKH, lengths_BM)


# Which documents a call has.


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Where each document begins and ends, in tokens of the whole row; int32 [B, M]."""

    starts_BM: Any
    ends_BM: Any

    @classmethod
    def of(cls, lengths_BM) -> "_Rows":
        ends_BM = jnp.cumsum(lengths_BM, axis=1, dtype=jnp.int32)
        return cls(ends_BM - lengths_BM, ends_BM)

    def inside(self, first, *, length: int) -> Parts:
        """Queries and keys of the chunk that begins at `first`."""
        starts_BM, ends_BM = (
            jnp.clip(x - first, 0, length) for x in (self.starts_BM, self.ends_BM)
        )
        return Parts(starts_BM, ends_BM - starts_BM, starts_BM, ends_BM - starts_BM)

    def across(self, first, *, keys_from, num_keys: int, length: int) -> Parts:
        """Queries of the chunk from `first` on, and num_keys keys from `keys_from` on, before it.

        One document: the one that goes on in the chunk.
        """
        goes_on_BM = (self.starts_BM < first) & (self.ends_BM > first)
        start_B1, end_B1 = (
            jnp.where(goes_on_BM, x, 0).sum(1, dtype=jnp.int32, keepdims=True)
            for x in (self.starts_BM, self.ends_BM)
        )
        last = jnp.minimum(first, keys_from + num_keys) - keys_from
        k_start_B1 = jnp.clip(start_B1 - keys_from, 0, last)
        is_seen_B1 = goes_on_BM.any(1, keepdims=True) & (k_start_B1 < last)
        q_length_B1 = jnp.minimum(end_B1 - first, length)
        parts = jnp.zeros_like(start_B1), q_length_B1, k_start_B1, last - k_start_B1
        # And an empty one: jax hands cuDNN no starts where there is one document.
        return Parts(*(jnp.pad(jnp.where(is_seen_B1, x, 0), ((0, 0), (0, 1))) for x in parts))


# Sums over calls, in float32.


class _Merged(NamedTuple):
    """Attention to the keys seen so far."""

    out_BSNH: Any
    lse_BSN: Any

    @classmethod
    def of(cls, q_BSNH) -> "_Merged":
        """To none."""
        lse_BSN = jnp.full(q_BSNH.shape[:3], NOTHING, jnp.float32)
        return cls(jnp.zeros(q_BSNH.shape, jnp.float32), lse_BSN)

    def with_part(self, half, *, out_BSNH, lse_BSN) -> "_Merged":
        """With what one half's queries found in more keys."""
        mine = _half(self.lse_BSN, half)
        both_BSN = jnp.logaddexp(mine, lse_BSN)
        mine_BSN1, part_BSN1 = (jnp.exp(x - both_BSN)[..., None] for x in (mine, lse_BSN))
        mixed_BSNH = _half(self.out_BSNH, half) * mine_BSN1
        mixed_BSNH += out_BSNH.astype(jnp.float32) * part_BSN1
        return _Merged(
            _with_half(self.out_BSNH, half, x=mixed_BSNH),
            _with_half(self.lse_BSN, half, x=both_BSN),
        )


# A device's two chunks.


def _half(x, half, *, axis: int = 1):
    """One of the two along the sequence; half: 0 or 1, traced or not."""
    size = x.shape[axis] // 2
    return jax.lax.dynamic_slice_in_dim(x, half * size, size, axis=axis)


def _with_half(whole, half, *, x, axis: int = 1):
    return jax.lax.dynamic_update_slice_in_dim(whole, x, half * x.shape[axis], axis=axis)


def _plus_half(whole, half, *, x, axis: int = 1):
    x = _half(whole, half, axis=axis) + x.astype(whole.dtype)
    return _with_half(whole, half, x=x, axis=axis)


class _Call(NamedTuple):
    """Queries of one half over keys: of one half, or (None) all there are."""

    q_half: Any
    k_half: Any
    parts: Parts
    causal: bool = False

    def keys(self, kv_PBSKH):
        return kv_PBSKH if self.k_half is None else _half(kv_PBSKH, self.k_half, axis=2)

    def plus_keys(self, total, dkv_PBSKH):
        """`total` with the gradient of these keys."""
        if self.k_half is None:
            return total + dkv_PBSKH.astype(total.dtype)
        return _plus_half(total, self.k_half, x=dkv_PBSKH, axis=2)


# The two ways.


@dataclasses.dataclass(frozen=True)
class _Way:
    """What both have: kernels that take some keys, the calls of each chunk with itself.

    size: devices. chunk: tokens.
    """

    partial_forward: Callable
    partial_backward: Callable
    _: dataclasses.KW_ONLY
    rows: _Rows
    axis: str | tuple[str, ...]
    size: int
    chunk: int

    def chunks_of(self, device):
        """Where the two chunks of a device begin in the row."""
        return device * self.chunk, (2 * self.size - 1 - device) * self.chunk

    def own(self) -> list[_Call]:
        """Each of the two chunks with itself."""
        chunks = self.chunks_of(jax.lax.axis_index(self.axis))
        parts = [self.rows.inside(first, length=self.chunk) for first in chunks]
        return [_Call(half, half, parts[half], causal=True) for half in (0, 1)]

    def add(self, total: _Merged, q_BSNH, *, kv_PBSKH, calls: list[_Call]) -> _Merged:
        """With what the calls find in these keys."""
        for call in calls:
            out_BSNH, lse_BSN = self.partial_forward(
                _half(q_BSNH, call.q_half),
                *call.keys(kv_PBSKH),
                parts=call.parts,
                causal=call.causal,
            )
            total = total.with_part(call.q_half, out_BSNH=out_BSNH, lse_BSN=lse_BSN)
        return total

    def add_gradients(self, totals, queries, *, kv_PBSKH, calls: list[_Call]):
        """totals: dq, and dk and dv of these keys. queries: q, out, log-sum-exp, out's gradient."""
        dq_BSNH, dkv_PBSKH = totals
        for call in calls:
            q_BSNH, out_BSNH, lse_BSN, grad_BSNH = (_half(x, call.q_half) for x in queries)
            dq, *dkv = self.partial_backward(
                q_BSNH,
                *call.keys(kv_PBSKH),
                parts=call.parts,
                causal=call.causal,
                out_BSNH=out_BSNH,
                lse_BSN=lse_BSN,
                grad_BSNH=grad_BSNH,
            )
            dq_BSNH = _plus_half(dq_BSNH, call.q_half, x=dq)
            dkv_PBSKH = call.plus_keys(dkv_PBSKH, jnp.stack(dkv))
        return dq_BSNH, dkv_PBSKH


def _zeros(x):
    return jnp.zeros(x.shape, jnp.float32)


class _AllGather(_Way):
    """Two calls more: each chunk with all keys before it."""

    def before(self) -> list[_Call]:
        num_keys = 2 * self.size * self.chunk
        across = functools.partial(self.rows.across, keys_from=0, num_keys=num_keys)
        firsts = self.chunks_of(jax.lax.axis_index(self.axis))
        return [
            _Call(half, None, across(first, length=self.chunk)) for half, first in enumerate(firsts)
        ]

    def forward(self, q_BSNH, kv_PBSKH) -> _Merged:
        whole_PBTKH = self.gather(kv_PBSKH)
        total = self.add(_Merged.of(q_BSNH), q_BSNH, kv_PBSKH=kv_PBSKH, calls=self.own())
        return self.add(total, q_BSNH, kv_PBSKH=whole_PBTKH, calls=self.before())

    def backward(self, queries, kv_PBSKH):
        whole_PBTKH = self.gather(kv_PBSKH)
        totals = _zeros(queries[0]), _zeros(kv_PBSKH)
        dq, dkv = self.add_gradients(totals, queries, kv_PBSKH=kv_PBSKH, calls=self.own())
        totals = dq, _zeros(whole_PBTKH)
        dq, of_all = self.add_gradients(totals, queries, kv_PBSKH=whole_PBTKH, calls=self.before())
        return dq, dkv + self.scatter(of_all)

    def gather(self, kv_PBSKH):
        """All devices' chunks in the row's order, [P, B, T, K, H]."""
        parts = jax.lax.all_gather(kv_PBSKH, self.axis)
        heads, tails = jnp.split(parts, 2, axis=3)
        chunks = jnp.concatenate([heads, tails[::-1]])  # [2 C, P, B, S, K, H]
        whole = jnp.moveaxis(chunks, 0, 2)
        return whole.reshape(*whole.shape[:2], -1, *whole.shape[4:])

    def scatter(self, kv_PBTKH):
        """The sum over devices, of which each gets its chunks: the transpose of `gather`."""
        shape = (*kv_PBTKH.shape[:2], 2 * self.size, self.chunk, *kv_PBTKH.shape[3:])
        chunks = jnp.moveaxis(kv_PBTKH.reshape(shape), 2, 0)
        heads, tails = jnp.split(chunks, 2)
        parts = jnp.concatenate([heads, tails[::-1]], axis=3)
        return jax.lax.psum_scatter(parts, self.axis, scatter_dimension=0)


class _Ring(_Way):
    """Keys and values go round; a step's kernels need nothing of what is on its way.

    A barrier ends each step: XLA would send all keys first, beside nothing.
    """

    def steps(self) -> Iterator[list[_Call]]:
        """The calls of each step: of its keys, those this device's queries look at.

        With the keys of a device before this one (in number), both chunks look at its first; with
        those of one after it, the second looks at both. So two calls of a chunk with a chunk, in
        every step on every device.
        """
        device = jax.lax.axis_index(self.axis)
        low, high = self.chunks_of(device)
        yield [*self.own(), self.across(1, 0, q_first=high, k_first=low)]
        for step in range(1, self.size):
            other = (device - step) % self.size
            is_before = other < device
            k_low, k_high = self.chunks_of(other)
            half = jnp.where(is_before, 0, 1)
            q_first, k_first = (
                jnp.where(is_before, *pair) for pair in ((low, high), (k_low, k_high))
            )
            yield [
                self.across(1, 0, q_first=high, k_first=k_low),
                self.across(half, half, q_first=q_first, k_first=k_first),
            ]

    def across(self, q_half, k_half, *, q_first, k_first) -> _Call:
        parts = self.rows.across(q_first, keys_from=k_first, num_keys=self.chunk, length=self.chunk)
        return _Call(q_half, k_half, parts)

    def forward(self, q_BSNH, kv_PBSKH) -> _Merged:
        total = _Merged.of(q_BSNH)
        for step, calls in enumerate(self.steps(), 1):
            following = self.send(kv_PBSKH) if step < self.size else kv_PBSKH
            total = self.add(total, q_BSNH, kv_PBSKH=kv_PBSKH, calls=calls)
            kv_PBSKH, total = jax.lax.optimization_barrier((following, total))
        return total

    def backward(self, queries, kv_PBSKH):
        totals = _zeros(queries[0]), _zeros(kv_PBSKH)
        for step, calls in enumerate(self.steps(), 1):
            following = self.send(kv_PBSKH) if step < self.size else kv_PBSKH
            dq, dkv = self.add_gradients(totals, queries, kv_PBSKH=kv_PBSKH, calls=calls)
            kv_PBSKH, dq = jax.lax.optimization_barrier((following, dq))
            # They follow their keys, beside the next step's kernels, and are home after `size`.
            totals = dq, self.send(dkv)
        return totals

    def send(self, x):
        """To the next device, from the one before."""
        ring = [(device, (device + 1) % self.size) for device in range(self.size)]
        return jax.lax.ppermute(x, self.axis, ring)
