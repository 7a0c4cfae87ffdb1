"""Matrices rounded to 8 bits both ways are, bit by bit, what `ops/fp8.py` makes of them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.kernels import quantize as kernel
from jaxscale.kernels import triton_calls
from jaxscale.kernels.quantize import BLOCK, STRAIGHT, TURNED, WAYS
from jaxscale.ops import fp8
from tests.kernels import interpreted

DTYPES = [jnp.float8_e4m3fn, jnp.float8_e5m2]
SHAPES = [(128, 128), (256, 384), (640, 256)]
CAPABILITY = "9.0"

interpreted.install()


def drawn(shape, *, dtype=jnp.bfloat16):
    """Values of many sizes, with zeros, a row and a column of them, and the ends of what is."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-40, 40, (shape[0], 1)))
    x *= np.exp2(rng.integers(-12, 12, (1, shape[1])))
    x[5], x[:, 7] = 0, 0
    # Rows whose largest is exactly what e4m3 and e5m2 end at, and the next larger of bfloat16, and
    # of float32.
    x[:5] = rng.normal(size=x[:5].shape)
    x[:3, 0] = -448, 450, np.nextafter(np.float32(448), 500)
    x[3:5, 0] = 57344, 57600
    x[6, :4] = 1e-38, 3e38, -3e38, 1e-30
    return jnp.asarray(x, dtype)


def both(x, dtype, **settings):
    """(found, expected), each [(values as whole numbers, scale), ...]."""
    found = kernel.quantize(x, dtype, compute_capability=CAPABILITY, **settings)
    exact = {"xla_allow_excess_precision": False}
    reference = jax.jit(lambda x: kernel.reference(x, dtype, **settings), compiler_options=exact)
    expected = reference(x)
    return [
        [(np.asarray(values).view(np.uint8), np.asarray(scale)) for values, scale in pairs]
        for pairs in (found, expected)
    ]


@interpreted.starts_interpreter
def test_the_programs_in_the_interpreter():
    interpreted.run_interpreted(__file__)


@interpreted.runs_programs
@pytest.mark.parametrize("ways", [WAYS, (STRAIGHT,), (TURNED,), WAYS[::-1]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_those_of_the_reference_to_the_bit(shape, dtype, ways):
    found, expected = both(drawn(shape), dtype, ways=ways)
    for mine, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(mine, wanted)


@interpreted.runs_programs
@pytest.mark.parametrize("ways", [WAYS, (TURNED,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128, 128), (144, 272), (16, 400)])
def test_a_given_scale_serves_both_ways_and_any_multiple_of_16(shape, dtype, ways):
    x = drawn(shape)
    scale = kernel.scale_of(jnp.max(jnp.abs(x)).astype(jnp.float32), dtype)
    found, expected = both(x, dtype, ways=ways, scale=scale)
    for mine, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(mine, wanted)


@interpreted.runs_programs
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_own_blocks_alone(bad):
    x = np.asarray(drawn((256, 256)), np.float32)
    x[130, 3] = bad
    ((values, scale), (turned, of_turned)) = kernel.quantize(
        jnp.asarray(x, jnp.bfloat16), fp8.FORWARD, compute_capability=CAPABILITY
    )
    for array, row in ((scale, 130), (of_turned, 3)):
        is_nan = np.isnan(np.asarray(array))
        assert is_nan.sum() == 1 and is_nan[row].any()
    assert np.isnan(np.asarray(values, np.float32)).sum() == BLOCK
    assert np.isnan(np.asarray(turned, np.float32)).sum() == BLOCK


@interpreted.runs_programs
def test_float32_is_rounded_once():
    found, expected = both(drawn((128, 256), dtype=jnp.float32), fp8.FORWARD)
    for mine, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_what_products_are_made_of(dtype):
    x = drawn((256, 384))
    straight, turned = kernel.reference(x, dtype)
    for mine, runs, way in ((straight, (1, BLOCK), x), (turned, (1, BLOCK), x.T)):
        values, scale = fp8.quantise(way, dtype, runs=runs)
        np.testing.assert_array_equal(
            np.asarray(mine[0]).view(np.uint8), np.asarray(values).view(np.uint8)
        )
        np.testing.assert_array_equal(mine[1], scale)


REFUSED: dict[str, dict[str, Any]] = {
    "needs an NVIDIA GPU, not cpu": dict(platform="cpu"),
    "needs compute capability 8.9 or more, not 8.0": dict(compute_capability="8.0"),
    "takes multiples of 128, not 192": dict(shape=(192, 256)),
    "takes multiples of 16, not 24": dict(shape=(24, 256), has_scale=True),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_cannot_run_is_told(reason, monkeypatch):
    monkeypatch.setattr(triton_calls.importlib.util, "find_spec", lambda name: name)
    case: dict[str, Any] = dict(platform="gpu", compute_capability="9.0", shape=(128, 256))
    case |= REFUSED[reason]
    x = jax.ShapeDtypeStruct(case.pop("shape"), jnp.bfloat16)
    found = kernel.supported(x, **case)
    assert found is not None and reason in found


MISTAKES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "x has the shape (192, 256); it takes multiples of 128, not 192": ((192, 256), {}),
    "x has the shape (24, 256); it takes multiples of 16, not 24": ((24, 256), dict(scale=1.0)),
    "x has the shape (0, 256); it takes multiples of 128, not 0": ((0, 256), {}),
    "ways has 'sideways'; there are 'straight' and 'turned'": ((128, 128), dict(ways=["sideways"])),
    "with one scale it must have 'turned'": ((128, 128), dict(scale=1.0, ways=["straight"])),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_the_programs_would_write_elsewhere_is_refused(message):
    shape, options = MISTAKES[message]
    with pytest.raises(ValueError, match=re.escape(message)):
        kernel.quantize(jnp.zeros(shape), jnp.float8_e4m3fn, compute_capability="9.0", **options)


def test_without_jax_triton_it_says_so(monkeypatch):
    monkeypatch.setattr(triton_calls.importlib.util, "find_spec", lambda _: None)
    x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    found = kernel.supported(x, platform="gpu", compute_capability="9.0")
    assert found == "it needs jax_triton and triton"
