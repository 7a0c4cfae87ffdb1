"""Operands of grouped products rounded by our programs are, bit by bit, what `ops/fp8.py` makes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.kernels import quantize_grouped as kernel
from jaxscale.kernels import triton_calls
from jaxscale.ops import fp8
from tests.kernels import interpreted

DTYPES = [jnp.float8_e4m3fn, jnp.float8_e5m2]
CAPABILITY = "9.0"
MATRICES = [(3, 128, 128), (2, 256, 384), (5, 384, 128)]
ROWS = [(64, 128), (40, 384), (7, 768), (3, 10240)]

interpreted.install()


def drawn(shape, *, dtype: Any = jnp.bfloat16):
    """Of very different sizes along the first dimension; the first is all zeros."""
    rng = np.random.default_rng(0)
    sizes = np.exp2(rng.integers(-30, 30, (shape[0], *(1 for _ in shape[1:]))))
    x = rng.normal(size=shape) * sizes
    x[0] = 0
    # The largest value of one is what e4m3 ends at, of another a little more.
    for i, most in enumerate((-448, 450), start=1):
        x[i % len(x)] = rng.normal(size=shape[1:])
        x[i % len(x)].flat[5] = most
    return jnp.asarray(x, dtype)


def assert_same_bits(found, expected):
    for mine, wanted in zip(found, expected, strict=True):
        width = {1: np.uint8, 4: np.uint32}[np.dtype(wanted.dtype).itemsize]
        np.testing.assert_array_equal(np.asarray(mine).view(width), np.asarray(wanted).view(width))


def reference(function, x, dtype):
    exact = {"xla_allow_excess_precision": False}
    return jax.jit(lambda x: function(x, dtype), compiler_options=exact)(x)


@interpreted.starts_interpreter
def test_the_programs_in_the_interpreter():
    interpreted.run_interpreted(__file__)


@interpreted.runs_programs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MATRICES)
def test_matrices_are_those_of_the_reference_to_the_bit(shape, dtype):
    w = drawn(shape)
    found = kernel.quantize_matrices(w, dtype, compute_capability=CAPABILITY)
    assert_same_bits(found, reference(kernel.reference_matrices, w, dtype))


@interpreted.runs_programs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
def test_rows_are_those_of_the_reference_to_the_bit(shape, dtype):
    x = drawn(shape)
    found = kernel.quantize_rows(x, dtype, compute_capability=CAPABILITY)
    assert_same_bits(found, reference(kernel.reference_rows, x, dtype))


@interpreted.runs_programs
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_own_matrix_or_row_alone(bad):
    w, x = drawn((3, 128, 256)).at[1, 3, 5].set(bad), drawn((9, 256)).at[4, 5].set(bad)
    made = kernel.quantize_matrices(w, fp8.FORWARD, compute_capability=CAPABILITY)
    for array in made:
        is_nan = np.isnan(np.asarray(array, np.float32))
        assert is_nan[1].all() and is_nan.sum() == is_nan[1].size
    for array in kernel.quantize_rows(x, jnp.float8_e5m2, compute_capability=CAPABILITY):
        is_nan = np.isnan(np.asarray(array, np.float32))
        assert is_nan[4].all() and is_nan.sum() == is_nan[4].size


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_references_are_what_products_are_made_of(dtype):
    w, x = drawn((3, 128, 256)), drawn((9, 256))
    values, turned, scale = kernel.reference_matrices(w, dtype)
    wanted = fp8.quantise(w, dtype, runs=(1, 128, 256))
    assert_same_bits((values, scale), (wanted.values, wanted.scale.reshape(-1)))
    assert_same_bits((turned,), (wanted.values.transpose(0, 2, 1),))
    wanted = fp8.quantise(x, dtype, runs=(1, 256))
    assert_same_bits(kernel.reference_rows(x, dtype), (wanted.values, wanted.scale.reshape(-1)))


def test_what_it_cannot_run_is_told(monkeypatch):
    monkeypatch.setattr(triton_calls.importlib.util, "find_spec", lambda name: name)
    gpu = dict(platform="gpu", compute_capability="9.0")

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    assert kernel.matrices_supported(array(2, 128, 256), **gpu) is None
    assert kernel.rows_supported(array(5, 300), **gpu) is None
    reason = kernel.matrices_supported(array(2, 128, 192), **gpu)
    assert reason == "it takes matrices of multiples of 128, not 192"
    reason = kernel.rows_supported(array(2, 20000), **gpu)
    assert reason == "it takes rows of 16384 at most, not 20000"
    reason = kernel.rows_supported(array(0, 300), **gpu)
    assert reason == "it takes rows that hold something, not (0, 300)"
    with pytest.raises(ValueError, match="it takes rows of 16384 at most, not 20000"):
        kernel.quantize_rows(jnp.zeros((2, 20000)), fp8.FORWARD, compute_capability=CAPABILITY)
    cpu = dict(gpu, platform="cpu")
    assert kernel.rows_supported(array(2, 128), **cpu) == "it needs an NVIDIA GPU, not cpu"
