"""The 8B step with products in 8 bits, compiled for H100s that are not here: what becomes of it."""

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxscale.command_line import read_config
from jaxscale.compile import ahead
from jaxscale.config import MeshConfig, Recipe, Remat
from jaxscale.kernels import block_scaled_matmul, hopper, quantize
from tests.compile.bodies import kernels_without_bodies

pytestmark = [
    pytest.mark.skipif(ahead.missing() is not None, reason=str(ahead.missing())),
    # XLA's plugin for CUDA reports on machines without CUDA's libraries.
    pytest.mark.filterwarnings("ignore"),
]
CONFIG = Path(__file__).parents[2] / "configs" / "llama3_8b.py"
LAYERS = 2
# Products of a layer: with qkv, out, gate, up and down; each with its two gradients.
PRODUCTS = 3 * 5
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$", re.MULTILINE)


def compiled_8b(*, num_layers: int = LAYERS, has_bodies: bool = False, **changes) -> str:
    """So many layers of it, unrolled. has_bodies: of our kernels, which do nothing otherwise."""
    config = read_config([f"--config={CONFIG}"])
    config.model = dataclasses.replace(config.model, num_layers=num_layers)
    config.data.max_documents_per_row, config.scan_unroll = 8, num_layers
    config.remat, config.batch_size = Remat.GEMMS, 8
    precision = changes.pop("precision")
    if precision["recipe"] == Recipe.FP8_BLOCKWISE and jax.__version_info__ < hopper.JAX:
        pytest.skip("this jax is too old for block-scaled products")
    config.precision = dataclasses.replace(config.precision, **precision)
    config = dataclasses.replace(config, **changes)
    devices = ahead.devices_of("h100", hosts=1, gpus_per_host=8)
    with contextlib.nullcontext() if has_bodies else kernels_without_bodies():
        return ahead.text_of(ahead.compile_update(config, devices))


@pytest.fixture(scope="module")
def tensorwise() -> str:
    """FSDP 8, weights gathered once."""
    return compiled_8b(precision=dict(recipe=Recipe.FP8_TENSORWISE))


@pytest.fixture(scope="module")
def delayed() -> str:
    """As tensorwise."""
    return compiled_8b(precision=dict(recipe=Recipe.FP8_DELAYED))


@pytest.fixture(scope="module")
def rowwise() -> str:
    """FSDP 4 with tensor 2, weights gathered again in the backward pass, their gradients wide."""
    return compiled_8b(
        precision=dict(recipe=Recipe.FP8_ROWWISE, weight_gradients=False),
        mesh=MeshConfig(fsdp=4, tensor=2),
    )


@pytest.fixture(scope="module")
def blockwise() -> str:
    """FSDP 8, weights gathered again in the backward pass."""
    return compiled_8b(precision=dict(recipe=Recipe.FP8_BLOCKWISE))


@pytest.fixture(params=["tensorwise", "delayed", "rowwise", "blockwise"])
def hlo(request) -> str:
    return request.getfixturevalue(request.param)


def num_products(hlo: str) -> tuple[int, int]:
    """(in 8 bits, others), without those of the loss."""
    calls = [line for line in hlo.splitlines() if 'custom_call_target="__cublas' in line]
    narrow = sum("$f8" in line for line in calls)
    return narrow, sum("jvp(loss)" not in line for line in calls) - narrow


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_every_product_of_a_layer_is_one_of_operands_in_8_bits(request, recipe):
    hlo = request.getfixturevalue(recipe)
    assert num_products(hlo) == (LAYERS * PRODUCTS, 0)
    assert "__triton_gemm" not in hlo


# Of a device's row of 8192 tokens: what q, k and v, or the residual stream, or an MLP has of them.
ACTIVATION = re.compile(r"^\(?(?:bf16|f8e\w+)\[(?:1,)?8192,")


def passes(hlo: str) -> list[tuple[str, list[str]]]:
    """What is written and which activations are read by launches that find largest values."""
    types = {name: type_ for name, type_, _, _ in INSTRUCTION.findall(hlo)}
    found = []
    for _, written, operation, rest in INSTRUCTION.findall(hlo):
        if operation == "fusion" and "/reduce_max" in rest:
            operands = re.findall(r"%([\w.-]+)", rest.split("), kind=")[0])
            read = [types[name] for name in operands if ACTIVATION.match(types.get(name, ""))]
            found += [(written, read)] if read else []
    return found


def test_delayed_scales_are_found_where_values_are_rounded(tensorwise, delayed):
    """But for the gradient of q, k and v, which is joined there, and once more: in 8 bits.

    With scales of their own no kernel that looks for largest values can round.
    """
    assert passes(tensorwise) and not any("f8e" in written for written, _ in passes(tensorwise))
    alone = [read for written, read in passes(delayed) if "f8e" not in written]
    # jax 0.10.2's XLA looks for a norm's result's, too, in a pass of its own, in 8 bits.
    beside = 6 * LAYERS - (jax.__version_info__ < (0, 11))
    assert len(passes(delayed)) - len(alone) >= beside
    assert len(alone) <= LAYERS + 1 and all(of.startswith("f8e") for read in alone for of in read)


def test_what_delayed_scales_round_is_rounded_once(delayed):
    """But for weights, whose two layouts are written by one launch."""
    for _, written, operation, _ in INSTRUCTION.findall(delayed):
        if operation != "fusion":
            continue
        shapes = re.findall(r"f8e\w+\[(?:1,)?8192,[\d,]+\]", written)
        assert len(shapes) <= 2 and not any(shape.startswith("f8e4m3fn") for shape in shapes[1:])


def test_blocks_are_multiplied_by_the_kernel(blockwise):
    assert num_block_products(blockwise) == LAYERS * PRODUCTS
    assert num_products(blockwise) == (0, 0)


def num_block_products(hlo: str) -> int:
    calls = (line for line in hlo.splitlines() if '_target="mosaic_gpu' in line)
    return sum("operand_layout_constraints={f8e4m3fn[" in line for line in calls)


@pytest.mark.skipif(jax.__version_info__ < hopper.JAX, reason="this jax is too old for it")
@pytest.mark.parametrize("by_tile", [True, False])
@pytest.mark.parametrize("summed", [512, 4096, 14336])
def test_products_of_blocks_spill_nothing(summed, by_tile, monkeypatch, capfd):
    """Of the sizes of layers: how many blocks a sum has is known to the compiler."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    (device,) = ahead.devices_of("h100", hosts=1, gpus_per_host=1)
    sharding = jax.sharding.SingleDeviceSharding(device)
    lines = 2048
    blocks, rhs_lines = summed // 128, lines // 128 if by_tile else lines
    shapes = (lines, summed), (lines, summed), (lines, blocks), (rhs_lines, blocks)
    dtypes = 2 * (jnp.float8_e4m3fn,) + 2 * (jnp.float32,)
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]

    def product(lhs_MK, rhs_NK, lhs_scale, rhs_scale):
        scales = dict(lhs_scale=lhs_scale, rhs_scale=rhs_scale)
        return block_scaled_matmul.multiply(lhs_MK, rhs_NK, **scales, out_dtype=jnp.bfloat16)

    options: dict[str, Any] = ahead.COMPILER_OPTIONS
    jax.jit(product).lower(*arrays).compile(compiler_options=options)
    said = "".join(capfd.readouterr())
    assert (
        said.count("spill stores") == said.count("0 bytes spill stores, 0 bytes spill loads") == 1
    )


# Gradients that are sums yet to be made; a region that is manual over stages, whose program has a
# layer's products more than once.
@pytest.mark.parametrize("mesh", [dict(fsdp=8, zero=1), dict(stage=2, fsdp=4)], ids=str)
def test_blocks_are_multiplied_by_the_kernel_on_other_layouts(mesh):
    num_layers = mesh.get("stage", 1)
    hlo = compiled_8b(
        num_layers=num_layers,
        has_bodies=True,
        precision=dict(recipe=Recipe.FP8_BLOCKWISE),
        mesh=MeshConfig(**mesh),
        grad_accumulation=num_layers,
    )
    assert num_block_products(hlo) >= num_layers * PRODUCTS
    assert num_products(hlo) == (0, 0)


@pytest.mark.skipif(quantize.device_supported("gpu", "9.0") is not None, reason="needs jax-triton")
def test_what_comes_backwards_is_rounded_both_ways_in_one_read(tensorwise, rowwise, blockwise):
    """And inputs that no norm makes, of two products, as they are and turned over."""
    calls = [
        sum('custom_call_target="triton_kernel_call"' in line for line in hlo.splitlines())
        for hlo in (tensorwise, rowwise, blockwise)
    ]
    assert calls == [0, 0, LAYERS * (5 + 2 + 2)]


def test_weights_gradients_can_be_left_out(rowwise):
    assert num_products(rowwise) == (LAYERS * 10, LAYERS * 5)


def test_weights_are_gathered_in_8_bits(hlo):
    """A layer's are 4096 x 14336 and smaller; the tables', of the loss, are in bfloat16."""
    gathered = [
        types
        for _, types, operation, _ in INSTRUCTION.findall(hlo)
        if operation in ("all-gather", "all-gather-start")
    ]
    shapes = {shape for types in gathered for shape in re.findall(r"(\w+\[[\d,]+\])", types)}
    assert any(shape.startswith(("f8e4m3fn[4096,", "u8[4096,")) for shape in shapes), shapes
    wide = [shape for shape in shapes if re.match(r"(bf16|f32)\[4096,(7168|14336|8,6,128)", shape)]
    assert not wide


def test_nothing_that_was_quantised_is_made_wide_again(hlo):
    """But within a launch, to find the largest value."""
    instructions = INSTRUCTION.findall(hlo)
    types = {name: type_ for name, type_, _, _ in instructions}
    looked_at = {
        arguments.split(")")[0].lstrip("%")
        for _, _, operation, arguments in instructions
        if operation == "abs"
    }
    widened = [
        (type_, arguments)
        for name, type_, operation, arguments in instructions
        if operation == "convert"
        and types.get(arguments.split(")")[0].lstrip("%"), "").startswith("f8")
        and name not in looked_at
    ]
    assert not widened


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_layers_scales_cost_no_collective_of_activations(request, recipe):
    """Weights' largest values alone are compared between devices, many in a call.

    And once an update those that delayed scales are made of.
    """
    reduced = [
        types
        for _, types, operation, _ in INSTRUCTION.findall(request.getfixturevalue(recipe))
        if operation in ("all-reduce", "all-reduce-start")
    ]
    assert len(reduced) <= 2 * LAYERS + 3
