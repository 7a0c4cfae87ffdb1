"""Block-scaled products against NumPy: interpreted, with its races looked for, where no GPU is."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.kernels import block_scaled_matmul as kernel
from jaxscale.kernels import hopper
from jaxscale.kernels.block_scaled_matmul import BLOCK, STAGES
from tests.kernels.mosaic import IS_GPU, interpreted

# M, N, K; the last has more blocks of the sum than there are tiles in shared memory.
SHAPES = [(128, 128, 128), (256, 384, 256), (128, 256, BLOCK * (2 * STAGES + 1))]

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < hopper.JAX, reason="jax has no interpreter of Mosaic GPU for it"
)


def operand(rng, lines: int, size: int, *, is_weight: bool, dtype=jnp.float8_e4m3fn):
    """Values, and scales between 2**-6 and 2**6."""
    values = jnp.asarray(rng.normal(size=(lines, size)) * 40, dtype)
    num_scales = lines // BLOCK if is_weight else lines
    return values, np.exp2(rng.integers(-6, 7, (num_scales, size // BLOCK))).astype(np.float32)


def expected(lhs, rhs) -> np.ndarray:
    wide = []
    for values, scale in (lhs, rhs):
        scale = scale.repeat(len(values) // len(scale), axis=0).repeat(BLOCK, axis=1)
        wide.append(np.asarray(values).astype(np.float64) * scale)
    return wide[0] @ wide[1].T


def multiplied(lhs, rhs, *, out_dtype=jnp.float32, function=kernel.multiply):
    return np.asarray(
        function(lhs[0], rhs[0], lhs_scale=lhs[1], rhs_scale=rhs[1], out_dtype=out_dtype)
    )


@pytest.mark.parametrize("is_weight", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_that_of_scaled_values(shape, is_weight):
    (M, N, K), rng = shape, np.random.default_rng(0)
    lhs = operand(rng, M, K, is_weight=False)
    rhs = operand(rng, N, K, is_weight=is_weight)
    wanted = expected(lhs, rhs)
    np.testing.assert_allclose(
        multiplied(lhs, rhs, function=kernel.reference), wanted, atol=1e-5 * np.abs(wanted).max()
    )
    with interpreted():
        y = multiplied(lhs, rhs)
    # Tensor cores cut what they add 13 bits below the largest of it (docs/kernels.md): on an H200
    # 1.8e-4 to 3.0e-4 of the largest value. The interpreter does not.
    atol = 2**-11 if IS_GPU else 2**-12
    np.testing.assert_allclose(y, wanted, atol=atol * np.abs(wanted).max())
    assert np.linalg.norm(y - wanted) < 2**-12 * np.linalg.norm(wanted)


def test_operands_may_differ_in_dtype_and_results_are_rounded_once():
    rng = np.random.default_rng(1)
    lhs = operand(rng, 128, 256, is_weight=False, dtype=jnp.float8_e5m2)
    rhs = operand(rng, 128, 256, is_weight=True)
    wanted = expected(lhs, rhs)
    with interpreted():
        y = multiplied(lhs, rhs, out_dtype=jnp.bfloat16).astype(np.float64)
    assert np.abs(y - wanted).max() < 2**-8 * np.abs(wanted).max()


def test_a_scale_that_is_not_a_number_spoils_its_row_alone():
    rng = np.random.default_rng(2)
    lhs, rhs = operand(rng, 128, 256, is_weight=False), operand(rng, 128, 256, is_weight=True)
    lhs[1][5, 1] = np.nan
    with interpreted():
        is_nan = np.isnan(multiplied(lhs, rhs))
    assert is_nan[5].all() and is_nan.sum() == is_nan[5].size


REFUSED: dict[str, dict[str, Any]] = {
    "needs an NVIDIA GPU, not cpu": dict(platform="cpu"),
    "for compute capability 9.0, not 10.0": dict(compute_capability="10.0"),
    "multiples of 128, not 192": dict(shape=(192, 256)),
    "of float8_e4m3fn or float8_e5m2, not bfloat16": dict(dtype=jnp.bfloat16),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_cannot_run_is_told(reason):
    case: dict[str, Any] = (
        dict(platform="gpu", compute_capability="9.0", shape=(128, 256)) | REFUSED[reason]
    )
    lhs = jax.ShapeDtypeStruct(case.pop("shape"), case.pop("dtype", jnp.float8_e4m3fn))
    rhs = jax.ShapeDtypeStruct((128, 256), jnp.float8_e5m2)
    found = kernel.supported(lhs, rhs, **case)
    assert found is not None and reason in found


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("lhs has 128 columns and rhs 256", dict(rhs=(128, 256), rhs_scale=(1, 2))),
        (
            "lhs: block-scaled products are of multiples of 128, not 192",
            dict(lhs=(128, 192), rhs=(128, 192)),
        ),
        ("rhs: block-scaled products are of multiples of 128, not 192", dict(rhs=(192, 128))),
        ("rhs: block-scaled products are of matrices, not of", dict(rhs=(1, 128, 128))),
        (
            "lhs_scale has the shape (128, 2); it must be (128, 1) or (1, 1)",
            dict(lhs_scale=(128, 2)),
        ),
        ("rhs_scale has the shape (2, 1); it must be (128, 1) or (1, 1)", dict(rhs_scale=(2, 1))),
    ],
)
def test_sizes_that_do_not_fit_are_named(message, change):
    shapes = dict(lhs=(128, 128), rhs=(128, 128), lhs_scale=(128, 1), rhs_scale=(1, 1)) | change
    lhs, rhs = (jnp.zeros(shapes[name], jnp.float8_e4m3fn) for name in ("lhs", "rhs"))
    scales = {name: jnp.ones(shapes[name]) for name in ("lhs_scale", "rhs_scale")}
    with pytest.raises(ValueError, match=re.escape(message)):
        kernel.multiply(lhs, rhs, **scales, out_dtype=jnp.bfloat16)
