"""A skipped update leaves every array as it was, on every layout, and costs no memory."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxscale import sharding as shd
from jaxscale.compile.fit import compile_only, jit_update
from jaxscale.config import AxisTypes, BadStepsConfig, MeshConfig
from jaxscale.optim import adafactor, adamw8bit
from jaxscale.step import update as step_update
from jaxscale.step.feed import device_batches
from jaxscale.step.state import init_state, to_flat
from jaxscale.step.update import update
from tests.step.conftest import make_plan, small_config

LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": dict(mesh=MeshConfig(fsdp=1)),
    "fsdp": dict(mesh=MeshConfig(fsdp=8)),
    "zero 1": dict(mesh=MeshConfig(fsdp=8, zero=1)),
    "auto": dict(mesh=MeshConfig(data=2, fsdp=4, zero=2, axis_types=AxisTypes.AUTO)),
    "tensor": dict(mesh=MeshConfig(fsdp=4, tensor=2), grad_accumulation=2),
    "stages": dict(mesh=MeshConfig(stage=2, fsdp=2, data=2), grad_accumulation=2),
    "adafactor": dict(mesh=MeshConfig(fsdp=8), optim=adafactor.Config(min_dim_to_factor=4)),
    "adamw8bit": dict(mesh=MeshConfig(fsdp=4, tensor=2), optim=adamw8bit.Config(block=16)),
}


def plan_of(layout, **changes):
    num_devices = 1 if layout == "one device" else 8
    return make_plan(small_config(**LAYOUTS[layout], **changes), num_devices)


def arrays(state):
    return {name: np.asarray(leaf).tobytes() for name, leaf in to_flat(state).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_above_the_limit_the_step_alone_changes_and_below_it_nothing_is_different(rows, layout):
    plan = plan_of(layout)
    step, loader = jit_update(update, plan), device_batches(plan, rows, start=0)
    with shd.use(plan.mesh, plan.rules):
        batch = next(loader)
        state, metrics = step(init_state(plan), batch)
        assert int(metrics["skipped"]) == 0
        before, rate = arrays(state), float(metrics["learning_rate"])
        state, metrics = step(state, batch, loss_limit=np.float32(0))
        after = arrays(state)
        assert [name for name in before if before[name] != after[name]] == ["step"]
        assert int(metrics["skipped"]) == 1 and int(state.step) == 2
        # The schedule goes by the updates that were made.
        state, metrics = step(state, batch, loss_limit=np.float32(np.inf))
        assert int(metrics["skipped"]) == 0 and float(metrics["learning_rate"]) != rate
        once, _ = step(init_state(plan), batch)
        twice, _ = step(once, batch)
    loader.close()
    expected = arrays(twice)
    assert [name for name, value in arrays(state).items() if value != expected[name]] == ["step"]


def memory_of(plan):
    memory = compile_only(update, plan).memory_analysis()
    assert memory is not None
    return memory


@pytest.mark.parametrize("layout", ["fsdp", "zero 1", "auto", "tensor"])
def test_the_choice_needs_no_copy_of_the_state(layout, monkeypatch):
    plan = plan_of(layout, bad_steps=BadStepsConfig(spike=3.0))
    chosen = memory_of(plan)
    monkeypatch.setattr(step_update, "_chosen", lambda is_good, new, *, old: new)
    jax.clear_caches()
    always = memory_of(plan)
    assert chosen.alias_size_in_bytes == always.alias_size_in_bytes
    more = chosen.temp_size_in_bytes - always.temp_size_in_bytes
    # The parameters alone are a third of the state. What a small fusion's buffers differ by is not
    # nothing in a model of 100 kB.
    assert more < 0.3 * chosen.alias_size_in_bytes
