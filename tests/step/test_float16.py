"""float16 with a loss scale: its rule, the same on every layout, and steps that overflow."""

import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import sharding as shd
from jaxscale.compile.fit import jit_update
from jaxscale.config import Attention, Dtype, LossScaleConfig, validate
from jaxscale.ops.attention import choose
from jaxscale.ops.execution import Execution
from jaxscale.step import loss_scale
from jaxscale.step.feed import device_batches
from jaxscale.step.loss_scale import LossScale
from jaxscale.step.replay import Replay
from jaxscale.step.state import init_state, to_flat
from jaxscale.step.update import update
from tests.step.conftest import make_plan, small_config, train

# float16 rounds at 4.9e-4. Within five steps losses differ by up to 3.5e-6 of themselves on these
# meshes, and by 8e-6 from float32's; after the first, Adam's moments by up to 7.3e-4 of their norm,
# and by 9.5e-4 from float32's.
LOSS_RTOL = 2e-5
GRADIENT_RTOL = 2e-3

# Each remat policy is in one of them.
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": dict(fsdp=8, zero=1),
    "unrolled": dict(fsdp=8, scan_unroll=2, remat="gemms_lean"),
    "auto": dict(data=2, fsdp=4, zero=2, axis_types="auto", remat="none"),
    "hsdp tp sp": dict(data=2, fsdp=2, tensor=2, grad_accumulation=2, remat="attention"),
    "context": dict(data=2, fsdp=2, context=2, reduce_dtype="float32", remat="attention_mlp"),
    "stages": dict(stage=2, fsdp=4, grad_accumulation=2, remat="full"),
    "async": dict(fsdp=2, data=2, tensor=2, async_tensor="halves"),
    "in a ring": dict(fsdp=4, tensor=2, async_tensor="ring"),
}


def distances(here, there) -> dict[str, float]:
    """Of each gradient leaf, as a share of its norm: a tenth of it is Adam's first moment."""
    norm = np.linalg.norm
    pairs = {
        name: (here.first_moments[name], there.first_moments[name]) for name in there.first_moments
    }
    return {name: float(norm(a - b) / norm(b)) for name, (a, b) in pairs.items()}


# The rule.


def megatrons(overflows: list[bool], *, settings: LossScaleConfig) -> list[float]:
    """The scale behind each step, as Megatron-LM's DynamicGradScaler has it, in plain Python."""
    scale, num_good, credits, scales = settings.start, 0, settings.hysteresis, []
    for overflow in overflows:
        if overflow:
            num_good, credits = 0, credits - 1
            if credits <= 0:
                scale = max(scale / 2, settings.least)
        else:
            num_good += 1
            if num_good == settings.growth_every:
                num_good, credits = 0, settings.hysteresis
                scale = min(scale * 2, settings.most)
        scales.append(scale)
    return scales


def ours(overflows: list[bool], *, settings: LossScaleConfig) -> list[float]:
    config = small_config(dtype=Dtype.FLOAT16, loss_scale=settings)

    def step(state, overflow):
        state = loss_scale.after(state, has_overflow=overflow, settings=settings)
        return state, state.scale

    begin = loss_scale.init(config)
    assert isinstance(begin, LossScale)
    return jax.lax.scan(step, begin, jnp.array(overflows))[1].tolist()


@pytest.mark.parametrize(
    "settings",
    [
        dict(growth_every=3),
        dict(growth_every=4, hysteresis=1),
        dict(growth_every=2, hysteresis=3, start=8.0, least=2.0, most=32.0),
        dict(growth_every=1, start=2.0**20),
    ],
)
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_scale_goes_as_megatrons(settings, share):
    draw, settings = random.Random(0), LossScaleConfig(**settings)
    overflows = [draw.random() < share for _ in range(200)]
    scales = ours(overflows, settings=settings)
    assert scales == megatrons(overflows, settings=settings)
    assert len(set(scales)) > 2 and settings.least <= min(scales) <= max(scales) <= settings.most


def test_one_overflow_is_tolerated_and_those_behind_it_are_not_until_the_scale_has_grown():
    settings = LossScaleConfig(start=16.0, growth_every=2, least=2.0, most=32.0)
    good, bad = False, True
    assert ours([bad, good, bad, bad], settings=settings) == [16, 16, 8, 4]
    assert ours([bad] * 5, settings=settings) == [16, 8, 4, 2, 2]
    assert ours([good] * 5, settings=settings) == [16, 32, 32, 32, 32]
    assert ours([bad, good, good, bad, bad], settings=settings) == [16, 16, 32, 32, 16]


# Training.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_like_one_device(run, layout):
    alone, here = run(1, dtype="float16"), run(8, dtype="float16", **LAYOUTS[layout])
    np.testing.assert_allclose(here.losses, alone.losses, rtol=LOSS_RTOL)
    np.testing.assert_allclose(here.grad_norms, alone.grad_norms, rtol=GRADIENT_RTOL)
    for name, error in distances(here, alone).items():
        assert error < GRADIENT_RTOL, name
    assert here.final["loss_scale.scale"] == 2**16 and here.final["loss_scale.num_good"] == 5


def test_gradients_are_those_of_float32_and_nearer_to_them_than_bfloat16s(run):
    exact, half, brain = (run(1, dtype=dtype) for dtype in ("float32", "float16", "bfloat16"))
    assert not any("loss_scale" in name for name in (*exact.final, *brain.final))
    errors, others = distances(half, exact), distances(brain, exact)
    for name, error in errors.items():
        assert error < min(GRADIENT_RTOL, others[name]), name
    np.testing.assert_allclose(half.losses, exact.losses, rtol=LOSS_RTOL)


def test_a_scale_costs_no_precision_where_there_is_room(run, rows):
    """Powers of two: of two that fit, gradients are the same but for what is below both."""
    half = small_config(dtype=Dtype.FLOAT16, loss_scale=LossScaleConfig(start=2.0**15))
    errors = distances(train(half, rows, num_devices=1), run(1, dtype="float16"))
    assert max(errors.values()) < 1e-5


# Overflows.


def arrays(state):
    return {name: np.asarray(leaf).tobytes() for name, leaf in to_flat(state).items()}


def with_scale(state, scale: float):
    old = state.loss_scale
    return state._replace(
        loss_scale=old._replace(scale=jax.device_put(np.float32(scale), old.scale.sharding))
    )


@pytest.mark.parametrize("layout", ["one device", "hsdp tp sp", "stages"])
def test_a_step_that_overflows_leaves_all_but_the_scale_and_the_next_goes_on(rows, layout):
    plan = make_plan(
        small_config(dtype="float16", **LAYOUTS.get(layout, {})),
        1 if layout == "one device" else 8,
    )
    step, loader = jit_update(update, plan), device_batches(plan, rows, start=0)
    with shd.use(plan.mesh, plan.rules):
        batch, start = next(loader), init_state(plan)
        before, huge = arrays(start), 2.0**40
        state, metrics = step(with_scale(start, huge), batch)
        assert int(metrics["skipped"]) == int(metrics["overflow"]) == 1
        assert float(metrics["loss_scale"]) == huge and not np.isfinite(metrics["grad_norm"])
        loss = float(metrics["loss"])
        changed = [name for name, value in arrays(state).items() if value != before[name]]
        assert changed == ["step", "loss_scale.scale", "loss_scale.credits"]
        assert float(state.loss_scale.scale) == huge  # the first is tolerated
        state, _ = step(state, batch)
        assert float(state.loss_scale.scale) == huge / 2
        state, metrics = step(with_scale(state, 2.0**16), batch)
        assert int(metrics["skipped"]) == int(metrics["overflow"]) == 0
        assert float(metrics["loss"]) == loss  # the scale does not touch it
        expected, _ = step(init_state(plan), batch)
    loader.close()
    expected, now = arrays(expected), arrays(state)
    differ = [name for name, value in now.items() if value != expected[name]]
    assert differ == ["step", "loss_scale.credits"]


def test_a_loss_that_is_not_finite_is_no_overflow_and_lowers_nothing(rows):
    plan = make_plan(small_config(dtype="float16"), 1)
    step, loader = jit_update(update, plan), device_batches(plan, rows, start=0)
    with shd.use(plan.mesh, plan.rules):
        state, batch = init_state(plan), next(loader)
        before = arrays(state.loss_scale)
        nan = jax.tree.map(lambda leaf: leaf * jnp.float32(np.nan), state.params)
        state, metrics = step(state._replace(params=nan), batch)
    loader.close()
    assert (int(metrics["skipped"]), int(metrics["overflow"])) == (1, 0)
    assert arrays(state.loss_scale) == before


def test_a_replay_gives_the_same_bits(rows):
    plan = make_plan(small_config(dtype="float16", **LAYOUTS["unrolled"]))
    loader = device_batches(plan, rows, start=0)
    with shd.use(plan.mesh, plan.rules):
        assert Replay(plan).unlike(init_state(plan), next(loader)) is None
    loader.close()


# What cannot be.


@pytest.mark.parametrize("platform, wanted", [("gpu", Attention.CUDNN), ("cpu", Attention.XLA)])
def test_a_kernel_is_chosen_that_has_float16(platform, wanted):
    q, k = (jax.ShapeDtypeStruct((1, 256, heads, 64), jnp.float16) for heads in (8, 2))
    kernel = choose(q, k, execution=Execution(dtype=Dtype.FLOAT16, platform=platform))
    assert kernel.__name__.endswith(f"{wanted.value}_attention")
    flash = Execution(dtype=Dtype.FLOAT16, platform=platform, attention=Attention.FLASH)
    with pytest.raises(ValueError, match=r"config.attention='flash' cannot run: .*'auto'"):
        choose(q, k, execution=flash)


HALF: dict[str, Any] = dict(dtype=Dtype.FLOAT16)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "8 bits": (
        dict(HALF, recipe="fp8_rowwise"),
        "config.precision.recipe='fp8_rowwise': beside products in 8 bits config.dtype='float16' "
        "is not there; set config.dtype='bfloat16', or config.precision.recipe='dtype'",
    ),
    "sums in less": (
        dict(dtype=Dtype.BFLOAT16, reduce_dtype=Dtype.FLOAT16),
        "config.mesh.reduce_dtype='float16': gradients of config.dtype='bfloat16' are not summed "
        "in less; set it to 'bfloat16', or config.dtype='float16'",
    ),
    "another dtype": (
        dict(dtype=Dtype.BFLOAT16, loss_scale=LossScaleConfig(hysteresis=1)),
        "config.loss_scale.hysteresis=1: config.dtype='bfloat16' has the range of float32, and its "
        "loss is not scaled; leave it out, or set config.dtype='float16'",
    ),
    "no power of two": (
        dict(HALF, loss_scale=LossScaleConfig(start=1000.0)),
        "config.loss_scale.start=1000.0: it is to be a power of two, which rounds nothing; set it "
        "to 512.0",
    ),
    "start": (
        dict(HALF, loss_scale=LossScaleConfig(most=1024.0)),
        "config.loss_scale.start=65536.0: set it to config.loss_scale.least=1.0 or more, and to "
        "config.loss_scale.most=1024.0 or less",
    ),
    "too large": (
        dict(HALF, loss_scale=LossScaleConfig(most=2.0**25)),
        "config.loss_scale.most=33554432.0: set it to 1 or more and to 16777216.0 or less",
    ),
    "never": (
        dict(HALF, loss_scale=LossScaleConfig(growth_every=0)),
        "config.loss_scale.growth_every=0: set it to 1 or more",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused(case):
    settings, message = BAD[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan(small_config(**settings))


def test_what_it_is_summed_in_may_be_said():
    for reduce_dtype in Dtype:
        validate(small_config(**HALF, reduce_dtype=reduce_dtype))
