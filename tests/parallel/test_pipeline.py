"""Layers on the stages of a pipeline train as on one device, by every schedule."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import sharding as shd
from jaxscale.command_line import read_config
from jaxscale.config import MeshConfig, PipelineConfig, PipelineSchedule
from jaxscale.models import gemma
from jaxscale.parallel import layer_store
from jaxscale.parallel.choice import Pipeline
from jaxscale.step.plan import plan_of_run
from jaxscale.step.relayout import Relayout
from jaxscale.step.stages import without_stages
from jaxscale.step.state import init_state, to_flat
from jaxscale.step.update import held_out_loss
from tests.step import conftest as step
from tests.step.alike import assert_trains_like

rows = step.rows

GEMMA = gemma.Config(
    vocab_size=step.VOCAB_SIZE,
    model_dim=64,
    num_heads=8,
    num_kv_heads=2,
    mlp_dim=96,
    head_size=8,
    num_layers=5,
    global_every=2,
    window=5,
    score_cap=5.0,
)
SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1")
# Name -> mesh, schedule and batch settings: what runs with every change.
LAYOUTS: dict[str, dict[str, Any]] = {
    "gpipe 2, fsdp tp sp": dict(
        stage=2, fsdp=2, tensor=2, grad_accumulation=4, stages_take_turns="gpipe"
    ),
    "one_f_one_b 2, hsdp": dict(
        stage=2, data=2, fsdp=2, grad_accumulation=2, stages_take_turns="one_f_one_b"
    ),
    "one_f_one_b 4, short of layers": dict(
        stage=4, fsdp=2, num_layers=6, grad_accumulation=4, stages_take_turns="one_f_one_b"
    ),
    "interleaved 2, odd": dict(
        stage=2,
        fsdp=4,
        num_layers=4,
        batch_size=20,
        grad_accumulation=5,
        stages_take_turns="interleaved",
    ),
    "interleaved 2, context, unrolled": dict(
        stage=2,
        fsdp=2,
        context=2,
        num_layers=4,
        scan_unroll=4,
        grad_accumulation=4,
        remat="attention_mlp",
        stages_take_turns="interleaved",
    ),
    "zb_h1 2, tp4 over 2 key heads": dict(
        stage=2, fsdp=1, tensor=4, grad_accumulation=2, stages_take_turns="zb_h1"
    ),
    "zb_h1 4, lean": dict(
        stage=4,
        tensor=2,
        fsdp=1,
        num_layers=4,
        grad_accumulation=8,
        lean=True,
        stages_take_turns="zb_h1",
    ),
    "one_f_one_b 2, lean, zero2": dict(
        stage=2, fsdp=4, zero=2, grad_accumulation=4, lean=True, stages_take_turns="one_f_one_b"
    ),
    "auto 2, zero1": dict(stage=2, fsdp=4, zero=1, grad_accumulation=2),
}
MESHES: dict[str, dict[str, Any]] = {
    "pp2 fsdp4": dict(stage=2, fsdp=4),
    "pp2 fsdp2 tp2": dict(stage=2, fsdp=2, tensor=2),
    "pp2 dp2 fsdp2": dict(stage=2, data=2, fsdp=2),
    "pp2 cp2 fsdp2": dict(stage=2, context=2, fsdp=2),
    "pp2 dp2 tp2": dict(stage=2, data=2, fsdp=1, tensor=2),
    "pp2 cp2 tp2": dict(stage=2, fsdp=1, context=2, tensor=2),
    "pp2 dp2 cp2": dict(stage=2, data=2, fsdp=1, context=2),
    "pp4 fsdp2": dict(stage=4, fsdp=2),
    "pp4 tp2": dict(stage=4, fsdp=1, tensor=2),
    "pp4 cp2": dict(stage=4, fsdp=1, context=2),
    "pp4 dp2": dict(stage=4, data=2, fsdp=1),
    "pp8": dict(stage=8, fsdp=1),
}


def products() -> dict[str, dict[str, Any]]:
    """Every schedule on every mesh, by turns with P, 2 P, 4 P and an odd number of microbatches.

    On every second mesh also lean, on the others with chunks that the layers do not fill.
    """
    found = {}
    for number, (mesh, settings) in enumerate(MESHES.items()):
        stages, is_odd = settings["stage"], number % 2
        for schedule in SCHEDULES:
            layers = 2 * stages + (is_odd if schedule == "interleaved" else -is_odd)
            microbatches = (stages, 2 * stages, 4 * stages, 9)[number % 4]
            rows = 36 if microbatches == 9 else 64
            for lean in (False,) if is_odd else (False, True):
                found[f"{schedule}{' lean' if lean else ''} {mesh}"] = dict(
                    settings,
                    stages_take_turns=schedule,
                    lean=lean,
                    num_layers=layers,
                    grad_accumulation=microbatches,
                    batch_size=rows,
                    # 16 layers with 1e-3 make a difference 15 times as large in each step: the norm
                    # of the fifth gradient is 2.9e-5 off where all losses agree to 1e-7.
                    peak=3e-4 if stages == 8 else 1e-3,
                )
    return found


PRODUCTS = products()


@pytest.fixture(scope="module", autouse=True)
def anything_in_room():
    """As on GPUs, where a slot is not filled before it is written."""

    def room(like, *dims):
        zeros = layer_store.zeros(like, *dims)
        return zeros + jnp.nan if jnp.issubdtype(like.dtype, jnp.floating) else zeros

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_store, "room", room)
        yield


@pytest.fixture(scope="module")
def run(rows):
    """`run(num_devices, model=None, **config changes) -> Run`, of five steps."""

    @functools.cache
    def run(num_devices: int = 8, *, is_gemma: bool = False, **changes) -> step.Run:
        config = step.small_config(**changes)
        if is_gemma:
            config.model = GEMMA
        config.data.max_documents_per_row = 16
        return step.train(config, rows, num_devices=num_devices)

    return run


def in_order(here: dict, like: dict) -> dict:
    """Stacks of layers as one device holds them."""
    return {
        name: value
        if value.shape == like[name].shape
        else value.reshape(-1, *like[name].shape[1:])[: like[name].shape[0]]
        for name, value in here.items()
    }


def assert_is_like_one_device(run, settings):
    of_one = ("num_layers", "batch_size", "peak", "is_gemma")
    same = {key: value for key, value in settings.items() if key in of_one}
    alone, here = run(1, **same), run(**settings)
    for name, value in in_order(here.initial, alone.initial).items():
        np.testing.assert_array_equal(value, alone.initial[name], err_msg=name)
    for mine, theirs in zip(here.first_batch, alone.first_batch, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    here.first_moments.update(in_order(here.first_moments, alone.first_moments))
    assert_trains_like(here, alone)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pipeline_starts_the_same_and_trains_the_same_as_one_device(run, layout):
    assert_is_like_one_device(run, LAYOUTS[layout])


def test_layers_of_several_kinds_and_a_tied_table_do_too(run):
    """Chunks hold whole turns of a local and a global layer; the last one lacks a layer."""
    settings = dict(stage=2, fsdp=2, tensor=2, grad_accumulation=4)
    assert_is_like_one_device(run, settings | dict(is_gemma=True, stages_take_turns="zb_h1"))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", PRODUCTS)
def test_every_schedule_trains_the_same_on_every_mesh(run, layout):
    assert_is_like_one_device(run, PRODUCTS[layout])


def test_with_bfloat16_the_first_loss_is_that_of_the_same_mesh_without_stages(run):
    """To six digits; that mesh's own differs from one device's by 1.03e-6 on jax 0.11.2."""
    settings: dict[str, Any] = dict(
        fsdp=2, tensor=2, num_layers=4, grad_accumulation=4, dtype="bfloat16"
    )
    without = run(4, **settings).losses[0]
    here = run(8, stage=2, **settings, stages_take_turns="interleaved").losses[0]
    np.testing.assert_allclose(here, without, rtol=1e-6)


# What is around the update.


@pytest.fixture(scope="module")
def plans():
    """The same run with two stages of two chunks, a layer short, and with none."""
    settings: dict[str, Any] = dict(num_layers=5, grad_accumulation=2)
    stages: dict[str, Any] = dict(stage=2, fsdp=2, stages_take_turns="interleaved")
    with_stages = step.small_config(**stages, **settings)
    without = step.small_config(fsdp=4, **settings)
    return step.make_plan(with_stages, 4), step.make_plan(without, 4)


def test_a_checkpoint_of_stages_continues_without_and_the_other_way_round(plans):
    states = [to_flat(init_state(plan)) for plan in plans]
    for ours, theirs in ((0, 1), (1, 0)):
        saved, wanted = states[ours], to_flat(plans[theirs].state)
        relayout = Relayout(plans[ours].lead, plans[theirs].lead, num_layers=5)
        asked = relayout.as_saved(wanted, saved)
        assert {name: leaf.shape for name, leaf in asked.items()} == {
            name: leaf.shape for name, leaf in saved.items()
        }
        read = {name: jax.device_put(saved[name], leaf.sharding) for name, leaf in asked.items()}
        for name, value in relayout.as_wanted(read, wanted).items():
            assert value.sharding == wanted[name].sharding, name
            np.testing.assert_array_equal(value, states[theirs][name], err_msg=name)


def test_held_out_loss_and_parameters_without_stages_are_those_of_no_stages(plans, rows):
    losses = []
    for plan in plans:
        state = init_state(plan)
        with shd.use(plan.mesh, plan.rules):
            batch = next(step.device_batches(plan, rows, start=0))
            loss, tokens = jax.jit(functools.partial(held_out_loss, plan=plan))(state, batch)
        losses.append(float(loss) / int(tokens))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    state, there = without_stages(init_state(plans[0]), plans[0])
    assert there.mesh.shape["stage"] == 1 and there.mesh.shape["fsdp"] == 4
    wanted = to_flat(init_state(plans[1]))
    for name, value in to_flat(state).items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)


# Refusals.

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "grad_accumulation": (
        dict(stage=4, fsdp=2, grad_accumulation=2),
        "config.grad_accumulation=2: .*set it to 4 or more",
    ),
    "axis types": (
        dict(stage=2, fsdp=4, grad_accumulation=2, axis_types="auto"),
        "config.mesh.axis_types='auto'.*need 'explicit'",
    ),
    "remat": (
        dict(stage=2, fsdp=4, grad_accumulation=2, remat="none"),
        "config.remat='none'.*set it to 'gemms'",
    ),
    "layers": (
        dict(stage=4, fsdp=2, grad_accumulation=4),
        "config.mesh.stage=4 is more than the 2 layers.*set it to 2 or less",
    ),
    "chunks": (
        dict(stage=2, fsdp=4, grad_accumulation=2, stages_take_turns="interleaved", chunks=3),
        "config.pipeline.chunks=3 of 2 stages.*set it to 1 or less, or config.pipeline.schedule=",
    ),
    "vocabulary": (
        dict(stage=5, fsdp=1, num_layers=5, grad_accumulation=8),
        "config.mesh.stage=5 cannot split the padded vocabulary, 384",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_the_key_and_the_fix(case):
    settings, message = REFUSED[case]
    num_devices = 5 if settings["stage"] == 5 else 8
    with pytest.raises(ValueError, match=message):
        step.make_plan(step.small_config(**settings), num_devices)


def test_auto_weighs_what_chunks_cost_where_layers_are_unrolled():
    config = read_config([f"--config={Path(__file__).parents[2] / 'configs/llama3_8b.py'}"])
    config.mesh = MeshConfig(stage=2, fsdp=1)

    def chunks(num_microbatches: int, *, rows: int = 1, unroll: int = 32) -> int:
        config.batch_size, config.grad_accumulation = rows * num_microbatches, num_microbatches
        config.scan_unroll = unroll
        pipeline = plan_of_run(config, devices=jax.devices()[:2]).pipeline
        assert pipeline is not None
        said = "several chunks count as 2.4% slower" in pipeline.reason
        assert said == (unroll == 32 and rows == 1), pipeline.reason
        return pipeline.placement.num_chunks

    # As measured: 8 microbatches are faster in 4 chunks, and 32 in one.
    assert (chunks(8), chunks(32)) == (4, 1)
    assert chunks(32, unroll=1) == 4 and chunks(8, rows=4) == 4


def test_auto_takes_the_smallest_bubble_and_says_what_it_weighed():
    config = step.small_config(stage=2, fsdp=4, num_layers=8, grad_accumulation=8, batch_size=32)
    chosen = pipeline_of(config)
    assert (chosen.schedule, chosen.placement.num_chunks) == (PipelineSchedule.INTERLEAVED, 4)
    assert chosen.reason.startswith("interleaved x4: bubble 3.0%, 2.25 microbatches in flight")
    assert "one_f_one_b: bubble 11.1%" in chosen.reason
    # Chunks that layers do not fill are a bubble too.
    config.model.num_layers = 5
    assert pipeline_of(config).placement.num_chunks == 1
    config.pipeline = PipelineConfig(lean=True)
    assert pipeline_of(config).schedule == PipelineSchedule.ONE_F_ONE_B


def pipeline_of(config) -> Pipeline:
    pipeline = plan_of_run(config).pipeline
    assert pipeline is not None
    return pipeline
