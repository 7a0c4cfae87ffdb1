"""A layout never changes the mathematics."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxscale.config import AsyncTensor, Dtype, async_tensor_of
from jaxscale.models import gemma
from jaxscale.ops.layers import LAYERS_AHEAD
from tests.step.alike import LOSS_RTOL, assert_trains_like
from tests.step.conftest import SIZES, in_8_bits, make_plan, small_config

# Name -> devices, mesh and batch settings. DP, ZeRO-1 to 3, HSDP, TP, SP and products, with more
# devices than key heads (tensor=4 and 8 over 2) and a vocabulary that no axis divides (257).
LAYOUTS = {
    "dp8": dict(data=8, fsdp=1),
    "dp8 accumulated": dict(data=8, fsdp=1, grad_accumulation=2),
    "zero1": dict(fsdp=8, zero=1),
    "zero2": dict(fsdp=8, zero=2),
    "zero3": dict(fsdp=8),
    "zero3 on 2": dict(num_devices=2, fsdp=2),
    "zero3 on 4 accumulated": dict(num_devices=4, fsdp=4, grad_accumulation=4),
    "hsdp zero1": dict(data=2, fsdp=4, zero=1),
    "hsdp zero2": dict(data=4, fsdp=2, zero=2),
    "hsdp zero3": dict(data=2, fsdp=4),
    "tp2": dict(num_devices=2, fsdp=1, tensor=2, sequence_parallel=False),
    "tp8 over 2 key heads": dict(fsdp=1, tensor=8, sequence_parallel=False),
    "tp2 sp": dict(num_devices=2, fsdp=1, tensor=2),
    "tp4 sp over 2 key heads": dict(fsdp=2, tensor=4),
    "tp4 sp along the sequence": dict(fsdp=2, tensor=4, grad_accumulation=4),
    "tp8 sp over 2 key heads": dict(fsdp=1, tensor=8),
    "dp tp": dict(data=4, fsdp=1, tensor=2, sequence_parallel=False),
    "fsdp tp sp": dict(fsdp=4, tensor=2),
    "hsdp tp sp accumulated": dict(data=2, fsdp=2, tensor=2, grad_accumulation=2),
    "hsdp tp sp zero1": dict(data=2, fsdp=2, tensor=2, zero=1),
    "hsdp tp sp zero2": dict(data=2, fsdp=2, tensor=2, zero=2),
}


@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_starts_the_same_and_trains_the_same_as_one_device(run, layout, axis_types):
    alone, here = run(1), run(**LAYOUTS[layout], axis_types=axis_types)
    for name, value in alone.initial.items():
        np.testing.assert_array_equal(here.initial[name], value, err_msg=name)
    for mine, theirs in zip(here.first_batch, alone.first_batch, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert_trains_like(here, alone)


# Of 16 rows.
SPLITS_ROWS: dict[str, tuple[dict[str, Any], bool]] = {
    "8 of 2 devices": (dict(data=2, fsdp=1, stage=2, tensor=2, grad_accumulation=2), True),
    "4 of 4": (dict(fsdp=2, tensor=4, grad_accumulation=2), True),
    "4 of 4, in halves": (
        dict(fsdp=2, tensor=4, grad_accumulation=2, async_tensor="halves"),
        False,
    ),
    "2 of 4": (dict(fsdp=2, tensor=4, grad_accumulation=4), False),
    "2 of 2, beside context": (dict(fsdp=2, context=2, tensor=2, grad_accumulation=4), True),
    "1 of 2": (dict(fsdp=4, tensor=2, grad_accumulation=4), False),
}


@pytest.mark.parametrize("case", SPLITS_ROWS)
def test_sequence_parallelism_splits_rows_where_there_is_one_for_each_device(case):
    settings, splits_rows = SPLITS_ROWS[case]
    rules = make_plan(small_config(**settings)).rules
    by_rows, by_sequence = (
        "tensor" in rules.mesh_axes(axis) for axis in ("residual_rows", "residual_seq")
    )
    assert (by_rows, by_sequence) == (splits_rows, not splits_rows)
    beyond = set(rules.mesh_axes("residual_seq")) - set(rules.mesh_axes("seq"))
    assert beyond == (set() if splits_rows else {"tensor"})


@pytest.mark.parametrize("remat", ["none", "full", "attention", "attention_mlp", "gemms"])
def test_a_remat_policy_changes_no_loss(run, remat):
    np.testing.assert_allclose(run(8, fsdp=8, remat=remat).losses, run(1).losses, rtol=LOSS_RTOL)


def test_unrolling_the_layer_scan_changes_no_loss(run):
    np.testing.assert_allclose(run(8, fsdp=8, scan_unroll=2).losses, run(1).losses, rtol=LOSS_RTOL)


# Where barriers stand in for the loop, and weights are cut out of their stacks in each layer.
LEAN: dict[str, dict[str, Any]] = {
    f"zero{zero} {remat}": dict(fsdp=8, zero=zero, remat=remat)
    for zero in (1, 2, 3)
    for remat in ("full", "attention", "attention_mlp", "gemms_lean")
}
LEAN |= {
    "one device": dict(num_devices=1, remat="gemms_lean"),
    "the first layer leaner": dict(fsdp=8, remat="gemms_lean", leaner_layers=1),
    "hsdp zero2": dict(data=2, fsdp=4, zero=2, remat="attention_mlp"),
    "fsdp context zero1": dict(fsdp=4, context=2, zero=1, remat="gemms_lean"),
    "fsdp tp, weights kept": dict(
        fsdp=4, tensor=2, reshard_after_forward=False, remat="gemms_lean"
    ),
    "fsdp tp auto": dict(fsdp=4, tensor=2, axis_types="auto", remat="attention"),
}


@pytest.mark.parametrize("layout", LEAN)
def test_unrolled_layers_that_save_little_train_the_same(run, layout):
    assert_trains_like(run(**LEAN[layout], scan_unroll=2), run(1))


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(remat="gemms"), "remat='gemms': .* 'attention' or 'attention_mlp' or 'gemms_lean'"),
        (dict(remat="attention", scan_unroll=1), "scan_unroll=1: .* needs 2; set it to that"),
        (
            dict(remat="attention", stage=2, fsdp=4, grad_accumulation=2),
            "mesh.stage=2: .* needs 1; set it to that, or leaner_layers to 0",
        ),
    ],
)
def test_a_leaner_policy_for_some_layers_is_refused_where_there_is_none(settings, message):
    with pytest.raises(ValueError, match=f"config.{message}"):
        make_plan(small_config(**(dict(scan_unroll=2, leaner_layers=1, fsdp=8) | settings)), 8)


# Layers on two halves of a device's rows.
ASYNC: dict[str, dict[str, Any]] = {
    "tp2": dict(num_devices=2, fsdp=1, tensor=2),
    "fsdp tp auto": dict(fsdp=4, tensor=2, axis_types="auto"),
    "tp4 over 2 key heads": dict(fsdp=2, tensor=4, remat="attention_mlp"),
    "hsdp tp, weights kept": dict(
        data=2, fsdp=2, tensor=2, reshard_after_forward=False, remat="gemms"
    ),
    "zero2 tp": dict(data=2, fsdp=2, tensor=2, zero=2),
    "zero1 tp accumulated": dict(fsdp=2, tensor=4, zero=1, grad_accumulation=2),
    "fsdp context tp unrolled": dict(fsdp=2, context=2, tensor=2, scan_unroll=2, remat="attention"),
}


@pytest.mark.parametrize("layout", ASYNC)
def test_layers_on_halves_of_the_rows_train_the_same(run, layout):
    assert_trains_like(run(**ASYNC[layout], async_tensor="halves"), run(1))


# Layers on the rows of one device after another.
FOUR_KEY_HEADS = dataclasses.replace(small_config().model, num_kv_heads=4, qkv_bias=True)
GEMMA = gemma.Config(**SIZES, num_layers=2, head_size=16, global_every=2, window=5)
RING: dict[str, dict[str, Any]] = {
    "tp2, gemma": dict(num_devices=2, fsdp=1, tensor=2, model=GEMMA),
    "fsdp tp auto": dict(fsdp=4, tensor=2, axis_types="auto"),
    "tp4 accumulated": dict(fsdp=2, tensor=4, grad_accumulation=2, model=FOUR_KEY_HEADS),
    "dp tp": dict(data=4, fsdp=1, tensor=2),
    "fsdp tp, weights kept": dict(fsdp=4, tensor=2, reshard_after_forward=False, remat="gemms"),
    "fsdp context tp unrolled": dict(fsdp=2, context=2, tensor=2, scan_unroll=2, remat="attention"),
}


@pytest.mark.parametrize("layout", RING)
def test_layers_on_rows_passed_on_in_a_ring_train_the_same(run, layout):
    settings = RING[layout]
    model = settings.get("model", small_config().model)
    assert_trains_like(run(**settings, async_tensor="ring"), run(1, model=model))


NO_RING: dict[str, tuple[dict[str, Any], str]] = {
    "rows": (dict(fsdp=4, tensor=2, batch_size=4), "1 rows are in a layer at once, no multiple of"),
    "no sequence parallelism": (
        dict(fsdp=4, tensor=2, sequence_parallel=False),
        "config.mesh.sequence_parallel=False leaves all rows",
    ),
    "heads": (dict(fsdp=2, tensor=4), "tensor=4 does not divide config.model.num_kv_heads=2"),
    "8 bits": (in_8_bits("fp8_tensorwise") | dict(fsdp=4, tensor=2), "recipe='fp8_tensorwise'"),
    "whole weights": (dict(fsdp=4, tensor=2, zero=2), "config.mesh.zero=2"),
    "hsdp": (dict(data=2, fsdp=2, tensor=2), "whole gradients .* config.mesh.data=2"),
}


@pytest.mark.parametrize("case", NO_RING)
def test_where_rows_cannot_be_passed_on_they_are_halved(case):
    settings, message = NO_RING[case]
    with pytest.raises(ValueError, match=f"config.mesh.async_tensor='ring': .*{message}"):
        make_plan(small_config(**settings, async_tensor="ring"))
    if "batch_size" not in settings:
        halved = make_plan(small_config(**settings, async_tensor="auto"))
        assert halved.execution.async_tensor == AsyncTensor.HALVES


def test_a_ring_is_of_one_process():
    config, sizes = small_config(fsdp=4, tensor=2, async_tensor="auto"), dict(tensor=2, fsdp=4)
    sizes = config.mesh.sizes(8) | sizes
    assert async_tensor_of(config, sizes) == AsyncTensor.RING
    assert async_tensor_of(config, sizes, num_processes=2) == AsyncTensor.HALVES
    alone = config.mesh.sizes(8) | dict(tensor=1, fsdp=8)
    assert async_tensor_of(config, alone) == AsyncTensor.OFF


NO_HALVES: dict[str, tuple[dict[str, Any], str]] = {
    "rows": (dict(fsdp=8, batch_size=24), "24 rows are no multiple of 16.*set config.batch_size"),
    "stages": (
        dict(stage=2, fsdp=4, grad_accumulation=2),
        "config.mesh.stage=2: with config.mesh.async_tensor='halves' it must be 1",
    ),
    "sums": (
        dict(fsdp=8, dtype=Dtype.BFLOAT16, reduce_dtype=Dtype.FLOAT32),
        "config.mesh.reduce_dtype='float32': with .* it must be bfloat16",
    ),
}


@pytest.mark.parametrize("case", NO_HALVES)
def test_what_cannot_be_halved_is_refused(case):
    settings, message = NO_HALVES[case]
    with pytest.raises(ValueError, match=message):
        make_plan(small_config(**settings, async_tensor="halves"), 8)


# Unrolled and lean, or with copies whose shares are summed, the backward pass is held back by the
# weight gradients of the layer LAYERS_AHEAD before.
UNROLLED: dict[str, dict[str, Any]] = {
    "one device": dict(num_devices=1, remat="attention"),
    "full": dict(fsdp=8, remat="full"),
    "attention": dict(fsdp=8, remat="attention"),
    "attention auto": dict(fsdp=8, remat="attention", axis_types="auto"),
    "attention_mlp, weights kept": dict(fsdp=8, remat="attention_mlp", reshard_after_forward=False),
    "zero2": dict(fsdp=8, remat="attention", zero=2),
    "hsdp tp sp accumulated zero1": dict(
        data=2, fsdp=2, tensor=2, zero=1, grad_accumulation=2, remat="attention"
    ),
    "hsdp tp sp accumulated": dict(
        data=2, fsdp=2, tensor=2, grad_accumulation=2, remat="attention_mlp"
    ),
    "tp4 sp over 2 key heads auto": dict(fsdp=2, tensor=4, remat="attention", axis_types="auto"),
    "hsdp, gemms": dict(data=2, fsdp=4, remat="gemms"),
    "hsdp context zero1, gemms": dict(data=2, fsdp=2, context=2, zero=1, remat="gemms"),
    "hsdp tp zero2, gemms": dict(data=2, fsdp=2, tensor=2, zero=2, remat="gemms"),
    "hsdp auto, gemms": dict(data=2, fsdp=4, remat="gemms", axis_types="auto"),
}


@pytest.mark.parametrize("layout", UNROLLED)
def test_unrolled_layers_that_wait_train_the_same_as_a_scan_of_them(run, layout):
    num_layers = LAYERS_AHEAD + 2
    here = run(**UNROLLED[layout], num_layers=num_layers, scan_unroll=num_layers)
    assert_trains_like(here, run(1, num_layers=num_layers))


def test_bfloat16_trains_like_float32(run):
    # bfloat16 has 8 bits: products round at 4e-3, and the loss averages 500 tokens of it.
    np.testing.assert_allclose(run(8, fsdp=8, dtype="bfloat16").losses, run(1).losses, rtol=2e-3)


def test_the_loss_falls(run):
    losses = run(1).losses
    assert losses[-1] < losses[0]
