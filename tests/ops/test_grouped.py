"""Grouped products on any layout: what each device does with its own run of rows."""

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale import sharding as shd
from jaxscale import warned
from jaxscale.config import Float8, PrecisionConfig, Recipe
from jaxscale.ops.execution import Execution
from jaxscale.ops.fp8 import fp8_of
from jaxscale.ops.grouped import grouped_product

RULES = shd.Rules(batch=("data", "fsdp"), mlp="tensor")
LAYOUTS = {"fsdp": dict(fsdp=8), "hsdp tp": dict(data=2, fsdp=2, tensor=2), "tp": dict(tensor=8)}
SPLITS = {"whole": ("_", "_"), "by columns": ("_", "mlp"), "by rows": ("mlp", "_")}
ROWS, GROUPS, K, N = 64, 3, 16, 24
EXECUTION = Execution(platform="cpu")


def operands(num_runs: int):
    """x_TK, w_EKN, the slope of y, group_sizes_RE; some rows of each run are of no group."""
    rng = np.random.default_rng(0)
    shapes = (ROWS, K), (GROUPS, K, N), (ROWS, N)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    per_run = ROWS // num_runs
    sizes = [rng.multinomial(per_run - 1, [0.5, 0.2, 0.3]) for _ in range(num_runs)]
    return *arrays, np.asarray(sizes, np.int32)


def expected(x, w, slope, sizes):
    """y, dx, dw of sum(y * slope)."""
    y, dx, dw = np.zeros_like(slope), np.zeros_like(x), np.zeros_like(w)
    per_run = ROWS // len(sizes)
    for run, sizes_E in enumerate(sizes):
        begin = run * per_run
        for group, size in enumerate(sizes_E):
            rows = slice(begin, begin + size)
            y[rows], dx[rows] = x[rows] @ w[group], slope[rows] @ w[group].T
            dw[group] += x[rows].T @ slope[rows]
            begin += size
    return y, dx, dw


def product(x_TK, w_EKN, slope_TN, group_sizes_RE, *, split="whole"):
    inputs, outputs = SPLITS[split]

    def multiply(x_TK, w_EKN):
        return grouped_product(
            x_TK,
            w_EKN,
            group_sizes_RE=group_sizes_RE,
            name="up",
            execution=EXECUTION,
            inputs=inputs,
            outputs=outputs,
        )

    y_TN, pull = jax.vjp(multiply, x_TK, w_EKN)
    return y_TN, *pull(slope_TN)


def placed(arrays, *, split):
    inputs, outputs = SPLITS[split]
    axes = f"batch {inputs}", f"_ {inputs} {outputs}", f"batch {outputs}", "batch _"
    return [
        jax.device_put(x, shd.shardings(x, names)) for x, names in zip(arrays, axes, strict=True)
    ]


def assert_close(found, wanted):
    for array, value in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(array), value, atol=1e-5)


def test_without_a_mesh_there_is_one_run():
    arrays = operands(1)
    assert_close(product(*arrays), expected(*arrays))
    with pytest.raises(ValueError, match="2 runs on each device that splits 'batch'"):
        product(*operands(2))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_each_runs_products_and_gathers_nothing(layout, kind, split):
    sizes = LAYOUTS[layout]
    arrays = operands(sizes.get("data", 1) * sizes.get("fsdp", 1))
    with shd.use(shd.make_mesh(sizes, axis_types=kind), RULES):
        here = placed(arrays, split=split)
        compiled = jax.jit(lambda *x: product(*x, split=split)).lower(*here).compile()
        found = compiled(*here)
    assert_close(found, expected(*arrays))
    text = compiled.as_text() or ""
    assert "all-gather" not in text and "all-to-all" not in text


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_where_some_axes_are_manual_the_others_still_split_it(kind):
    mesh = shd.make_mesh(dict(data=2, fsdp=2, tensor=2), axis_types=kind)
    arrays = operands(4)
    with shd.use(mesh, RULES):

        def region(*arrays):
            y, dx, dw = product(*arrays, split="by columns")
            return y, dx, jax.lax.psum(dw, "data")

        specs = P("data"), P(), P("data"), P("data")
        mapped = jax.shard_map(
            region,
            mesh=mesh,
            axis_names={"data"},
            in_specs=specs,
            out_specs=(P("data"), P("data"), P()),
            check_vma=False,
        )
        found = jax.jit(mapped)(*placed(arrays, split="by columns"))
    assert_close(found, expected(*arrays))


def test_why_the_kernel_is_not_used_is_said_once_on_a_gpu(caplog):
    arrays = operands(1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            grouped_product(
                *arrays[:2],
                group_sizes_RE=arrays[3],
                name="up",
                execution=Execution(platform="gpu", compute_capability="8.0"),
            )
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("all rows are multiplied with all 3 matrices: the grouped product is")


# Products in 8 bits.

SHAPE_IN_8_BITS = 64, 3, 128, 256


def recipe(**changes) -> Execution:
    named: dict[str, Any] = dict(weights=("up",), weight_gradients=False)
    config = PrecisionConfig(recipe=Recipe.FP8_TENSORWISE, **named)
    return Execution(platform="cpu", fp8=fp8_of(dataclasses.replace(config, **changes)))


def operands_in_8_bits(num_runs: int, *, dtype=jnp.float32):
    """x_TK, w_EKN, the slope of y, group_sizes_RE; a group is empty, one has a row."""
    (T, E, K, N), rng = SHAPE_IN_8_BITS, np.random.default_rng(1)
    arrays = [jnp.asarray(rng.normal(size=size), dtype) for size in ((T, K), (E, K, N), (T, N))]
    sizes = np.zeros((num_runs, E), np.int32)
    sizes[:, 0], sizes[:, 2] = T // num_runs - 3, 1
    return *arrays, jnp.asarray(sizes)


def rounded(x, dtype, *, axis) -> np.ndarray:
    """By the least power of two that brings x, along `axis`, into the range of `dtype`; float64."""
    x = np.asarray(x).astype(np.float64)
    amax = np.abs(x).max(axis, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(amax / float(jnp.finfo(dtype).max))))
    return np.asarray(jnp.asarray(x / scale, jnp.float32).astype(dtype)).astype(np.float64) * scale


def in_8_bits(x_TK, w_EKN, slope_TN, group_sizes_RE, *, split="whole", execution=None):
    inputs, outputs = SPLITS[split]

    def multiply(x_TK, w_EKN):
        options = dict(inputs=inputs, outputs=outputs, group_sizes_RE=group_sizes_RE)
        how = execution or recipe()
        return grouped_product(x_TK, w_EKN, name="up", execution=how, **options)

    y_TN, pull = jax.vjp(multiply, x_TK, w_EKN)
    return y_TN, *pull(slope_TN)


@pytest.mark.parametrize("gradients", ["e5m2", "e4m3"])
def test_in_8_bits_y_and_dx_are_of_rounded_operands_and_dw_of_those_that_came(gradients):
    x, w, slope, sizes = operands_in_8_bits(1)
    found = in_8_bits(x, w, slope, sizes, execution=recipe(gradients=Float8(gradients)))
    of_gradient = {"e5m2": jnp.float8_e5m2, "e4m3": jnp.float8_e4m3fn}[gradients]
    x8 = rounded(x, jnp.float8_e4m3fn, axis=1)
    slope8 = rounded(slope, of_gradient, axis=1)
    w8 = rounded(w, jnp.float8_e4m3fn, axis=(1, 2))
    y, dx, _ = expected(x8, w8, slope8, np.asarray(sizes))
    _, _, dw = expected(*(np.asarray(array) for array in (x, w, slope, sizes)))
    for array, wanted in zip(found, (y, dx, dw), strict=True):
        np.testing.assert_allclose(np.asarray(array), wanted, atol=1e-5 * np.abs(wanted).max())


def test_what_rows_of_no_group_hold_changes_nothing():
    x, w, slope, sizes = operands_in_8_bits(1)
    used = int(sizes.sum())
    wanted = in_8_bits(x, w, slope, sizes)
    found = in_8_bits(x.at[used:].set(np.nan), w, slope.at[used:].set(np.inf), sizes)
    for array, value in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(array), np.asarray(value))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_8_bits_layouts_differ_by_values_far_below_the_largest(layout, kind, split):
    sizes = LAYOUTS[layout]
    if split != "whole" and sizes.get("tensor", 1) > 2:
        pytest.skip("a device's matrices would be narrower than 128")
    arrays = operands_in_8_bits(sizes.get("data", 1) * sizes.get("fsdp", 1))
    wanted = expected(*(np.asarray(array) for array in arrays))
    with shd.use(shd.make_mesh(sizes, axis_types=kind), RULES):
        found = jax.jit(lambda *x: in_8_bits(*x, split=split))(*placed(arrays, split=split))
    for array, value, off in zip(found, wanted, (0.06, 0.09, 1e-5), strict=True):
        assert np.linalg.norm(np.asarray(array) - value) < off * np.linalg.norm(value)


OTHERWISE: dict[str, dict[str, Any]] = {
    "'up' are made in float32: grouped products are in 8 bits where config.precision.weights": dict(
        weights=()
    ),
    "'up' are made in float32: grouped products know fp8_tensorwise, not fp8_rowwise": dict(
        recipe=Recipe.FP8_ROWWISE
    ),
    "the gradients of the matrices 'up' are made in float32": dict(weight_gradients=True),
}


@pytest.mark.parametrize("message", OTHERWISE)
def test_what_is_not_made_in_8_bits_is_said(message, caplog):
    warned.once.cache_clear()
    arrays = operands_in_8_bits(1)
    with caplog.at_level(logging.WARNING):
        in_8_bits(*arrays, execution=recipe(**OTHERWISE[message]))
    assert any(message in record.message for record in caplog.records)


def test_in_8_bits_shapes_that_do_not_fit_are_named():
    x, w, slope, sizes = operands_in_8_bits(1)
    with pytest.raises(ValueError, match="x has 64 columns and each matrix of w 128 rows"):
        in_8_bits(x[:, :64], w, slope, sizes)


def test_a_value_that_is_not_finite_spoils_its_row_of_y_alone():
    x, w, slope, sizes = operands_in_8_bits(1)
    is_nan = np.isnan(in_8_bits(x.at[3, 5].set(np.inf), w, slope, sizes)[0])
    assert is_nan[3].all() and is_nan.sum() == is_nan[3].size


@pytest.mark.parametrize("weights", [("down",), ()], ids=str)
def test_weights_that_are_not_named_keep_their_dtype(weights):
    arrays = operands_in_8_bits(1)
    found = in_8_bits(*arrays, execution=recipe(weights=weights))
    wanted = expected(*(np.asarray(array) for array in arrays))
    for array, value in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(array), value, atol=1e-5 * np.abs(value).max())
