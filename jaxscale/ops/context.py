"""Attention where `context` splits rows, and keys and values are exchanged: all-gather and ring.

Each device has two chunks of a row, or of each of its documents (`deal.py`). The queries of a chunk
and the keys before it are one kernel call without a mask; a chunk with itself is the causal call of
packed documents. What the calls give is merged by log-sum-exp; the backward kernels take the merged
output and log-sum-exp, and their dq, dk and dv add up (Ring Attention, arXiv:2310.01889).

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
from jax.ad_checkpoint import checkpoint_name

from jaxscale.config import Balance, Exchange
from jaxscale.kernels.xla_attention import NOTHING
from jaxscale.ops.deal import Parts, Rows, rows_of


def attention(
    q_BSNH,
    k_BSKH,
    v_BSKH,
    *,
    lengths_BM,
    kernel: ModuleType,
    exchange: Exchange,
    balance: Balance,
    axis: str | tuple[str, ...],
    scale: float,
    deterministic: bool = False,
):
    """As a kernel's `attention`, of a device's two chunks, inside a shard_map over `axis`.

    lengths_BM: of the documents of whole rows, in order. kernel: with `partial_forward` and
    `partial_backward`. Holds, besides this device's own, the keys and values of all devices
    (all-gather) or of two (ring). Not proven by JAX to vary as it does: check_vma=False.
    """
    way = {Exchange.ALL_GATHER: AllGather, Exchange.RING: Ring}[exchange]

    def of_rows(lengths_BM):
        size, chunk = jax.lax.axis_size(axis), q_BSNH.shape[1] // 2
        return way(
            functools.partial(kernel.partial_forward, scale=scale),
            functools.partial(kernel.partial_backward, scale=scale, deterministic=deterministic),
            rows=rows_of(lengths_BM, balance=balance, num_devices=size, chunk=chunk),
            axis=axis,
            size=size,
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
class Way:
    """What both have: kernels that take some keys, the calls of each chunk with itself.

    size: devices.
    """

    partial_forward: Callable
    partial_backward: Callable
    _: dataclasses.KW_ONLY
    rows: Rows
    axis: str | tuple[str, ...]
    size: int

    @property
    def device(self):
        """The number of this one."""
        return jax.lax.axis_index(self.axis)

    def chunks_of(self, device):
        """The numbers of the two chunks of a device."""
        return device, 2 * self.size - 1 - device

    def own(self) -> list[_Call]:
        """Each of the two chunks with itself."""
        chunks = self.chunks_of(self.device)
        return [
            _Call(half, half, self.rows.inside(chunk), causal=True)
            for half, chunk in enumerate(chunks)
        ]

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


class AllGather(Way):
    """Two calls more: each chunk with all keys before it."""

    def before(self) -> list[_Call]:
        chunks = self.chunks_of(self.device)
        return [_Call(half, None, self.rows.before(chunk)) for half, chunk in enumerate(chunks)]

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
        return self.rows.in_row_order(whole.reshape(*whole.shape[:2], -1, *whole.shape[4:]))

    def scatter(self, kv_PBTKH):
        """The sum over devices, of which each gets its chunks: the transpose of `gather`."""
        kv_PBTKH = self.rows.in_chunks(kv_PBTKH)
        shape = (*kv_PBTKH.shape[:2], 2 * self.size, -1, *kv_PBTKH.shape[3:])
        chunks = jnp.moveaxis(kv_PBTKH.reshape(shape), 2, 0)
        heads, tails = jnp.split(chunks, 2)
        parts = jnp.concatenate([heads, tails[::-1]], axis=3)
        return jax.lax.psum_scatter(parts, self.axis, scatter_dimension=0)


class Ring(Way):
    """Keys and values go round; a step's kernels need nothing of what is on its way.

    Barriers say how far each has come when: XLA would send all keys first, beside nothing.
    """

    def steps(self) -> Iterator[list[_Call]]:
        """The calls of each step: of its keys, those this device's queries look at.

        With the keys of a device before this one (in number), both chunks look at its first; with
        those of one after it, the second looks at both. So two calls of a chunk with a chunk, in
        every step on every device.
        """
        device = self.device
        low, high = self.chunks_of(device)
        yield [*self.own(), _Call(1, 0, self.rows.across(high, low))]
        for step in range(1, self.size):
            other = (device - step) % self.size
            is_before = other < device
            k_low, k_high = self.chunks_of(other)
            half = jnp.where(is_before, 0, 1)
            queries, keys = (jnp.where(is_before, *pair) for pair in ((low, high), (k_low, k_high)))
            yield [
                _Call(1, 0, self.rows.across(high, k_low)),
                _Call(half, half, self.rows.across(queries, keys)),
            ]

    def forward(self, q_BSNH, kv_PBSKH) -> _Merged:
        total = _Merged.of(q_BSNH)
        for step, calls in enumerate(self.steps(), 1):
            following = self.send(kv_PBSKH) if step < self.size else kv_PBSKH
            total = self.add(total, q_BSNH, kv_PBSKH=kv_PBSKH, calls=calls)
            kv_PBSKH, total = jax.lax.optimization_barrier((following, total))
        return total

    def backward(self, queries, kv_PBSKH):
        """Keys go on beside a step's kernels but the last, their gradients beside that.

        These are of the keys that came a step before. Behind one barrier XLA sent the keys beside
        all of a step and gradients beside nothing.
        """
        dq, came = _zeros(queries[0]), None
        for step, calls in enumerate(self.steps(), 1):
            following = self.send(kv_PBSKH) if step < self.size else kv_PBSKH
            totals = dq, _zeros(kv_PBSKH)
            *early, last = calls
            totals = self.add_gradients(totals, queries, kv_PBSKH=kv_PBSKH, calls=early)
            following, totals = jax.lax.optimization_barrier((following, totals))
            dq, dkv = self.add_gradients(totals, queries, kv_PBSKH=kv_PBSKH, calls=[last])
            if came is not None:
                dq, dkv, came = jax.lax.optimization_barrier((dq, dkv, came))
                dkv += came
            kv_PBSKH, came = following, self.send(dkv)  # home after `size`
        return dq, came

    def send(self, x):
        """To the next device, from the one before."""
        ring = [(device, (device + 1) % self.size) for device in range(self.size)]
        return jax.lax.ppermute(x, self.axis, ring)
