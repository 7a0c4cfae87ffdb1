"""Kernels that fill a GPU give the same bits each time.

Warpgroups that race meet in another order there, and in one order where a few programs have the GPU
to themselves. No interpreter sees memory that Pallas adds to a program (docs/kernels_record.md).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.kernels import block_scaled_matmul, flash_attention, grouped_fp8, grouped_matmul
from jaxscale.ops.documents import documents_of
from tests.kernels.mosaic import IS_GPU

pytestmark = pytest.mark.skipif(not IS_GPU, reason="kernels do not fill an interpreter")
TIMES = 10


def random(*shape, dtype: Any = jnp.bfloat16):
    """The same for each call of this shape."""
    return jax.random.normal(jax.random.key(len(shape)), shape).astype(dtype)


@jax.jit
def have_same_bits(one, other):
    def same(a, b):
        as_integer = f"uint{8 * a.dtype.itemsize}"
        return (a.view(as_integer) == b.view(as_integer)).all()

    return jax.tree.map(same, one, other)


def assert_repeats(function, *arrays) -> None:
    """Compared on the GPU: a host needs seconds for each output of 200 MB."""
    run = jax.jit(function)
    first = run(*arrays)
    for _ in range(TIMES - 1):
        assert jax.tree.all(have_same_bits(run(*arrays), first))


def with_gradients(function, *arrays):
    """Of all arrays but the last, which is the gradient of what comes out."""
    *operands, grad = arrays
    out, pull = jax.vjp(function, *operands)
    return out, pull(grad)


@pytest.mark.parametrize(("size", "v_size"), flash_attention.HEAD_SIZES)
# Of scores 20 times as large, sums of p want maxima in some tiles of queries: these are made again.
@pytest.mark.parametrize("factor", [1, 20])
def test_attention_does(size, v_size, factor):
    rows, seq, heads, kv_heads = 2, 4096, 16, 4
    segments = jnp.asarray(np.repeat([[1, 2, 3]], [1000, 96, 3000], axis=1).repeat(rows, axis=0))
    attention = functools.partial(
        flash_attention.attention,
        documents=documents_of(segments, segments, max_documents=8),
        scale=size**-0.5,
        deterministic=True,
    )
    assert_repeats(
        functools.partial(with_gradients, attention),
        factor * random(rows, seq, heads, size),
        random(rows, seq, kv_heads, size),
        random(rows, seq, kv_heads, v_size),
        random(rows, seq, heads, v_size),
    )


ROWS, GROUPS, K, N = 16_384, 64, 2048, 768


def group_sizes():
    return jnp.asarray(np.random.default_rng(0).multinomial(ROWS, np.full(GROUPS, 1 / GROUPS)))


def test_a_grouped_product_and_its_gradients_do():
    product = functools.partial(grouped_matmul.grouped_matmul, group_sizes_E=group_sizes())
    arrays = random(ROWS, K), random(GROUPS, K, N), random(ROWS, N)
    assert_repeats(functools.partial(with_gradients, product), *arrays)


def test_a_grouped_product_in_8_bits_does():
    product = functools.partial(
        grouped_fp8.multiply,
        x_scale_T=jnp.ones(ROWS),
        w_scale_E=jnp.ones(GROUPS),
        group_sizes_E=group_sizes(),
        out_dtype=jnp.bfloat16,
    )
    dtype = jnp.float8_e4m3fn
    assert_repeats(product, random(ROWS, K, dtype=dtype), random(GROUPS, N, K, dtype=dtype))


def test_a_product_of_blocks_does():
    rows, columns, summed = 8192, 4096, 4096
    product = functools.partial(
        block_scaled_matmul.multiply,
        lhs_scale=jnp.ones((rows, summed // 128)),
        rhs_scale=jnp.ones((columns // 128, summed // 128)),
        out_dtype=jnp.bfloat16,
    )
    dtype = jnp.float8_e4m3fn
    operands = random(rows, summed, dtype=dtype), random(columns, summed, dtype=dtype)
    assert_repeats(product, *operands)
