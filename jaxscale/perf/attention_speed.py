"""Packed attention timed against dense causal attention through jax.nn (cuDNN on a GPU).

Tensors: B rows, S sequence, N query heads, K key heads, H head size.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.ops.attention import attention
from jaxscale.ops.documents import documents_of
from jaxscale.ops.execution import Execution

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Of what is timed."""

    rows: int
    seq: int
    heads: int
    kv_heads: int
    head_size: int


def measure(
    shape: Shape, *, bounds: Sequence[int], documents: Sequence[int], repeats: int
) -> Iterator[str]:
    """Lines of text: first what is timed, then milliseconds of each timing.

    bounds: on the documents of a row. documents: that a row does hold. repeats: calls of one
    timing, of which the median of three counts.
    """
    yield _heading(shape)
    yield _timed("dense causal", _dense, shape=shape, repeats=repeats)
    for bound in bounds:
        for number in documents:
            if number <= bound:
                packed = _packed(shape, bound=bound, documents=number)
                name = f"bound {bound:3d}, documents {number:3d}"
                yield _timed(name, packed, shape=shape, repeats=repeats)


def _heading(shape: Shape) -> str:
    return (
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, rows {shape.rows}, "
        f"sequence {shape.seq}, heads {shape.heads}/{shape.kv_heads} x {shape.head_size}, "
        f"{_dtype().name}"
    )


def _is_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _dtype() -> np.dtype:
    return jnp.dtype(jnp.float32 if _is_cpu() else jnp.bfloat16)


def _dense(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(
        q_BSNH, k_BSKH, v_BSKH, is_causal=True, implementation=None if _is_cpu() else "cudnn"
    )


def _packed(shape: Shape, *, bound: int, documents: int) -> Attention:
    segments_BS = jnp.asarray(_split_evenly(shape, documents))
    held = documents_of(segments_BS, segments_BS, max_documents=bound)
    execution = Execution()

    def packed(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
        return attention(q_BSNH, k_BSKH, v_BSKH, documents=held, execution=execution)

    return packed


def _split_evenly(shape: Shape, documents: int) -> np.ndarray:
    """int32 [rows, seq] segments of documents of about equal length."""
    segments_S = 1 + np.arange(shape.seq, dtype=np.int32) * documents // shape.seq
    return np.tile(segments_S, (shape.rows, 1))


def _timed(name: str, function: Attention, *, shape: Shape, repeats: int) -> str:
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    *qkv, cotangent_BSNH = (
        jax.random.normal(key, (shape.rows, shape.seq, n, shape.head_size), _dtype())
        for key, n in zip(keys, heads, strict=True)
    )

    def both(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(function, *arrays[:3])[1](arrays[3])

    forward_ms = _milliseconds(jax.jit(function), *qkv, repeats=repeats)
    both_ms = _milliseconds(jax.jit(both), *qkv, cotangent_BSNH, repeats=repeats)
    return f"{name:26s} forward {forward_ms:8.3f} ms  forward and backward {both_ms:8.3f} ms"


def _milliseconds(function: Callable, *arrays: jax.Array, repeats: int) -> float:
    jax.block_until_ready(function(*arrays))
    timings = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(repeats):
            out = function(*arrays)
        jax.block_until_ready(out)
        timings.append((time.perf_counter() - began) / repeats)
    return 1e3 * statistics.median(timings)
