"""Grouped products compiled for H100s that are not here: what becomes of them."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxscale import sharding as shd
from jaxscale.compile import ahead
from jaxscale.config import PrecisionConfig, Recipe
from jaxscale.kernels import (
    grouped_fp8,
    grouped_gradient,
    grouped_programs,
    grouped_visits,
    hopper,
    quantize,
)
from jaxscale.ops.execution import Execution
from jaxscale.ops.fp8 import fp8_of
from jaxscale.ops.grouped import grouped_product
from tests.compile.bodies import kernels_without_bodies

pytestmark = [
    pytest.mark.skipif(ahead.missing() is not None, reason=str(ahead.missing())),
    pytest.mark.skipif(jax.__version_info__ < hopper.JAX, reason="this jax is too old for it"),
    # XLA's plugin for CUDA reports on machines without CUDA's libraries.
    pytest.mark.filterwarnings("ignore"),
]
ROWS, GROUPS, K, N, LAYERS = 4096, 16, 512, 768, 2
RULES = shd.Rules(batch=("data", "fsdp"), mlp="tensor", layers=None)
EXECUTIONS = {
    recipe: Execution(
        platform="gpu",
        fp8=fp8_of(PrecisionConfig(recipe=recipe, weights=("up",), weight_gradients=False)),
    )
    for recipe in (Recipe.DTYPE, Recipe.FP8_TENSORWISE)
}
OPTIONS: dict[str, Any] = dict(ahead.COMPILER_OPTIONS)


def update(stack_LEKN, x_TK, group_sizes_RE, *, execution: Execution):
    """The gradient through layers in a scan: up by columns, down by rows."""

    def layer(x_TK, weights):
        up_EKN, down_ENK = weights
        options = dict(group_sizes_RE=group_sizes_RE, name="up", execution=execution)
        h_TN = grouped_product(x_TK, up_EKN, outputs="mlp", **options)
        return grouped_product(jax.nn.silu(h_TN), down_ENK, inputs="mlp", **options), None

    def loss(stack_LEKN, x_TK):
        return jnp.sum(jax.lax.scan(layer, x_TK, stack_LEKN)[0].astype(jnp.float32))

    return jax.grad(loss, (0, 1))(stack_LEKN, x_TK)


@pytest.fixture(
    scope="module",
    params=[(kind, recipe) for recipe in EXECUTIONS for kind in ("explicit", "auto")],
    ids=str,
)
def program(request) -> str:
    kind, recipe = request.param
    devices = ahead.devices_of("h100", hosts=1, gpus_per_host=4)
    mesh = shd.make_mesh(fsdp=2, tensor=2, devices=devices, axis_types=kind)
    with shd.use(mesh, RULES):

        def array(shape, axes, *, dtype=jnp.bfloat16):
            sharding = jax.sharding.NamedSharding(mesh, RULES.spec(axes))
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        stack = (
            array((LAYERS, GROUPS, K, N), "layers _ _ mlp"),
            array((LAYERS, GROUPS, N, K), "layers _ mlp _"),
        )
        sizes = array((2, GROUPS), "batch _", dtype=jnp.int32)
        loss = functools.partial(update, execution=EXECUTIONS[recipe])
        lowered = jax.jit(loss).lower(stack, array((ROWS, K), "batch _"), sizes)
        return ahead.text_of(lowered.compile(compiler_options=OPTIONS))


def test_each_product_of_a_layer_is_one_call_and_nothing_is_gathered(program):
    counts = ahead.count_calls(program)
    # Two products forward, and each gradient of both: once in each of the two loops.
    assert (counts["grouped_matmul"], counts["grouped_weight_gradient"]) == (4, 2)
    assert not any(name.startswith(("all-gather", "all-to-all")) for name in counts)


@pytest.mark.skipif(quantize.device_supported("gpu", "9.0") is not None, reason="needs jax-triton")
def test_what_is_rounded_is_read_once(program):
    calls = program.count('custom_call_target="triton_kernel_call"')
    # Forward the rows and the matrices of both products, backward what comes to both.
    assert calls == (6 if "f8e4m3fn" in program else 0)
    # But for the stacks of what the layers save.
    by_xla = re.findall(rf"= f8e\w+\[(?!{LAYERS},)\S+ (?:fusion|convert)\(", program)
    assert not by_xla


def test_no_matrix_is_transposed_or_expanded(program):
    # What is copied are the zeros that the stacks of gradients begin with.
    assert not re.findall(rf"= bf16\[{GROUPS},\d+,\d+\]\S* (?:transpose|copy)\(", program)
    assert f"[{GROUPS},{ROWS // 2}," not in program


def gated(stack, x_TK, sizes_LRE, *, execution: Execution):
    """The gradient through layers in a scan, each with groups of its own: gate, up, down."""

    def layer(x_TK, weights):
        gate_EKN, up_EKN, down_ENK, sizes_RE = weights
        options = dict(group_sizes_RE=sizes_RE, name="up", execution=execution)
        gate_TN = grouped_product(x_TK, gate_EKN, **options)
        h_TN = jax.nn.silu(gate_TN) * grouped_product(x_TK, up_EKN, **options)
        return grouped_product(h_TN, down_ENK, **options), None

    def loss(stack, x_TK):
        return jnp.sum(jax.lax.scan(layer, x_TK, (*stack, sizes_LRE))[0].astype(jnp.float32))

    return jax.grad(loss, (0, 1))(stack, x_TK)


@pytest.mark.parametrize("recipe", EXECUTIONS, ids=str)
def test_the_products_of_a_layer_share_tables_that_are_three_launches(recipe):
    (device,) = ahead.devices_of("h100", hosts=1, gpus_per_host=1)
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = [(LAYERS, GROUPS, *size) for size in ((K, N), (K, N), (N, K))]
    *stack, x_TK = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
        for shape in (*shapes, (ROWS, K))
    )
    sizes = jax.ShapeDtypeStruct((LAYERS, 1, GROUPS), jnp.int32, sharding=sharding)
    loss = functools.partial(gated, execution=EXECUTIONS[recipe])
    with kernels_without_bodies():
        lowered = jax.jit(loss).lower(tuple(stack), x_TK, sizes)
    program = ahead.text_of(lowered.compile(compiler_options=OPTIONS))
    counts = ahead.count_calls(program)
    assert (counts["grouped_matmul"], counts["grouped_weight_gradient"]) == (6, 3)
    # Ends of groups, counts of tiles, tiles: once in each of the two loops. What reads nothing is
    # made before them.
    most = (ROWS + (GROUPS + 1) * (grouped_visits.TILE_T + grouped_visits.ALIGNED - 2)) // 128
    tables = re.findall(r"= s32\[([\d,]+)\]\S* fusion\(%", program)
    assert sorted(tables) == sorted(2 * [f"{GROUPS}", f"{GROUPS + 1}", f"{most},4"])


@pytest.mark.parametrize("columns", grouped_programs.COLUMNS)
def test_nothing_is_spilled(columns, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    (device,) = ahead.devices_of("h100", hosts=1, gpus_per_host=1)
    sharding = jax.sharding.SingleDeviceSharding(device)
    # Of this test alone: a program that has been compiled is not compiled again.
    num_rows = 8 * columns
    held, not_held = (
        grouped_programs.Tiles(columns, grouped_programs.STAGES[columns], is_held=is_held)
        for is_held in (True, False)
    )
    shapes = (num_rows, K), (GROUPS, K, N), (num_rows, N)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((GROUPS,), jnp.int32, sharding=sharding)

    def products(x_TK, w_EKN, grad_TN, group_sizes_E):
        options = dict(group_sizes_E=group_sizes_E)
        return (
            *(
                grouped_programs.multiply(
                    *arrays, is_transposed=is_transposed, tiles=tiles, **options
                )
                for arrays, is_transposed in (((x_TK, w_EKN), False), ((grad_TN, w_EKN), True))
                for tiles in (held, not_held)
            ),
            *(
                grouped_gradient.weight_gradient(
                    x_TK, grad_TN, out_dtype=out_dtype, tiles=held, **options
                )
                for out_dtype in (jnp.bfloat16, jnp.float32)
            ),
        )

    jax.jit(products).lower(*arrays, sizes).compile(compiler_options=OPTIONS)
    output = "".join(capfd.readouterr())
    assert output.count("0 bytes spill stores, 0 bytes spill loads") == 6
    assert output.count("spill stores") == 6


# How many blocks a sum has is known to the compiler: with 16 a kernel spilled, with 8 it did not.
@pytest.mark.parametrize("summed", [K, 768, 2048])
@pytest.mark.parametrize("columns", grouped_fp8.COLUMNS)
def test_in_8_bits_nothing_is_spilled_either(columns, summed, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    (device,) = ahead.devices_of("h100", hosts=1, gpus_per_host=1)
    sharding = jax.sharding.SingleDeviceSharding(device)

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def product(x_TK, w_ENK, x_scale_T, w_scale_E, group_sizes_E):
        return grouped_fp8.multiply(
            x_TK,
            w_ENK,
            x_scale_T=x_scale_T,
            w_scale_E=w_scale_E,
            group_sizes_E=group_sizes_E,
            out_dtype=jnp.bfloat16,
            tiles=grouped_programs.Tiles(columns, grouped_programs.STAGES[columns]),
        )

    # Of this test alone: a program that has been compiled is not compiled again.
    arrays = (
        array((24 * columns, summed), jnp.float8_e5m2),
        array((GROUPS, N, summed), jnp.float8_e4m3fn),
        array((24 * columns,), jnp.float32),
        array((GROUPS,), jnp.float32),
        array((GROUPS,), jnp.int32),
    )
    jax.jit(product).lower(*arrays).compile(compiler_options=OPTIONS)
    output = "".join(capfd.readouterr())
    assert output.count("0 bytes spill stores, 0 bytes spill loads") == 1
    assert output.count("spill stores") == 1
