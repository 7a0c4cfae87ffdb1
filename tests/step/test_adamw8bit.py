"""AdamW with moments of 8 bits: the same bits on every mesh, and what is left of float32's."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale import sharding as shd
from jaxscale.checkpoint.checkpointer import Checkpointer
from jaxscale.compile import ahead
from jaxscale.compile.fit import jit_update
from jaxscale.config import AxisTypes, to_json
from jaxscale.kernels import adamw8bit as kernel
from jaxscale.optim import adamw, adamw8bit
from jaxscale.step.feed import device_batches
from jaxscale.step.state import from_flat, init_state, to_flat
from jaxscale.step.update import update
from jaxscale.train.workdir import check_same_run
from tests.step.conftest import arrays, make_plan, small_config

# A device's part of 64 on fsdp=8.
BLOCK = 8
# Without clipping, whose norm is summed in another order on another mesh.
EXACT = adamw8bit.Config(block=BLOCK, clip_norm=0.0)
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": dict(fsdp=8),
    "fsdp tensor": dict(fsdp=2, tensor=4),
    "hsdp": dict(data=2, fsdp=4),
    "zero 1": dict(fsdp=8, zero=1),
    "auto zero 2": dict(data=2, fsdp=4, zero=2, axis_types=AxisTypes.AUTO),
    "stages": dict(stage=2, fsdp=2, data=2, grad_accumulation=2),
}


@pytest.fixture(autouse=True)
def optax_promotion():
    """As in the update: optax raises floats to an int32 count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def gradients_of(plan, number):
    """The same on every mesh, of sizes that differ by 1e6, some of them 0."""
    alone = make_plan(small_config(fsdp=1), 1).state.params
    rng = np.random.default_rng(number)

    def values(leaf):
        sizes = 10.0 ** rng.uniform(-6, 0, leaf.shape) * rng.integers(0, 3, leaf.shape)
        return jnp.asarray(sizes * rng.normal(size=leaf.shape), jnp.float32)

    gradients = jax.tree.map(values, alone)
    if plan.pipeline:
        gradients = plan.pipeline.placement.hold(gradients)
    return jax.device_put(gradients, plan.update_shardings)


def after_updates(plan):
    """(updates, state of the optimiser) after four, of which the third is skipped."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, plan.state)
    with shd.use(plan.mesh, plan.rules):
        params = jax.device_put(init_state(plan).params, plan.update_shardings)
        state = jax.jit(plan.optimizer.init, out_shardings=shardings.opt_state)(params)
        step = jax.jit(plan.optimizer.update, out_shardings=(None, shardings.opt_state))
        for number in range(4):
            gradients = gradients_of(plan, number)
            updates, state = step(gradients, state, params, is_good=jnp.asarray(number != 2))
    return updates, state


@pytest.fixture(scope="module")
def alone():
    with jax.numpy_dtype_promotion("standard"):
        return after_updates(make_plan(small_config(fsdp=1, optim=EXACT), 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_gradients_make_the_same_bits_on_every_mesh(alone, layout):
    plan = make_plan(small_config(**LAYOUTS[layout], optim=EXACT))
    (updates, state), (expected_updates, expected) = after_updates(plan), alone
    expected, expected_updates = arrays(expected), arrays(expected_updates)
    for name, value in arrays(state).items():
        there = expected[name]  # of stages, the layers in their own order
        np.testing.assert_array_equal(value.reshape(there.shape), there, err_msg=name)
    for name, value in arrays(updates).items():
        there = expected_updates[name]
        # XLA rounds the fused step, with its decay, differently in the last bit.
        value = value.reshape(there.shape)
        np.testing.assert_allclose(value, there, rtol=2e-6, atol=1e-9, err_msg=name)
    coded = {name: leaf for name, leaf in to_flat(plan.state).items() if ".nu." in name}
    for name, leaf in coded.items():
        is_coded = "norm" not in name
        assert leaf.dtype == (jnp.uint8 if is_coded else jnp.float32), name
        scale = to_flat(plan.state)[name.replace(".nu.", ".nu_scale.")]
        assert scale.size == (leaf.size // BLOCK if is_coded else 1), name


@pytest.fixture
def program_in_jnp(monkeypatch):
    """`kernel.update`, of what a device gives it, with the kernel's own arithmetic by XLA.

    A list of the shapes that it was given.
    """
    shapes = []

    def updated(p, gradient, *, old, numbers, settings, place, behind, compute_capability):
        assert compute_capability == "9.0"
        shapes.append(p.shape)
        axis = kernel.axis_of_blocks(old)
        assert axis is not None
        last = np.arange(np.prod(p.shape[axis + 1 :])).reshape(p.shape[axis + 1 :])
        model = behind * np.arange(p.shape[axis]).reshape((-1,) + (1,) * last.ndim)
        local = jnp.asarray(model + last, jnp.uint32)

        def places(x, **_):
            return jnp.broadcast_to(local, p.shape).reshape(x.shape) + place

        with monkeypatch.context() as patched:
            patched.setattr(kernel, "_place", places)
            return kernel.reference(p, gradient, old=old, numbers=numbers, settings=settings)

    monkeypatch.setattr(kernel, "device_supported", lambda *_: None)
    monkeypatch.setattr(kernel, "update", updated)
    return shapes


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_program_is_given_each_device_s_part_and_moves_parameters_as_the_updates_do(
    layout, clip_norm, program_in_jnp
):
    optim = adamw8bit.Config(block=BLOCK, clip_norm=clip_norm)
    plan = make_plan(small_config(**LAYOUTS[layout], optim=optim))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, plan.state)

    def by_program(gradients, state, params, is_good):
        return optim.moved(
            gradients,
            state,
            params=params,
            schedule=plan.schedule,
            is_good=is_good,
            shardings=plan.update_shardings,
            platform="gpu",
            compute_capability="9.0",
        )

    def by_updates(gradients, state, params, is_good):
        updates, state = plan.optimizer.update(gradients, state, params, is_good=is_good)
        moved = optax.apply_updates(params, updates)
        return jax.tree.map(lambda new, old: jnp.where(is_good, new, old), moved, params), state

    with shd.use(plan.mesh, plan.rules):
        params = jax.device_put(init_state(plan).params, plan.update_shardings)
        state = jax.jit(plan.optimizer.init, out_shardings=shardings.opt_state)(params)
        there = plan.update_shardings, shardings.opt_state
        both = [jax.jit(how, out_shardings=there) for how in (by_program, by_updates)]
        found, expected = (params, state), (params, state)
        for number in range(3):
            gradients = gradients_of(plan, number)
            is_good = jnp.asarray(number != 1)
            found, expected = (
                how(gradients, state, params, is_good)
                for how, (params, state) in zip(both, (found, expected), strict=True)
            )
    assert len(program_in_jnp) == sum(
        leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(plan.state.opt_state)
    )
    by_name = arrays(found)
    assert by_name
    for name, value in arrays(expected).items():
        if value.dtype == np.float32 and "scale" not in name:
            # XLA rounds the fused step, with its decay, differently in the last bit.
            np.testing.assert_allclose(by_name[name], value, rtol=1e-6, atol=1e-9, err_msg=name)
        else:
            np.testing.assert_array_equal(by_name[name], value, err_msg=name)


@pytest.mark.parametrize("layout", ["fsdp tensor"])
def test_a_run_on_any_mesh_goes_as_on_one_device(run, layout):
    optim = FewSettings(block=BLOCK)
    alone, here = run(1, optim=optim), run(**LAYOUTS[layout], optim=optim)
    # Sums in another order change a code here and there (1e-6 of float32's loss).
    np.testing.assert_allclose(here.losses, alone.losses, rtol=2e-5)


@dataclasses.dataclass(slots=True, kw_only=True, unsafe_hash=True)
class FewSettings(adamw8bit.Config):
    """For `run`, which keeps what it did by its arguments."""


def losses_of(rows, *, optim, steps):
    plan = make_plan(small_config(optim=optim, steps=steps, fsdp=1), 1)
    step, loader = jit_update(update, plan), device_batches(plan, rows, start=0)
    losses = []
    with shd.use(plan.mesh, plan.rules):
        state = init_state(plan)
        for _ in range(steps):
            state, metrics = step(state, next(loader))
            losses.append(float(metrics["loss"]))
    loader.close()
    return np.array(losses)


def test_the_loss_falls_as_with_float32_moments(rows):
    whole = losses_of(rows, optim=adamw.Config(), steps=50)
    coded = losses_of(rows, optim=adamw8bit.Config(), steps=50)
    assert whole[-1] < 0.9 * whole[0]
    np.testing.assert_allclose(coded, whole, rtol=LOSS_RTOL)


LOSS_RTOL = 2e-3


# One parameter.


def updates_of(gradients, **settings):
    """(updates, State) after gradients [steps, D, F]."""
    optimizer = adamw8bit.Config(clip_norm=0.0, weight_decay=0.0, **settings).build(
        optax.constant_schedule(1.0)
    )
    params = {"w": nnx.Param(jnp.zeros(gradients.shape[1:]), axes=("embed", "mlp"))}

    def step(state, gradient):
        gradients = jax.tree.map(lambda _: gradient, params)
        updates, state = optimizer.update(gradients, state, params)
        return state, jax.tree.leaves(updates)[0]

    scan = jax.jit(lambda gradients: jax.lax.scan(step, optimizer.init(params), gradients))
    state, updates = scan(gradients)
    (found,) = (part for part in state if isinstance(part, adamw8bit.State))
    return updates, found


def decoded(state):
    """(m, the root of v), [D, F]."""
    mu, mu_scale, nu, nu_scale = (jax.tree.leaves(part)[0] for part in state[1:])
    block = mu.shape[0] // mu_scale.shape[0]
    scales = (np.repeat(np.asarray(scale), block, axis=0) for scale in (mu_scale, nu_scale))
    m, root = (np.asarray(codes, np.float32) for codes in (mu, nu))
    mu_scale, nu_scale = scales
    return m * np.abs(m) * mu_scale, root**2 * nu_scale


def test_a_moment_is_one_of_the_two_codes_beside_it_and_its_block_s_largest_is_exact():
    gradient = np.random.default_rng(0).normal(size=(64, 3)) * 10.0 ** np.arange(-8, 1, 4)
    gradient = gradient.astype(np.float32)
    _, state = updates_of(gradient[None], block=16)
    m, root = decoded(state)
    np.testing.assert_array_equal(np.sign(m) * np.sign(gradient) >= 0, True)
    for found, exact, most in ((m, 0.1 * gradient, 127), (root, 0.05**0.5 * gradient, 255)):
        exact, found = (np.abs(x).reshape(4, 16, 3) for x in (exact, found))
        largest = exact.max(axis=1, keepdims=True)
        codes, found_codes = (most * np.sqrt(x / largest) for x in (exact, found))
        assert np.abs(codes - found_codes).max() < 1.01
        at = exact.argmax(axis=1)[:, None]
        np.testing.assert_allclose(np.take_along_axis(found, at, 1), largest, rtol=1e-6)


def test_a_root_is_never_0_where_v_is_not_and_a_block_of_zeros_stays_so():
    gradient = np.zeros((16, 2), np.float32)
    gradient[:, 0] = 1e-12
    gradient[0, 0] = 1.0
    updates, state = updates_of(np.stack([gradient] * 3), block=16)
    m, root = decoded(state)
    assert (root[:, 0] > 0).all() and (root[:, 1] == 0).all() and (m[:, 1] == 0).all()
    assert np.isfinite(updates).all() and np.abs(updates).max() < 1.1


@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_small_moments_are_on_average_those_of_float32(b2):
    """Of a value in each of 4096 blocks, whose gradients end after 20 of 40 updates.

    Nearest codes would keep its m and v for ever.
    """
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(40, 8, 4096)).astype(np.float32)
    gradients[:, 0] = 1.0  # each block's largest m
    gradients[:, 1] = rng.uniform(1e-3, 4e-3, 4096)
    gradients[20:, 1] = 0.0
    _, state = updates_of(gradients, block=8, b2=b2)
    m, root = (x[1].astype(np.float64) for x in decoded(state))
    exact_m = gradients[0, 1] * (1 - 0.9**20) * 0.9**20
    exact_v = gradients[0, 1] ** 2 * (1 - b2**20) * b2**20
    np.testing.assert_allclose(m.mean(), exact_m.mean(), rtol=0.03)
    np.testing.assert_allclose((root**2).mean(), exact_v.mean(), rtol=0.03)


# What cannot be.


def test_a_block_that_does_not_divide_is_refused_with_one_that_does():
    with pytest.raises(ValueError, match=r"config\.optim\.block=24 .* dimension, 64; set it to 16"):
        make_plan(small_config(fsdp=8, optim=adamw8bit.Config(block=24)))
    message = r"config\.optim\.block=16: a device's part .* whole blocks.*embed.*fsdp=8"
    with pytest.raises(ValueError, match=message):
        make_plan(small_config(fsdp=8, optim=adamw8bit.Config(block=16)))


@pytest.mark.parametrize(("key", "value"), [("block", 1), ("b1", 1.0), ("eps", 0.0)])
def test_values_out_of_range_are_refused_with_key_and_fix(key, value):
    with pytest.raises(ValueError, match=rf"config\.optim\.{key}={value}: set it"):
        adamw8bit.Config(**{key: value}).validate()


@pytest.mark.parametrize(
    ("now", "key"), [(adamw.Config(), "type"), (adamw8bit.Config(block=16), "block")]
)
def test_a_run_does_not_go_on_with_moments_of_another_kind(tmp_path, now, key):
    saved = to_json(small_config(optim=adamw8bit.Config()))
    with pytest.raises(ValueError, match=rf"holds another run(.|\n)*config\.optim\.{key}: saved"):
        check_same_run(tmp_path, small_config(optim=now), saved=saved)


def test_a_checkpoint_goes_on_with_the_same_bits_and_comes_back_on_another_mesh(rows, tmp_path):
    plan = make_plan(small_config(fsdp=8, optim=adamw8bit.Config(block=BLOCK)))
    other = make_plan(small_config(fsdp=2, tensor=4, optim=adamw8bit.Config(block=BLOCK)))
    step, loader = jit_update(update, plan), device_batches(plan, rows, start=0)
    with shd.use(plan.mesh, plan.rules), Checkpointer(tmp_path, keep_last=1) as checkpoints:
        batches = [next(loader) for _ in range(3)]
        state, _ = step(init_state(plan), batches[0])
        state, _ = step(state, batches[1])
        checkpoints.save(2, to_flat(state), metadata={})
        checkpoints.wait()
        saved = arrays(state)
        state, _ = step(state, batches[2])
        restored = checkpoints.restore(to_flat(plan.state))
        assert restored is not None
        again, _ = step(from_flat(plan.state, restored[1]), batches[2])
        elsewhere = checkpoints.restore(to_flat(other.state))
    loader.close()
    assert elsewhere is not None
    for name, value in arrays(state).items():
        np.testing.assert_array_equal(arrays(again)[name], value, err_msg=name)
        np.testing.assert_array_equal(np.asarray(elsewhere[1][name]), saved[name], err_msg=name)


@pytest.mark.skipif(ahead.missing() is not None, reason=str(ahead.missing()))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("shape", "names"),
    [((4096, 14336), "embed mlp"), ((2, 1024, 4, 6, 128), "layers embed kv_heads _ head")],
)
def test_compiled_for_an_h200_an_update_has_two_launches_and_no_copies(shape, names):
    """One finds the scales, one makes the rest, in place; nothing else is of the leaf's size."""
    (device,) = ahead.devices_of("h200", hosts=1, gpus_per_host=1)
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh([device], "x"), jax.P())
    optimizer = adamw8bit.Config(clip_norm=0.0).build(optax.constant_schedule(1e-3))
    params = {"w": nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=tuple(names.split()))}
    state = jax.eval_shape(optimizer.init, params)

    def step(params, state, gradients, is_good):
        updates, state = optimizer.update(gradients, state, params, is_good=is_good)
        moved = optax.apply_updates(params, updates)
        return jax.tree.map(lambda new, old: jnp.where(is_good, new, old), moved, params), state

    given = (params, state, params, jax.ShapeDtypeStruct((), bool))
    given = jax.tree.map(lambda leaf: leaf.update(sharding=sharding), given)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*given).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    num_values = int(np.prod(shape))
    # The float32 scales, and copies of them while they change.
    assert memory.temp_size_in_bytes < 0.4 * num_values
    assert memory.alias_size_in_bytes > 6 * num_values


@pytest.mark.skipif(
    kernel.device_supported("gpu", "9.0") is not None or ahead.missing() is not None,
    reason="needs jax-triton and XLA's CUDA compiler",
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("shape", "names", "mesh"),
    [
        ((2, 512, 4096), "layers embed mlp", dict(fsdp=2)),
        ((2, 512, 4, 6, 128), "layers embed kv_heads _ head", dict(fsdp=2, tensor=2)),
        ((4096, 512), "vocab embed", dict(fsdp=4)),
    ],
)
def test_compiled_for_h100s_the_program_is_one_launch_in_place(shape, names, mesh):
    devices = ahead.devices_of("h100", hosts=1, gpus_per_host=int(np.prod([*mesh.values()])))
    mesh = shd.make_mesh(mesh, devices=devices)
    rules = shd.Rules(
        layers=None, embed="fsdp", mlp="tensor", kv_heads="tensor", head=None, vocab="tensor"
    )
    optim, schedule = adamw8bit.Config(), optax.constant_schedule(1e-3)
    params = {"w": nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=tuple(names.split()))}
    state = jax.eval_shape(optim.build(schedule).init, params)
    split = functools.partial(shd.shardings, mesh=mesh, rules=rules)
    shardings = split(params), split(state, optim.state_axes(state, params=params))
    params, state = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding), (params, state), shardings
    )
    everywhere = jax.sharding.NamedSharding(mesh, jax.P())
    is_good = jax.ShapeDtypeStruct((), bool, sharding=everywhere)

    def step(params, state, gradients, is_good):
        return optim.moved(
            gradients,
            state,
            params=params,
            schedule=schedule,
            is_good=is_good,
            shardings=shardings[0],
            platform="gpu",
            compute_capability="9.0",
        )

    with shd.use(mesh, rules):
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
        compiled = jitted.lower(params, state, params, is_good).compile()
    memory, num_values = compiled.memory_analysis(), int(np.prod(shape)) // len(devices)
    assert memory is not None and memory.temp_size_in_bytes < 50_000
    assert memory.alias_size_in_bytes > 6 * num_values
    hlo = compiled.as_text() or ""
    assert hlo.count('custom_call_target="triton_kernel_call"') == 1
    assert not re.search(r"= \(?(f32|s8|u8)\[\d{2,}[\d,]*\]\S* copy", hlo)
    assert not ahead.count_calls(hlo)["all-gather"]
