"""Products of operands in 8 bits: scales, rounding, gradients, and which weights have them."""

import functools
import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxscale import sharding as shd
from jaxscale.config import Dtype, Float8, PrecisionConfig, Recipe
from jaxscale.kernels import quantize
from jaxscale.ops import fp8
from jaxscale.ops.execution import Execution
from jaxscale.ops.linear import linear

FORMATS = {jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0}
RECIPES = (Recipe.FP8_TENSORWISE, Recipe.FP8_ROWWISE, Recipe.FP8_BLOCKWISE)
# As every program of a run is compiled: else XLA for GPUs leaves out the rounding to 8 bits.
ROUNDED = {"xla_allow_excess_precision": False}
RULES = shd.Rules(
    batch=("data", "fsdp"),
    seq="context",
    residual_seq=("context", "tensor"),
    act_embed=None,
    embed=("fsdp", "context"),
    mlp="tensor",
)
LAYOUTS = {
    "fsdp": dict(fsdp=8),
    "hsdp": dict(data=2, fsdp=4),
    "hsdp tp": dict(data=2, fsdp=2, tensor=2),
    "context tp": dict(fsdp=2, context=2, tensor=2),
}


def execution_with(**settings) -> Execution:
    return Execution(dtype=Dtype.BFLOAT16, fp8=fp8.fp8_of(PrecisionConfig(**settings)))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("amax", [3e-30, 1e-3, 0.875, 0.88, 1.0, 7.0, 448.0, 449.0, 3e30])
def test_a_scale_is_the_least_power_of_two_that_fits(dtype, amax):
    x = jnp.array([[-amax, amax / 3], [0.0, amax / 2]], jnp.float32)
    scale = float(fp8.scale_for(x, dtype, runs=(2, 2))[0, 0])
    most, amax = FORMATS[dtype], float(np.float32(amax))
    assert np.log2(scale) % 1 == 0
    assert most / 2 < amax / scale <= most


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_is_quantised_comes_back_within_half_a_step(dtype):
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32) * 1e-6
    values, scale = fp8.quantise(jnp.asarray(x), dtype, runs=(1, 32))
    assert values.dtype == dtype and scale.shape == (64, 1)
    back = np.asarray(values, np.float32) * np.asarray(scale)
    step = float(jnp.finfo(dtype).eps)
    least = np.asarray(scale) * float(jnp.finfo(dtype).smallest_subnormal)
    assert (np.abs(back - x) <= np.maximum(np.abs(x) * step, least) / 2).all()


def test_zeros_stay_zeros_and_what_is_not_finite_makes_everything_nan():
    zeros = fp8.quantise(jnp.zeros((4, 4)), fp8.FORWARD, runs=(4, 4))
    assert float(jnp.abs(zeros.values.astype(jnp.float32)).max()) == 0
    assert np.isfinite(zeros.scale).all()
    for odd in (np.nan, np.inf, -np.inf):
        x = jnp.ones((4, 4)).at[1, 2].set(odd)
        y = fp8.product(
            "ab,bc->ac",
            (x, jnp.ones((4, 4))),
            recipe=Recipe.FP8_TENSORWISE,
            dtypes=(fp8.FORWARD,) * 2,
            out_dtype=jnp.bfloat16,
        )
        assert np.isnan(np.asarray(y, np.float32)).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_is_that_of_what_was_quantised(recipe):
    """Some of 64 tokens' 256 values are small, each some others."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 32, 256)), rng.normal(size=(256, 3, 128))
    x *= np.exp2(rng.integers(-20, 0, (2, 32, 2))).repeat(128, axis=2)
    y = fp8.product(
        "BSD,DNH->BSNH",
        (jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)),
        recipe=recipe,
        dtypes=(fp8.FORWARD,) * 2,
        out_dtype=jnp.bfloat16,
    )
    runs = {
        Recipe.FP8_TENSORWISE: (x.shape, w.shape),
        Recipe.FP8_ROWWISE: ((1, 1, 256), (256, 1, 1)),
        Recipe.FP8_BLOCKWISE: ((1, 1, 128), (128, 1, 1)),
    }[recipe]
    expected = np.einsum(
        "BSD,DNH->BSNH", *(rounded(a, runs=mine) for a, mine in zip((x, w), runs, strict=True))
    )
    y = np.asarray(y, np.float64)
    assert np.abs(y - expected).max() < 2**-8 * np.abs(expected).max()
    if recipe == Recipe.FP8_BLOCKWISE:
        plain = np.einsum("BSD,DNH->BSNH", x, w)
        assert (norms(y - plain) < 0.06 * norms(plain)).all(), "nothing small is lost"


def norms(y_BSNH) -> np.ndarray:
    return np.linalg.norm(y_BSNH, axis=(2, 3))


def rounded(x, *, runs, dtype=ml_dtypes.float8_e4m3fn) -> np.ndarray:
    """What 8 bits leave of bfloat16 values, by another arithmetic than ours.

    runs: how many along each dimension share a scale.
    """
    x = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    pairs = ((size // run, run) for size, run in zip(x.shape, runs, strict=True))
    parts = x.reshape([size for pair in pairs for size in pair])
    most = float(ml_dtypes.finfo(dtype).max)
    shared = tuple(range(1, parts.ndim, 2))
    scale = 2.0 ** np.ceil(np.log2(np.abs(parts).max(axis=shared, keepdims=True) / most))
    return ((parts / scale).astype(dtype).astype(np.float64) * scale).reshape(x.shape)


def gradients_of(execution, weight_DF, x_BSD, slope_BSF, *, put=lambda tree: tree, name="up"):
    """y, and the gradients of sum(y * slope) for x and the weight."""

    def sloped(weight_DF, x_BSD):
        y_BSF = linear(
            "BSD,DF->BSF",
            x_BSD,
            weight=weight_DF,
            name=name,
            axes="embed mlp",
            out="batch seq mlp",
            execution=execution,
        )
        slope = shd.constrain(jnp.asarray(slope_BSF), "batch seq mlp")
        return jnp.sum((y_BSF * slope).astype(jnp.float32)), y_BSF

    found = jax.jit(jax.grad(sloped, (0, 1), has_aux=True), compiler_options=ROUNDED)
    return jax.tree.map(lambda a: np.asarray(a, np.float64), found(*put((weight_DF, x_BSD))))


D, F = 128, 256


@pytest.fixture(scope="module")
def operands():
    """A weight, inputs, and slopes some of which are small."""
    rng = np.random.default_rng(0)
    x_BSD, slope_BSF = (rng.normal(size=(16, 64, n)).astype(jnp.bfloat16) for n in (D, F))
    slope_BSF *= np.exp2(rng.integers(-9, 0, (16, 64, 1))).astype(jnp.bfloat16)
    return rng.normal(size=(D, F)).astype(np.float32), x_BSD, slope_BSF


@pytest.mark.parametrize("gradient", [Float8.E4M3, Float8.E5M2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_products_in_8_bits_too(operands, recipe, gradient):
    weight, x, slope = operands
    found, _ = gradients_of(execution_with(recipe=recipe, gradients=gradient), *operands)
    dtype = dict(e4m3=ml_dtypes.float8_e4m3fn, e5m2=ml_dtypes.float8_e5m2)[gradient.value]
    x_TD, g_TF = x.reshape(-1, D), slope.reshape(-1, F)
    # Of g and of the weight in the product of dx, of x and of g in that of dw.
    g, w, x_2, g_2 = {
        Recipe.FP8_TENSORWISE: (g_TF.shape, weight.shape, x_TD.shape, g_TF.shape),
        Recipe.FP8_ROWWISE: ((1, F), (1, F), (len(x_TD), 1), (len(g_TF), 1)),
        Recipe.FP8_BLOCKWISE: ((1, 128), (128, 128), (128, 1), (128, 1)),
    }[recipe]
    dx = rounded(g_TF, runs=g, dtype=dtype) @ rounded(weight, runs=w).T
    dw = rounded(x_TD, runs=x_2).T @ rounded(g_TF, runs=g_2, dtype=dtype)
    for mine, expected in zip(found, (dw, dx.reshape(x.shape)), strict=True):
        assert np.abs(mine - expected).max() < 2**-8 * np.abs(expected).max()


def test_a_weights_gradient_can_be_left_in_bfloat16(operands):
    """Of values that e4m3 has not; each is one product of two, as CPUs may add up in bfloat16."""
    weight, x, slope = operands
    x = (1 + np.random.default_rng(0).integers(0, 32, x.shape) / 32).astype(x.dtype)
    alone = np.zeros_like(slope)
    alone.reshape(-1, F)[np.arange(F), np.arange(F)] = 2.0
    expected = 2 * x.reshape(-1, D)[:F].T.astype(np.float64)
    for recipe in RECIPES:
        both = (execution_with(recipe=recipe, weight_gradients=is_8) for is_8 in (True, False))
        narrow, wide = (gradients_of(execution, weight, x, alone) for execution in both)
        np.testing.assert_array_equal(wide[0][0], expected)
        assert (narrow[0][0] != expected).any()


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_nothing_but_the_order_of_sums(operands, layout, recipe, kind):
    execution = execution_with(recipe=recipe)
    alone = gradients_of(execution, *operands)
    with shd.use(shd.make_mesh(LAYOUTS[layout], axis_types=kind), RULES):
        weight, x, _ = operands
        here = shd.shardings(weight, "embed mlp"), shd.shardings(x, "batch seq act_embed")
        found = gradients_of(execution, *operands, put=lambda tree: jax.device_put(tree, here))
    for mine, expected in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        assert np.abs(mine - expected).max() < 2**-6 * np.abs(expected).max()


@pytest.fixture
def read_once(monkeypatch):
    """The program that reads what it rounds once, as its reference; a list of what it is asked."""
    asked = []

    def quantized(x, dtype, *, compute_capability, **how):
        asked.append((x.shape, how["ways"], how["scale"] is None))
        return quantize.reference(x, dtype, **how)

    monkeypatch.setattr(quantize, "device_supported", lambda *_: None)
    monkeypatch.setattr(fp8, "READ_ONCE", (Recipe.FP8_BLOCKWISE, Recipe.FP8_TENSORWISE))
    monkeypatch.setattr(quantize, "quantize", quantized)
    return asked


@pytest.mark.parametrize("name", ["up", "down"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_reading_once_changes_nothing_but_the_order_of_sums(
    operands, recipe, name, read_once, monkeypatch
):
    execution = execution_with(recipe=recipe, gradients=Float8.E5M2)
    found = gradients_of(execution, *operands, name=name)
    asked = list(read_once)
    monkeypatch.undo()
    expected = gradients_of(execution, *operands, name=name)
    for mine, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(mine - wanted).max() < 2**-8 * np.abs(wanted).max()
    both, is_blockwise = ("straight", "turned"), recipe == Recipe.FP8_BLOCKWISE
    # What comes backwards; the input of "up" is a norm's, and left to XLA.
    wanted = [((1024, F), both, is_blockwise)]
    if name == "down":
        wanted += [((1024, D), ("turned",), is_blockwise)]
        wanted += [((1024, D), ("straight",), True)] * is_blockwise
    assert sorted(asked) == sorted(wanted if recipe != Recipe.FP8_ROWWISE else [])


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("recipe", [Recipe.FP8_TENSORWISE, Recipe.FP8_BLOCKWISE])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reading_once_serves_every_layout(operands, layout, recipe, kind, read_once, monkeypatch):
    execution = execution_with(recipe=recipe)
    with shd.use(shd.make_mesh(LAYOUTS[layout], axis_types=kind), RULES):
        weight, x, _ = operands
        here = shd.shardings(weight, "embed mlp"), shd.shardings(x, "batch seq act_embed")
        put = functools.partial(jax.device_put, device=here)
        found = gradients_of(execution, *operands, put=put, name="down")
        assert read_once
        monkeypatch.undo()
        expected = gradients_of(execution, *operands, put=put, name="down")
    for mine, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(mine - wanted).max() < 2**-8 * np.abs(wanted).max()


def test_names_choose_the_weights(operands):
    plain, _ = gradients_of(execution_with(), *operands)
    other, _ = gradients_of(
        execution_with(recipe=Recipe.FP8_TENSORWISE, weights=("qkv", "down")), *operands
    )
    for mine, expected in zip(other, plain, strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_sizes_that_tensor_cores_do_not_take_are_left_as_they_are_and_told(operands, caplog):
    weight, x, slope = operands
    odd = weight[:, :90], x, slope[..., :90]
    with caplog.at_level(logging.WARNING):
        found, _ = gradients_of(execution_with(recipe=Recipe.FP8_ROWWISE), *odd)
    assert "'up' are made in bfloat16: a device's 90 outputs are no multiple of 16" in caplog.text
    plain, _ = gradients_of(execution_with(), *odd)
    for mine, expected in zip(found, plain, strict=True):
        np.testing.assert_array_equal(mine, expected)
