"""What rounding to 8 bits loses is counted right, and on every layout."""

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxscale.step.rounding import Rounding
from jaxscale.step.state import init_state, to_flat
from jaxscale.train.beside import Beside
from tests.step.conftest import in_8_bits, make_plan, small_config

LAYOUTS: dict[str, dict[str, Any]] = {
    "auto": dict(fsdp=8, axis_types="auto", grad_accumulation=2),
    "lean hsdp": dict(data=2, fsdp=4, scan_unroll=2, remat="attention_mlp"),
    "tp sp": dict(data=2, fsdp=2, tensor=2),
    "context": dict(fsdp=4, context=2, reduce_dtype="float32"),
    "stages": dict(stage=2, fsdp=4, grad_accumulation=2),
}
WEIGHTS = ("down", "gate", "out", "qkv", "up")


@pytest.fixture(scope="module")
def rounded(rows):
    """`rounded(num_devices, **changes)`: (what a first step loses, the parameters by name)."""

    @functools.cache
    def rounded(num_devices, **changes):
        plan = make_plan(small_config(**changes), num_devices)
        state, rounding = init_state(plan), Rounding()
        beside = Beside(plan, rows, program=rounding.program, doing="looking")
        beside.first(state, number=0)
        return rounding.taken(), {
            name: np.asarray(leaf) for name, leaf in to_flat(state.params).items()
        }

    return rounded


@pytest.mark.parametrize(
    "recipe", ["fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_blockwise"]
)
def test_weights_and_scales_are_counted(rounded, recipe):
    found, params = rounded(1, **in_8_bits(recipe))
    operands = [f"{name}.{what}" for name in WEIGHTS for what in ("gradient", "weight", "x")]
    assert list(found) == operands
    lost = num_scales = 0
    for layer in params["layers.up"].astype(ml_dtypes.bfloat16).astype(np.float64):
        inputs, outputs = layer.shape
        block = dict.fromkeys(("fp8_tensorwise", "fp8_delayed"), (inputs, outputs))
        block |= {"fp8_rowwise": (inputs, 1)}
        rows, columns = block.get(recipe, (128, 128))
        blocks = layer.reshape(inputs // rows, rows, outputs // columns, columns)
        amax = np.abs(blocks).max(axis=(1, 3), keepdims=True)
        scale = 2.0 ** np.ceil(np.log2(amax / 448))
        lost += ((blocks / scale).astype(ml_dtypes.float8_e4m3fn) == 0).sum()
        num_scales += scale.size
        assert set(np.log2(scale).ravel()) <= set(found["up.weight"].scales)
    if recipe != "fp8_rowwise":  # where each weight is rounded once more for its other product
        assert found["up.weight"].lost == pytest.approx(lost / params["layers.up"].size)
        assert sum(found["up.weight"].scales.values()) % num_scales == 0
    for operand in found.values():
        assert 0 <= operand.lost < 0.2 and 0 <= operand.full < 0.05


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_loses_what_one_device_does(rounded, layout):
    alone, _ = rounded(1, **in_8_bits("fp8_tensorwise"))
    here, _ = rounded(8, **in_8_bits("fp8_tensorwise"), **LAYOUTS[layout])
    assert list(here) == list(alone)
    for name, operand in here.items():
        # A device's own scale may be smaller, not larger, than that of all.
        assert operand.lost <= alone[name].lost * 1.05 + 1e-4, name
        assert max(operand.scales) <= max(alone[name].scales) + 1
        if name.endswith("weight"):
            assert operand.lost == pytest.approx(alone[name].lost, rel=1e-4), name
            assert operand.scales.keys() == alone[name].scales.keys()
