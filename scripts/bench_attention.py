"""Times packed attention: python scripts/bench_attention.py [--shape=2,8192,32,8,128] [--bounds=1,8,32] [--documents=1,8]

For each bound on the documents of a row and each number of documents in it, milliseconds of the forward pass and of forward
and backward, beside dense causal attention through jax.nn (cuDNN on a GPU).
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from jaxscale.ops.attention import attention, document_lengths
from jaxscale.ops.execution import Execution

SHAPE = flags.DEFINE_list(
    "shape", ["2", "8192", "32", "8", "128"], "rows, sequence, query heads, key heads, head size"
)
BOUNDS = flags.DEFINE_list("bounds", ["1", "8", "16", "32", "64"], "documents a row may hold")
DOCUMENTS = flags.DEFINE_list("documents", ["1", "8"], "documents that a row does hold")
REPEATS = flags.DEFINE_integer(
    "repeats", 20, "calls of one timing; the median of 3 timings is printed"
)


def main(argv: list[str]) -> None:
    del argv
    rows, seq, heads, kv_heads, head_size = map(int, SHAPE.value)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, cotangent = (
        jax.random.normal(key, (rows, seq, n, head_size), dtype)
        for key, n in zip(keys, (heads, kv_heads, kv_heads, heads), strict=True)
    )
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, rows {rows}, sequence {seq}, heads {heads}/{kv_heads} x {head_size}, {dtype.dtype}"
    )
    is_cpu = jax.default_backend() == "cpu"
    execution = Execution()

    def dense(q, k, v):
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=None if is_cpu else "cudnn"
        )

    report("dense causal", dense, q, k, v, cotangent)
    for bound in map(int, BOUNDS.value):
        for documents in map(int, DOCUMENTS.value):
            if documents <= bound:
                segments = jnp.asarray(split_evenly(rows, seq, documents))
                lengths = document_lengths(segments, bound)

                def packed(q, k, v, segments=segments, lengths=lengths):
                    return attention(q, k, v, segments, lengths, window=None, execution=execution)

                report(f"bound {bound:3d}, documents {documents:3d}", packed, q, k, v, cotangent)


def split_evenly(rows: int, seq: int, documents: int) -> np.ndarray:
    """int32 [rows, seq] segments of documents of about equal length."""
    return np.tile(1 + np.arange(seq, dtype=np.int32) * documents // seq, (rows, 1))


def report(name, function, q, k, v, cotangent) -> None:
    forward = milliseconds(jax.jit(function), q, k, v)
    both = milliseconds(
        jax.jit(lambda q, k, v, g: jax.vjp(function, q, k, v)[1](g)), q, k, v, cotangent
    )
    print(f"{name:26s} forward {forward:8.3f} ms  forward and backward {both:8.3f} ms", flush=True)


def milliseconds(function, *args) -> float:
    jax.block_until_ready(function(*args))
    timings = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(REPEATS.value):
            out = function(*args)
        jax.block_until_ready(out)
        timings.append((time.perf_counter() - began) / REPEATS.value)
    return 1e3 * statistics.median(timings)


if __name__ == "__main__":
    app.run(main)
