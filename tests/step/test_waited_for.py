"""Gradients that the backward pass waits for are held in bfloat16, and not rounded for that."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxscale.config import Config
from jaxscale.models import gemma, llama
from jaxscale.ops import layers
from tests.step.conftest import SIZES, small_config, train

# Three layers: one more than `layers.LAYERS_AHEAD`.
QWEN = llama.Config(**SIZES, num_layers=3, qk_norm=True, qkv_bias=True)
GEMMA = gemma.Config(**SIZES, num_layers=3, head_size=16, global_every=2, window=5)
LEAN: dict[str, Any] = dict(dtype="bfloat16", scan_unroll=3, remat="attention", steps=3)
CASES: dict[str, dict[str, Any]] = {
    "alone": dict(model=QWEN),
    "zero3, gemma": dict(model=GEMMA, fsdp=8),
    "hsdp": dict(model=QWEN, data=2, fsdp=4),
    "zero2, more devices than key heads": dict(model=QWEN, fsdp=2, tensor=4, zero=2),
    "in halves, microbatches": dict(
        model=QWEN, fsdp=2, tensor=2, data=2, async_tensor="halves", grad_accumulation=2
    ),
    "delayed scales": dict(model=QWEN, fsdp=8, recipe="fp8_delayed"),
}


def trained(config: Config, rows, *, num_devices: int):
    run = train(config, rows, num_devices=num_devices)
    return dict(losses=run.losses, norms=run.grad_norms) | run.first_moments | run.final


@pytest.mark.parametrize("case", CASES)
def test_the_updates_are_the_same_to_the_bit(rows, case, monkeypatch):
    num_devices = 1 if case == "alone" else 8
    config = small_config(**LEAN, **CASES[case])
    tied_leaves, seen = layers._tied_leaves, []

    def as_stored(stack, execution):
        seen.append(set(tied_leaves(stack, execution).values()))
        return tied_leaves(dataclasses.replace(stack, reads_by_linear=False), execution)

    here = trained(config, rows, num_devices=num_devices)
    monkeypatch.setattr(layers, "_tied_leaves", as_stored)
    stored = trained(config, rows, num_devices=num_devices)
    assert any(np.dtype("bfloat16") in dtypes for dtypes in seen)
    for name, value in stored.items():
        np.testing.assert_array_equal(here[name], value, err_msg=name)
