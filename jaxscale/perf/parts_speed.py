"""Attention to parts: what one device of a context ring computes, by each kernel that can, timed.

A device's work does not depend on what the others do, so it is timed without them, on one GPU, with
the calls and the sums of `ops/context.py`. What is sent is left out: keys stay where they are, and
count as those of the device that would have sent them.

B rows, S sequence of a device (its two chunks), T key sequence, N query heads, K key heads, H head
size, M documents a row, P = 2: keys and values.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.config import Balance, Exchange
from jaxscale.kernels import xla_attention
from jaxscale.ops import context
from jaxscale.ops.deal import rows_of
from jaxscale.perf.attention_speed import (
    Packed,
    dtype_here,
    kernels_for,
    one_document,
    some_files,
)
from jaxscale.perf.turns import error, in_turns

# Of the row whose first key head is checked: float32 scores of a chunk and all keys take 1 GiB.
CHECKED_SEQ = 16_384


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of `seq` tokens over `size` devices, of which one is timed: `number`, from 0."""

    exchange: Exchange
    seq: int
    packed: Callable[[int, int], Packed] = one_document
    _: dataclasses.KW_ONLY
    size: int = 2
    number: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128

    @property
    def of_device(self) -> int:
        """Its tokens."""
        return self.seq // self.size

    def lengths(self) -> list[int]:
        """Of the row's documents and of empty ones, as many as a run would have: two or more."""
        packed = self.packed(1, self.seq)
        (row,) = packed.lengths
        return row + [0] * (max(2, packed.bound) - len(row))

    def flop_of_both(self) -> float:
        """Seven products of all pairs of the row, of which a device has its share on average."""
        pairs = sum(n * (n + 1) // 2 for n in self.lengths())
        return 7 * 2 * self.head_size * self.heads * pairs / self.size


CASES = {
    "ring_long": Case(Exchange.RING, 65_536),
    "ring_files": Case(Exchange.RING, 65_536, some_files),
    "all_gather_long": Case(Exchange.ALL_GATHER, 65_536),
    "all_gather_files": Case(Exchange.ALL_GATHER, 65_536, some_files),
    "tiny": Case(Exchange.RING, 64, heads=2, kv_heads=1, head_size=16),
    "tiny_all_gather": Case(Exchange.ALL_GATHER, 64, heads=2, kv_heads=1, head_size=16),
}


def measure(names: Sequence[str]) -> Iterator[str]:
    """Lines of text: what is timed on what, then a line for each kernel of each case."""
    yield f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {dtype_here().name}"
    for name in names:
        yield from _case(name, CASES[name])


def _case(name: str, case: Case) -> Iterator[str]:
    lengths = case.lengths()
    yield (
        f"{name}: {case.exchange.value}, device {case.number} of {case.size}, a row of {case.seq}, "
        f"heads {case.heads}/{case.kv_heads} x {case.head_size}, documents {len(lengths)} at most, "
        f"{sum(n > 0 for n in lengths)} in the row"
    )
    arrays = _random(case, dtype=dtype_here())
    kernels = _kernels(case)
    forward = {kernel: jax.jit(_forward(case, each)) for kernel, each in kernels.items()}
    both = {kernel: jax.jit(_both(case, each)) for kernel, each in kernels.items()}
    forward_ms, both_ms = in_turns(forward, arrays[:2]), in_turns(both, arrays)
    errors = _errors(case)
    for kernel in kernels:
        yield (
            f"  {kernel:6s} forward {forward_ms[kernel]:8.3f} ms  both {both_ms[kernel]:8.3f} ms "
            f"{case.flop_of_both() / both_ms[kernel] / 1e9:4.0f} TFLOP/s  errors of out dq dkv "
            + " ".join(f"{x:.1e}" for x in errors[kernel])
        )


def _random(case: Case, *, dtype) -> list[jax.Array]:
    """q, keys and values in one array, and the gradient of the output: one device's."""
    seq, size = case.of_device, case.head_size
    shapes = ((1, seq, case.heads, size), (2, 1, seq, case.kv_heads, size))
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, (*shapes, shapes[0]), strict=True)
    ]


def _kernels(case: Case) -> dict[str, ModuleType]:
    q_BSNH, kv_PBSKH, _ = jax.eval_shape(lambda: _random(case, dtype=dtype_here()))
    return kernels_for(q_BSNH, jax.ShapeDtypeStruct(kv_PBSKH.shape[1:], kv_PBSKH.dtype))


def _errors(case: Case) -> dict[str, list[float]]:
    """Of a shorter row's first key head, beside plain XLA in float32."""
    case = dataclasses.replace(case, seq=min(case.seq, CHECKED_SEQ))
    of_head = dataclasses.replace(case, heads=case.heads // case.kv_heads, kv_heads=1)
    arrays = _random(of_head, dtype=dtype_here())
    # Not timed: trying out ways to multiply in float32 takes 20 seconds.
    options = {} if jax.default_backend() == "cpu" else {"xla_gpu_autotune_level": 0}

    def made(kernel, arrays):
        with jax.default_matmul_precision("highest"):
            return jax.jit(_both(of_head, kernel), compiler_options=options)(*arrays)

    expected = made(xla_attention, [x.astype(jnp.float32) for x in arrays])
    return {
        name: [error(*pair) for pair in zip(made(kernel, arrays), expected, strict=True)]
        for name, kernel in _kernels(of_head).items()
    }


# A device by itself.


@dataclasses.dataclass(frozen=True)
class _Alone(context.Way):
    """A device of this number."""

    number: Any = 0

    @property
    def device(self):
        return self.number


class _InRing(_Alone, context.Ring):
    def send(self, x):
        return x


class _Gathering(_Alone, context.AllGather):
    def gather(self, kv_PBSKH):
        return jnp.concatenate([kv_PBSKH] * self.size, axis=2)

    def scatter(self, kv_PBTKH):
        return kv_PBTKH[:, :, : kv_PBTKH.shape[2] // self.size]


WAYS: dict[Exchange, type[_InRing] | type[_Gathering]] = {
    Exchange.RING: _InRing,
    Exchange.ALL_GATHER: _Gathering,
}


def _way(case: Case, kernel: ModuleType) -> _InRing | _Gathering:
    scale = case.head_size**-0.5
    # An operand, as in a ring: programs are the same on all devices.
    lengths_BM, number = jax.lax.optimization_barrier(
        (jnp.asarray([case.lengths()], jnp.int32), jnp.int32(case.number))
    )
    return WAYS[case.exchange](
        functools.partial(kernel.partial_forward, scale=scale),
        functools.partial(kernel.partial_backward, scale=scale),
        rows=rows_of(
            lengths_BM,
            balance=Balance.HEAD_TAIL,
            num_devices=case.size,
            chunk=case.of_device // 2,
        ),
        axis="no other",
        size=case.size,
        number=number,
    )


def _forward(case: Case, kernel: ModuleType):
    def forward(q_BSNH, kv_PBSKH):
        return _way(case, kernel).forward(q_BSNH, kv_PBSKH).out_BSNH.astype(q_BSNH.dtype)

    return forward


def _both(case: Case, kernel: ModuleType):
    def both(q_BSNH, kv_PBSKH, grad_BSNH):
        way = _way(case, kernel)
        total = way.forward(q_BSNH, kv_PBSKH)
        out_BSNH = total.out_BSNH.astype(q_BSNH.dtype)
        queries = q_BSNH, out_BSNH, total.lse_BSN, grad_BSNH
        dq_BSNH, dkv_PBSKH = way.backward(queries, kv_PBSKH)
        return out_BSNH, dq_BSNH.astype(q_BSNH.dtype), dkv_PBSKH.astype(kv_PBSKH.dtype)

    return both
