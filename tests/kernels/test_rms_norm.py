"""RMSNorm's programs, with and without the sum before it, against plain jnp in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.kernels import rms_norm as kernel
from jaxscale.kernels import triton_calls
from tests.kernels import interpreted

EPS = 1e-5
AT: dict[str, Any] = dict(compute_capability="9.0")
# The largest that is 1 row short of full turns, several dimensions of rows, one row, and a width
# that no power of two is near.
SHAPES = [(7, 128), (2, 5, 640), (1, 16), (22, 64), (5, 33)]
# Of a row's largest value: a place of the dtype, or what sums in another order differ by.
RTOL = {jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-10, jnp.float32: 1e-5}
dtypes = pytest.mark.parametrize("dtype", RTOL, ids=lambda dtype: jnp.dtype(dtype).name)

interpreted.install()


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """So that each has several rows to go back over, and the last turn is not full."""
    monkeypatch.setattr(kernel, "PROGRAMS", 4)


def drawn(shape, dtype, *, num: int, most: int = 12):
    """Rows of many sizes, powers of two up to `most`, and one of zeros."""
    rng = np.random.default_rng(0)
    sizes = np.exp2(rng.integers(-most, most, (*shape[:-1], 1)))
    arrays = [rng.normal(size=shape) * sizes for _ in range(num)]
    for array in arrays:
        array[..., -1, :] = 0
    return [jnp.asarray(array, dtype) for array in arrays]


def scale_of(shape):
    return jnp.asarray(np.random.default_rng(1).normal(size=shape[-1]), jnp.float32)


def reference(x, scale):
    """Of the values of x, with nothing rounded."""
    return kernel.reference(x.astype(jnp.float32), scale, eps=EPS)


def check_close(found, expected, *, rtol: float):
    found, expected = (np.asarray(y, np.float64) for y in (found, expected))
    assert found.shape == expected.shape
    most = np.abs(expected).max(axis=-1, keepdims=True)
    assert (np.abs(found - expected) <= rtol * most + 1e-30).all()


@interpreted.starts_interpreter
def test_the_programs_in_the_interpreter():
    interpreted.run_interpreted(__file__)


@interpreted.runs_programs
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_norm_is_the_references(shape, dtype):
    (x,), scale = drawn(shape, dtype, num=1), scale_of(shape)
    normed, inverse = kernel.forward(x, scale, eps=EPS, **AT)
    assert (normed.dtype, inverse.dtype) == (dtype, jnp.float32)
    check_close(normed, reference(x, scale), rtol=RTOL[dtype])
    squares = np.square(np.asarray(x, np.float64)).mean(axis=-1)
    np.testing.assert_allclose(inverse, 1 / np.sqrt(squares + EPS), rtol=1e-5)


@interpreted.runs_programs
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_norm_of_a_sum_is_that_of_the_sum_as_it_is_rounded(shape, dtype):
    (x, added), scale = drawn(shape, dtype, num=2), scale_of(shape)
    found, (normed, inverse) = kernel.forward_of_sum(x, added, scale, eps=EPS, **AT)
    assert (found.dtype, normed.dtype) == (dtype, dtype)
    np.testing.assert_array_equal(found, x + added)
    check_close(normed, reference(found, scale), rtol=RTOL[dtype])
    check_close(inverse, kernel.forward(found, scale, eps=EPS, **AT)[1], rtol=1e-6)


@interpreted.runs_programs
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_those_of_the_reference(shape, dtype):
    (x,), scale = drawn(shape, dtype, num=1), scale_of(shape)
    rng = np.random.default_rng(2)
    of_x, grad = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    _, inverse = kernel.forward(x, scale, eps=EPS, **AT)
    dx, dscale = kernel.backward(x, scale, inverse, of_x, grad, **AT)
    assert (dx.dtype, dscale.dtype) == (dtype, jnp.float32)
    wide = x.astype(jnp.float32)
    wanted_dx, wanted_dscale = jax.vjp(reference, wide, scale)[1](grad.astype(jnp.float32))
    check_close(dx, wanted_dx + of_x.astype(jnp.float32), rtol=RTOL[dtype])
    check_close(dscale, wanted_dscale, rtol=1e-5)


@interpreted.runs_programs
@pytest.mark.parametrize("most", [20, 60])
def test_rows_of_any_size_have_a_norm(most):
    """Squares stay in float32's range up to 2**63; of rows that are next to nothing eps decides."""
    (x,), scale = drawn((64, 48), jnp.bfloat16, num=1, most=most), scale_of((48,))
    normed, inverse = kernel.forward(x, scale, eps=EPS, **AT)
    check_close(normed, reference(x, scale), rtol=RTOL[jnp.bfloat16])
    dx, dscale = kernel.backward(x, scale, inverse, x, normed, **AT)
    assert np.isfinite(np.asarray(dx, np.float32)).all() and np.isfinite(dscale).all()


@interpreted.runs_programs
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_own_row_alone(bad):
    (x,) = drawn((6, 64), jnp.float32, num=1)
    x, scale, is_bad = x.at[2, 3].set(bad), jnp.ones(64), np.arange(6) == 2
    with np.errstate(invalid="ignore"):
        normed, inverse = kernel.forward(x, scale, eps=EPS, **AT)
        _, (of_sum, _) = kernel.forward_of_sum(x, jnp.zeros_like(x), scale, eps=EPS, **AT)
        dx, dscale = kernel.backward(x, scale, inverse, jnp.ones_like(x), x, **AT)
    wanted = np.isfinite(reference(x, scale))
    for out in (normed, of_sum):
        np.testing.assert_array_equal(np.isfinite(out), wanted)
    np.testing.assert_array_equal(~np.isfinite(dx).all(axis=1), is_bad)
    assert not np.isfinite(dscale).all()


BAD: dict[str, dict[str, Any]] = {
    "scale has the shape (4,); it must be [8]": dict(scale=jnp.ones(4)),
    "added is float32[3, 8]; it must be bfloat16[3, 8] as x": dict(added=jnp.ones((3, 8))),
    "of_x is bfloat16[2, 8]; it must be": dict(of_x=jnp.ones((2, 8), jnp.bfloat16)),
    "grad is bfloat16[8]; it must be": dict(grad=jnp.ones(8, jnp.bfloat16)),
    "inverse has the shape (2,); it must be that of x's rows, (3,)": dict(inverse=jnp.ones(2)),
}


@pytest.mark.parametrize("message", BAD)
def test_arrays_that_do_not_fit_are_refused_by_name(message):
    x = jnp.ones((3, 8), jnp.bfloat16)
    given = dict(scale=jnp.ones(8), added=x, of_x=x, grad=x, inverse=jnp.ones(3)) | BAD[message]
    with pytest.raises(ValueError) as raised:
        if "added" in BAD[message]:
            kernel.forward_of_sum(x, given["added"], given["scale"], eps=EPS, **AT)
        kernel.backward(x, given["scale"], given["inverse"], given["of_x"], given["grad"], **AT)
    assert message in str(raised.value)


REFUSED: dict[str, dict[str, Any]] = {
    "needs an NVIDIA GPU, not cpu": dict(platform="cpu"),
    "needs compute capability 9.0 or more, not 8.0": dict(compute_capability="8.0"),
    "takes bfloat16, not float32": dict(dtype=jnp.float32),
    "takes rows of 16384 values at most, not 16400": dict(size=16_400),
    "takes rows that hold something, not (4, 0)": dict(size=0),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_cannot_run_is_told(reason, monkeypatch):
    monkeypatch.setattr(triton_calls, "missing", lambda: None)
    settings: dict[str, Any] = dict(platform="gpu", size=64, dtype=jnp.bfloat16) | AT
    settings |= REFUSED[reason]
    x = jax.ShapeDtypeStruct((4, settings.pop("size")), settings.pop("dtype"))
    assert reason in str(kernel.supported(x, **settings))


@pytest.mark.parametrize("size", [0, 16_400])
def test_rows_of_nothing_and_rows_that_are_too_long_are_refused_where_it_is_called(size):
    x, scale = jnp.ones((3, size), jnp.bfloat16), jnp.ones(size)
    with pytest.raises(ValueError, match=r"x: it takes rows (that hold something|of 16384)"):
        kernel.forward(x, scale, eps=EPS, **AT)
    with pytest.raises(ValueError, match=r"x: it takes rows (that hold something|of 16384)"):
        kernel.backward(x, scale, jnp.ones(3), x, x, **AT)


def test_it_runs_on_a_hopper_gpu_where_triton_is(monkeypatch):
    x = jax.ShapeDtypeStruct((4, 64), jnp.bfloat16)
    monkeypatch.setattr(triton_calls, "missing", lambda: None)
    assert kernel.supported(x, platform="gpu", **AT) is None
    monkeypatch.setattr(triton_calls, "missing", lambda: "it needs triton")
    assert kernel.supported(x, platform="gpu", **AT) == "it needs triton"
