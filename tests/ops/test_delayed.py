"""Delayed scales: what is rounded by them, and how largest values get out of a backward pass."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.config import Dtype, PrecisionConfig, Recipe
from jaxscale.kernels.quantize import exponent_of
from jaxscale.ops import delayed, fp8
from jaxscale.ops.execution import Execution
from jaxscale.ops.linear import linear

FORMATS = {jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0}
D, F = 128, 256


@pytest.mark.parametrize("dtype", FORMATS)
def test_values_in_range_are_rounded_as_by_a_scale_of_their_own(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 32)), jnp.bfloat16)
    own = fp8.quantise(x, dtype, runs=x.shape)
    rounded, amax = delayed.quantise(x, 1 / own.scale[0, 0], dtype=dtype)
    mine, theirs = (np.asarray(each.values, np.float32) for each in (rounded, own))
    np.testing.assert_array_equal(mine, theirs)
    assert rounded.scale == own.scale
    error = float(jnp.finfo(dtype).eps) / 2
    assert float(amax[0]) == pytest.approx(float(jnp.abs(x).max()), rel=error)


@pytest.mark.parametrize("dtype", FORMATS)
def test_values_beyond_are_the_most_there_is_and_ask_for_a_larger_scale(dtype):
    most = FORMATS[dtype]
    x = jnp.array([[-2e6, 3.0], [1e-3, 2e6]], jnp.float32)
    rounded, amax = delayed.quantise(x, jnp.float32(1), dtype=dtype)
    assert rounded.values.astype(jnp.float32)[0, 0] == -most
    assert rounded.values.astype(jnp.float32)[1, 1] == most
    assert exponent_of(amax[0], dtype) == 1


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", FORMATS)
def test_what_is_not_finite_stays_so(dtype, odd):
    x = jnp.ones((4, 4), jnp.bfloat16).at[1, 2].set(odd)
    rounded, amax = delayed.quantise(x, jnp.float32(1), dtype=dtype)
    is_nan = np.isnan(np.asarray(rounded.values, np.float32))
    assert is_nan[1, 2] and is_nan.sum() == 1 and np.isnan(amax).all()
    counts = delayed.counts_of(amax, of_gradient_N=jnp.ones(1), dtypes=(dtype, dtype))
    assert counts[0, delayed.X].sum() == 0 and counts[0, delayed.GRADIENT].sum() == 1


def test_where_no_gradient_comes_nothing_is_counted():
    """In a stage of a pipeline that has nothing to do, x may be anything."""
    counts = delayed.counts_of(
        jnp.array([3.0, 3.0, 3.0]),
        of_gradient_N=jnp.array([0.0, 1.0, np.nan]),
        dtypes=(fp8.FORWARD, jnp.float8_e5m2),
    )
    assert counts.sum(axis=2).tolist() == [[0, 0], [1, 1], [0, 0]]


def execution_with(recipe: Recipe, meters: dict | None = None) -> Execution:
    return Execution(
        dtype=Dtype.BFLOAT16,
        fp8=fp8.fp8_of(PrecisionConfig(recipe=recipe)),
        meters=delayed.Meters(meters or {}),
    )


def sloped(weight_DF, x_BSD, slope_BSF, *, execution):
    y_BSF = linear(
        "BSD,DF->BSF",
        x_BSD,
        weight=weight_DF,
        name="up",
        axes="embed mlp",
        out="batch seq mlp",
        execution=execution,
    )
    return jnp.sum((y_BSF * slope_BSF).astype(jnp.float32))


@pytest.fixture(scope="module")
def operands():
    rng = np.random.default_rng(0)
    x_BSD, slope_BSF = (jnp.asarray(rng.normal(size=(4, 16, n)), jnp.bfloat16) for n in (D, F))
    return jnp.asarray(rng.normal(size=(D, F)), jnp.float32), x_BSD, slope_BSF * 1e-3


def exponents_of(x_BSD, slope_BSF) -> list[int]:
    pairs = (x_BSD, fp8.FORWARD), (slope_BSF, jnp.float8_e5m2)
    return [int(exponent_of(jnp.abs(a).max().astype(jnp.float32), to)) for a, to in pairs]


def meter_of(exponents) -> delayed.Meter:
    counts = jnp.zeros((1, delayed.NUM_OPERANDS, len(fp8.EXPONENTS)))
    return delayed.Meter(delayed.Factors(*(jnp.float32(2.0**-e) for e in exponents)), counts)


def test_the_right_scales_give_what_scales_of_the_values_give(operands):
    """Bit by bit; and the gradient of the meter says that they were right."""
    meter, gradients = meter_of(exponents_of(*operands[1:])), (0, 1, 3)

    def of_meter(*arguments):
        *rest, meter = arguments
        return sloped(*rest, execution=execution_with(Recipe.FP8_DELAYED, {"up": meter}))

    y, (dweight, dx, dmeter) = jax.jit(jax.value_and_grad(of_meter, gradients))(*operands, meter)
    own = execution_with(Recipe.FP8_TENSORWISE)
    found = jax.jit(jax.value_and_grad(lambda *a: sloped(*a, execution=own), (0, 1)))(*operands)
    jax.tree.map(np.testing.assert_array_equal, (y, (dweight, dx)), found)
    counted = np.argmax(dmeter.counts_N2E[0], axis=1) + fp8.EXPONENTS.start
    assert counted.tolist() == exponents_of(*operands[1:])
    assert float(dmeter.counts_N2E.sum()) == 2


def test_sums_of_counts_have_the_maximum_as_their_highest_entry(operands):
    weight, x, slope = operands
    meter = meter_of((0, 0))

    def of_counts(counts):
        """Of three microbatches, the second of which has the largest values."""
        total = jnp.float32(0)
        for times in (1, 64, 0.5):
            mine = {"up": meter._replace(counts_N2E=counts)}
            execution = execution_with(Recipe.FP8_DELAYED, mine)
            scaled = (a * jnp.asarray(times, a.dtype) for a in (x, slope))
            total += sloped(weight, *scaled, execution=execution)
        return total

    counts = jax.grad(of_counts)(meter.counts_N2E)
    highest = [int(np.flatnonzero(of)[-1]) + fp8.EXPONENTS.start for of in counts[0]]
    assert highest == [e + 6 for e in exponents_of(x, slope)]
    assert counts.sum(axis=2).tolist() == [[3, 3]]


def test_products_of_the_same_x_round_it_by_one_scale():
    meters = delayed.Meters({"gate": meter_of((1, 2)), "up": meter_of((3, 4))})
    x, other = jnp.ones(2), jnp.ones(2)
    assert [meters.of(name, x=x).factors.x for name in ("gate", "up")] == [0.5, 0.5]
    assert meters.of("up", x=x).factors.gradient == 2.0**-4
    assert meters.of("up", x=other).factors.x == 2.0**-3


def test_a_product_whose_weight_has_another_name_is_refused(operands):
    execution = execution_with(Recipe.FP8_DELAYED, {"gate": meter_of((0, 0))})
    message = (
        "linear(name='up'): with delayed scales a product's name is that of its weight; there are "
        "gate"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        sloped(*operands, execution=execution)
