"""Grouped products on any layout: what each device does with its own run of rows."""

import logging

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale import sharding as shd
from jaxscale.ops.execution import Execution
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
                execution=Execution(platform="gpu", compute_capability="8.0"),
            )
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("all rows are multiplied with all 3 matrices: the grouped product is")
