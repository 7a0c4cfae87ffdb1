"""Grouped products in 8 bits against NumPy: interpreted, races looked for, where no GPU is."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.kernels import grouped_fp8 as kernel
from jaxscale.kernels.grouped_programs import Tiles
from tests.kernels.grouped import GROUPS, check_refused, make_few_programs, needs_kernel
from tests.kernels.mosaic import IS_GPU, interpreted

SHAPE = (256, 128)  # K, N
# Of the largest value. The tensor cores keep few bits of a sum of 128; bfloat16 rounds once.
ATOL = {"float32": 2**-11 if IS_GPU else 1e-6, "bfloat16": 2**-8}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    make_few_programs(monkeypatch)


def operands(name: str, *, shape=SHAPE, dtype: Any = jnp.float8_e4m3fn):
    """x_TK, w_ENK, and keywords: scales between 2**-6 and 2**6, sizes."""
    (num_rows, sizes), (K, N), rng = GROUPS[name], shape, np.random.default_rng(0)
    x_TK = jnp.asarray(rng.normal(size=(num_rows, K)) * 40, dtype)
    w_ENK = jnp.asarray(rng.normal(size=(len(sizes), N, K)) * 40, jnp.float8_e4m3fn)
    return (x_TK, w_ENK), dict(
        x_scale_T=jnp.exp2(jnp.asarray(rng.integers(-6, 7, num_rows), jnp.float32)),
        w_scale_E=jnp.exp2(jnp.asarray(rng.integers(-6, 7, len(sizes)), jnp.float32)),
        group_sizes_E=jnp.asarray(sizes, jnp.int32),
    )


def expected(x_TK, w_ENK, *, x_scale_T, w_scale_E, group_sizes_E) -> np.ndarray:
    x, w = (np.asarray(array).astype(np.float64) for array in (x_TK, w_ENK))
    y, end = np.zeros((len(x), w.shape[1])), 0
    for group, size in enumerate(np.asarray(group_sizes_E)):
        rows = slice(end, end := end + size)
        y[rows] = x[rows] @ w[group].T * float(w_scale_E[group])
        y[rows] *= np.asarray(x_scale_T)[rows, None]
    return y


def assert_close(found, wanted) -> None:
    atol = ATOL[found.dtype.name] * max(np.abs(wanted).max(), 1)
    np.testing.assert_allclose(np.asarray(found).astype(np.float64), wanted, atol=atol, rtol=0)


@pytest.mark.parametrize("name", GROUPS)
def test_the_reference_is_each_groups_product(name):
    arrays, options = operands(name)
    found = kernel.reference(*arrays, **options, out_dtype=jnp.float32)
    assert_close(found, expected(*arrays, **options))


@needs_kernel
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("name", GROUPS)
def test_a_product_is_that_of_each_groups_scaled_values(name, dtype):
    arrays, options = operands(name, dtype=dtype)
    with interpreted():
        found = kernel.multiply(*arrays, **options, out_dtype=jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    assert_close(found, expected(*arrays, **options))


# K, N, and tiles: more blocks of the sum than stages, and tiles that reach out of the matrix.
SHAPES = {
    "long sums": ((128 * 5, 128), Tiles(columns=128, stages=2)),
    "wide tiles": ((128, 384), Tiles(columns=256, stages=2, together=2)),
}


@needs_kernel
@pytest.mark.parametrize("name", SHAPES)
def test_tiles_of_any_size_make_the_same(name):
    shape, tiles = SHAPES[name]
    arrays, options = operands("rows of no group", shape=shape)
    with interpreted():
        found = kernel.multiply(*arrays, **options, out_dtype=jnp.float32, tiles=tiles)
    assert_close(found, expected(*arrays, **options))


@needs_kernel
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # products not stored
def test_rows_of_no_group_may_hold_anything():
    (x_TK, w_ENK), options = operands("rows of no group")
    wanted = expected(x_TK, w_ENK, **options)
    used = int(options["group_sizes_E"].sum())
    x_TK = x_TK.at[used:].set(jnp.nan)
    options["x_scale_T"] = options["x_scale_T"].at[used:].set(jnp.nan)
    with interpreted():
        found = kernel.multiply(x_TK, w_ENK, **options, out_dtype=jnp.bfloat16)
    assert_close(found, wanted)


@needs_kernel
def test_a_scale_that_is_not_a_number_spoils_its_group_or_row_alone():
    arrays, options = operands("rows of no group")
    options["w_scale_E"] = options["w_scale_E"].at[0].set(jnp.nan)
    options["x_scale_T"] = options["x_scale_T"].at[80].set(jnp.nan)
    with interpreted():
        is_nan = np.isnan(kernel.multiply(*arrays, **options, out_dtype=jnp.float32))
    assert is_nan[:70].all() and is_nan[80].all()
    assert not is_nan[70:80].any() and not is_nan[81:].any()


REFUSED: dict[str, dict[str, Any]] = {
    "needs an NVIDIA GPU, not cpu": dict(platform="cpu"),
    "for compute capability 9.0, not 10.0": dict(compute_capability="10.0"),
    "of float8_e4m3fn or float8_e5m2, not bfloat16": dict(x=(jnp.bfloat16, 64, 128)),
    "a multiple of 8 rows, not 65": dict(x=(jnp.float8_e4m3fn, 65, 128)),
    "multiples of 128, not 192": dict(w=(jnp.float8_e4m3fn, 2, 192, 128)),
}


@needs_kernel
@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_cannot_run_is_told(reason):
    case = dict(
        platform="gpu",
        compute_capability="9.0",
        x=(jnp.float8_e5m2, 64, 128),
        w=(jnp.float8_e4m3fn, 2, 128, 128),
    )
    check_refused(kernel, case, change=REFUSED[reason], reason=reason)


MISTAKES: dict[str, dict[str, Any]] = {
    "x has the shape (64, 128) and w (2, 128, 256); they must be [T, K] and [E, N, K]": dict(
        w=jnp.zeros((2, 128, 256), jnp.float8_e4m3fn)
    ),
    "takes w of float8_e4m3fn or float8_e5m2, not bfloat16": dict(
        w=jnp.zeros((2, 128, 128), jnp.bfloat16)
    ),
    "takes x of a multiple of 8 rows, not 65": dict(x=jnp.zeros((65, 128), jnp.float8_e5m2)),
    "takes w of multiples of 128, not 192": dict(w=jnp.zeros((2, 192, 128), jnp.float8_e5m2)),
    "x_scale has the shape (1,); it must be (64,)": dict(x_scale_T=jnp.ones(1)),
    "w_scale has the shape (3,); it must be (2,)": dict(w_scale_E=jnp.ones(3)),
    "group_sizes has the shape (1,); it must be (2,)": dict(group_sizes_E=jnp.zeros(1, jnp.int32)),
    "group_sizes must be integers, not float32": dict(group_sizes_E=jnp.zeros(2)),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_does_not_fit_is_named(message):
    fitting = dict(
        x=jnp.zeros((64, 128), jnp.float8_e5m2),
        w=jnp.zeros((2, 128, 128), jnp.float8_e4m3fn),
        x_scale_T=jnp.ones(64),
        w_scale_E=jnp.ones(2),
        group_sizes_E=jnp.zeros(2, jnp.int32),
    )
    options = fitting | MISTAKES[message]
    arrays = options.pop("x"), options.pop("w")
    with pytest.raises(ValueError, match=re.escape(message)):
        kernel.multiply(*arrays, **options, out_dtype=jnp.bfloat16)
