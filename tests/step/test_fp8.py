"""Runs whose products are made in 8 bits: the same on every layout, and near those that are not."""

import re
from typing import Any

import numpy as np
import pytest

from tests.step.conftest import in_8_bits, make_plan, small_config

# A difference in the last bit of bfloat16 may turn a value over to its neighbour in 8 bits. After
# five steps losses differ by up to 1.1e-4 of themselves on these meshes; after the first, Adam's
# moments by 0.2 to 0.3% without tensor parallelism, which rounds partial sums, and 3.7% with it.
LOSS_RTOL = 3e-4
MOMENT_RTOL = 0.05
# Beside products in bfloat16: up to 4.4e-4 here.
NEAR_BFLOAT16 = 2e-3

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": dict(fsdp=8, zero=1),
    "zero2": dict(fsdp=8, zero=2),
    "zero3": dict(fsdp=8),
    "auto": dict(fsdp=8, axis_types="auto"),
    "gathered once": dict(fsdp=8, reshard_after_forward=False),
    "lean zero1": dict(fsdp=8, zero=1, scan_unroll=2, remat="attention"),
    "lean hsdp": dict(data=2, fsdp=4, scan_unroll=2, remat="attention_mlp"),
    "tp sp": dict(data=2, fsdp=2, tensor=2),
    "context": dict(data=2, fsdp=2, context=2, reduce_dtype="float32"),
    "stages": dict(stage=2, fsdp=4, grad_accumulation=2),
    # Of more microbatches than stages: a stage that has nothing to do reads what nobody wrote.
    "idle stages": dict(stage=2, fsdp=4, grad_accumulation=4, stages_take_turns="one_f_one_b"),
    "async": dict(fsdp=2, data=2, tensor=2, async_tensor=True),
}
CASES = [("fp8_tensorwise", layout) for layout in LAYOUTS]
CASES += [("fp8_rowwise", layout) for layout in ("zero3", "tp sp")]
CASES += [
    ("fp8_blockwise", layout) for layout in LAYOUTS if layout not in ("zero2", "idle stages")
]


@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_a_layout_trains_like_one_device(run, layout, recipe):
    alone = run(1, **in_8_bits(recipe))
    here = run(8, **in_8_bits(recipe), **LAYOUTS[layout])
    np.testing.assert_allclose(here.losses, alone.losses, rtol=LOSS_RTOL)
    for name, value in alone.first_moments.items():
        error = np.linalg.norm(here.first_moments[name] - value) / np.linalg.norm(value)
        assert error < MOMENT_RTOL, name


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"])
def test_8_bits_train_nearly_like_16(run, recipe):
    here, plain = (run(1, **in_8_bits(recipe) | dict(recipe=kind)) for kind in (recipe, "dtype"))
    assert (here.losses != plain.losses).any()
    np.testing.assert_allclose(here.losses, plain.losses, rtol=NEAR_BFLOAT16)


def test_layers_at_the_ends_keep_to_16_bits_in_a_loop_as_without_one(run):
    ends: dict[str, Any] = dict(first_layers_as_dtype=1, last_layers_as_dtype=2)
    settings: dict[str, Any] = dict(dtype="bfloat16", recipe="fp8_tensorwise", num_layers=5)
    settings |= ends
    loop, unrolled = run(8, **settings), run(8, scan_unroll=5, remat="attention", **settings)
    np.testing.assert_allclose(loop.losses, unrolled.losses, rtol=LOSS_RTOL)
    for name, value in unrolled.first_moments.items():
        error = np.linalg.norm(loop.first_moments[name] - value) / np.linalg.norm(value)
        assert error < MOMENT_RTOL, name
    whole = run(8, dtype="bfloat16", num_layers=5, recipe="fp8_tensorwise")
    assert (whole.losses != loop.losses).any()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a CPU": (
        dict(recipe="fp8_tensorwise", emulate=False),
        "config.precision.recipe='fp8_tensorwise': cpu has no products in 8 bits; set "
        "config.precision.emulate=True for the same numbers, slowly, or "
        "config.precision.recipe='dtype'",
    ),
    "no such weight": (
        dict(recipe="fp8_rowwise", weights=("qkv", "gait")),
        "config.precision.weights: no weight of a layer has 'gait' in its name; there are "
        "layers.down, layers.gate, layers.out, layers.qkv, layers.up",
    ),
    "all layers": (
        dict(recipe="fp8_rowwise", first_layers_as_dtype=1, last_layers_as_dtype=1),
        "config.precision.first_layers_as_dtype=1: the first 1 and the last 1 of 2 layers leave "
        "none for config.precision.recipe; lower it",
    ),
    "stages": (
        dict(recipe="fp8_rowwise", last_layers_as_dtype=1, stage=2, grad_accumulation=2),
        "config.precision.last_layers_as_dtype=1: the stages of config.mesh.stage=2 run all "
        "layers alike; set it to 0",
    ),
    "statistics of nothing": (
        dict(recipe="dtype", statistics_every=2),
        "config.precision.statistics_every=2: nothing is rounded to 8 bits; set it to 0, or "
        "config.precision.recipe",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused(case):
    settings, message = BAD[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan(small_config(**settings))
