"""Where values stop being finite is named, forwards and backwards, on every layout."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxscale.step import nonfinite
from jaxscale.step.relayout import Relayout
from jaxscale.step.state import from_flat, init_state, to_flat
from jaxscale.train.beside import Beside
from tests.step.conftest import make_plan, small_config

LAYERS = 4
FP8: dict[str, Any] = dict(recipe="fp8_tensorwise", dtype="bfloat16")
LAYOUTS: dict[str, dict[str, Any]] = {
    "auto": dict(fsdp=8, axis_types="auto", grad_accumulation=2),
    "lean hsdp": dict(data=2, fsdp=4, scan_unroll=LAYERS, remat="attention_mlp"),
    "zero 1": dict(fsdp=8, zero=1),
    "zero 2": dict(fsdp=8, zero=2),
    "async tp": dict(data=2, fsdp=2, tensor=2, async_tensor="halves"),
    "tp in a ring": dict(fsdp=4, tensor=2, async_tensor="ring"),
    "context": dict(fsdp=4, context=2),
    "fp8": FP8 | dict(fsdp=8),
    "fp8 ends": FP8 | dict(fsdp=8, first_layers_as_dtype=1),
    "stages": dict(stage=4, data=2, grad_accumulation=4),
    "stages that take turns": dict(
        stage=2, fsdp=4, grad_accumulation=2, stages_take_turns="interleaved"
    ),
}


def too_large_forwards(arrays):
    arrays["params.layers.up"][2] = 1e25
    arrays["params.layers.down"][2] = 1e25


def too_large_backwards(arrays):
    """The output of layer 1 is as it should be; gradients are 1e8 times too large."""
    arrays["params.layers.up"][1] *= 1e38
    arrays["params.layers.down"][1] *= 1e-34
    arrays["params.head"] *= 1e10


def no_number(arrays):
    arrays["params.layers.qkv"][3, 5] = np.nan


CAUSES = {
    "the output of layer 2": too_large_forwards,
    "the gradient of layers.down of layer 1": too_large_backwards,
    "layers.qkv of layer 3 (the weights themselves)": no_number,
}


@functools.cache
def first_arrays(cause) -> dict[str, np.ndarray]:
    """Of a first state, as one device holds it, with what is wrong."""
    state = init_state(make_plan(small_config(num_layers=LAYERS), 1))
    arrays = {name: np.array(leaf) for name, leaf in to_flat(state).items()}
    cause(arrays)
    return arrays


def state_with(arrays: dict[str, np.ndarray], plan):
    wanted = to_flat(plan.state)
    relayout = Relayout((LAYERS,), plan.lead, num_layers=LAYERS)
    asked = relayout.as_saved(wanted, arrays)
    put = {name: jax.device_put(arrays[name], asked[name].sharding) for name in wanted}
    held = relayout.as_wanted(put, wanted)
    put = {name: jax.device_put(held[name], leaf.sharding) for name, leaf in wanted.items()}
    return from_flat(plan.state, put)


@pytest.fixture(scope="module")
def locator(rows):
    """Of a layout; its program is compiled once."""

    @functools.cache
    def locator(layout):
        plan = make_plan(small_config(num_layers=LAYERS, **LAYOUTS[layout]))
        beside = Beside(plan, rows, program=nonfinite.program, doing="looking")
        return functools.partial(beside.first, number=3, read=nonfinite.first_place), plan

    return locator


@pytest.mark.parametrize("place", CAUSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_place_is_named(locator, layout, place):
    locate, plan = locator(layout)
    assert locate(state_with(first_arrays(CAUSES[place]), plan)) == place


def test_where_all_is_finite_there_is_no_place(locator):
    locate, plan = locator("auto")
    assert locate(init_state(plan)) is None
