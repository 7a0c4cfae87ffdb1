"""A model with what models/__init__.py lists, and nothing else, trains; so do its odd variables."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import sharding as shd
from jaxscale.compile.fit import jit_update
from jaxscale.config import Config, Dtype, MeshConfig
from jaxscale.data.batch import Batch
from jaxscale.ops.embedding import embed
from jaxscale.ops.layers import Stack, stack_layers
from jaxscale.ops.linear import linear
from jaxscale.optim import adafactor, adamw
from jaxscale.schedules import cosine
from jaxscale.step.feed import abstract_batch
from jaxscale.step.plan import plan_of_run
from jaxscale.step.state import init_state, to_flat
from jaxscale.step.update import held_out_loss, update

SIZE, ROWS, SEQ = 128, 8, 8
AUX_WEIGHT = 1e-3
LOSS_RTOL = 2e-6
GRADIENT_RTOL = 2e-5


class Amax(nnx.Variable):
    """Carried, not trained: the largest input that a layer has seen, and a count."""


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.weight = shd.param(rngs, (SIZE, SIZE), axes="embed mlp", scale=0.05)
        self.scale_norm = shd.param(rngs, (SIZE,), axes="norm", fill=1.0)
        self.amax = Amax(jnp.zeros((2,)), axes=("_",))


def block(x_BSD, weights, documents, execution):
    y_BSF = linear(
        "BSD,DF->BSF",
        x_BSD * weights.scale_norm[...].astype(x_BSD.dtype),
        weight=weights.weight,
        name="weight",
        out="batch seq mlp",
        execution=execution,
    )
    x_BSD = x_BSD + shd.constrain(jnp.tanh(y_BSF), "batch seq act_embed")
    seen = jnp.maximum(weights.amax[0], jax.lax.stop_gradient(jnp.abs(x_BSD).max()))
    amax = jnp.stack([seen.astype(jnp.float32), weights.amax[1] + 1])
    aux = AUX_WEIGHT * jnp.mean(jnp.square(y_BSF.astype(jnp.float32)))
    return x_BSD, {"loss": aux, "extra": {"amax": amax}}


class Model(nnx.Module):
    """Two kinds of layers in one model."""

    def __init__(self, rngs):
        self.table = shd.param(rngs, (SIZE, SIZE), axes="vocab embed", scale=0.5)
        keys = jax.random.split(rngs.params(), 5)
        self.first = stack_layers(lambda key: Layer(nnx.Rngs(key)), keys[:2])
        self.later = stack_layers(lambda key: Layer(nnx.Rngs(key)), keys[2:])

    def embed(self, tokens_BS, execution):
        x_BSD = embed(tokens_BS, self.table[...], dtype=jnp.dtype(execution.dtype))
        return shd.constrain(x_BSD, "batch seq act_embed")

    def stacks(self):
        return Stack(self.first, (block,)), Stack(self.later, (block,))

    def output(self, x_BSD):
        return x_BSD, self.table[...].T, None


@dataclasses.dataclass(kw_only=True)
class ModelConfig:
    num_layers: int = 5
    vocab_size: int = SIZE
    max_seq_len: int | None = None

    def validate(self): ...
    def validate_on(self, sizes): ...

    def rules(self, sizes):
        return {}

    def num_params(self):
        return 0

    def num_layer_params(self):
        return 0

    def flops_per_token(self, seq_len, *, causal):
        return 0.0

    def build(self, rngs):
        return Model(rngs)


def config_of(*, optim=None, frozen=(), grad_accumulation=1, **mesh) -> Config:
    return Config(
        model=ModelConfig(),
        optim=optim or adamw.Config(),
        schedule=cosine.Config(peak=1e-3, warmup_steps=1),
        steps=10,
        batch_size=ROWS,
        seq_len=SEQ,
        dtype=Dtype.FLOAT32,
        frozen=frozen,
        grad_accumulation=grad_accumulation,
        mesh=MeshConfig(**mesh),
    )


def run(config, *, num_devices=8, steps=3):
    """(losses, the state by name before and after, the held-out loss before)."""
    plan = plan_of_run(config, devices=jax.devices()[:num_devices])
    state = init_state(plan)
    before = {name: np.asarray(leaf) for name, leaf in to_flat(state).items()}
    rng = np.random.default_rng(0)
    step, losses = jit_update(update, plan), []
    with shd.use(plan.mesh, plan.rules):
        for _ in range(steps):
            tokens = rng.integers(0, SIZE, (1, ROWS, SEQ)).astype(np.int32)
            ones = np.ones_like(tokens)
            shape = plan.batch_shape
            arrays = (tokens, np.roll(tokens, 1, -1), ones, ones)
            like = abstract_batch(plan)
            batch = Batch(
                *(
                    jax.device_put(a.reshape(shape), b.sharding)
                    for a, b in zip(arrays, like, strict=True)
                )
            )
            if not losses:
                held_out = jax.jit(lambda s, b: held_out_loss(s, b, plan=plan))(state, batch)
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    after = {name: np.asarray(leaf) for name, leaf in to_flat(state).items()}
    return losses, before, after, held_out


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": dict(fsdp=8),
    "hsdp auto": dict(data=2, fsdp=4, axis_types="auto"),
    "hsdp zero1": dict(data=2, fsdp=4, zero=1),
    "hsdp zero2 tp": dict(data=2, fsdp=2, tensor=2, zero=2),
}


@pytest.fixture(scope="module")
def alone():
    return run(config_of(fsdp=1), num_devices=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_on_any_mesh_as_on_one_device(alone, layout):
    losses, before, after, _ = run(config_of(**LAYOUTS[layout]))
    np.testing.assert_allclose(losses, alone[0], rtol=LOSS_RTOL)
    for name, value in alone[1].items():
        np.testing.assert_array_equal(before[name], value, err_msg=name)
    for name, value in alone[2].items():
        tolerance = GRADIENT_RTOL * np.abs(value).max()
        # Adam divides by the root of the second moment, which enlarges what rounds differently.
        np.testing.assert_allclose(after[name], value, rtol=1e-3, atol=20 * tolerance, err_msg=name)


def test_other_variables_are_carried_with_new_values_and_neither_trained_nor_decayed(alone):
    _, before, after, _ = alone
    extra = {name: value for name, value in after.items() if name.startswith("extra.")}
    assert set(extra) == {"extra.first.amax", "extra.later.amax"}
    assert not any("amax" in name for name in after if not name.startswith("extra."))
    for value in extra.values():
        assert (value[:, 1] == 3).all() and (value[:, 0] > 0).all()
    assert not before["extra.first.amax"].any()


@pytest.mark.parametrize("kind", ["auto", "ring"])
def test_layers_that_do_not_say_that_they_sum_in_a_ring_are_refused_one(kind):
    with pytest.raises(ValueError, match="async_tensor='ring': .* set it to 'halves' or 'off'"):
        run(config_of(fsdp=4, tensor=2, async_tensor=kind), steps=1)


def test_microbatches_carry_them_one_after_the_other():
    _, _, after, _ = run(config_of(fsdp=4, data=1, grad_accumulation=2), num_devices=4, steps=2)
    assert (after["extra.first.amax"][:, 1] == 4).all()


def test_the_layers_own_loss_is_part_of_the_loss_and_not_of_the_held_out_one(monkeypatch):
    losses = []
    for weight in (0.0, 0.5, 1.0):
        monkeypatch.setattr(f"{__name__}.AUX_WEIGHT", weight)
        loss, _, _, (total, tokens) = run(config_of(fsdp=1), num_devices=1, steps=1)
        losses.append(loss[0])
        np.testing.assert_allclose(float(total) / int(tokens), losses[0], rtol=LOSS_RTOL)
    assert losses[1] - losses[0] > 0.1
    np.testing.assert_allclose(losses[2] - losses[1], losses[1] - losses[0], rtol=1e-3)


def test_frozen_parameters_are_held_without_gradient_or_optimiser_state(alone):
    config = config_of(fsdp=8, frozen=("table", "first.weight"))
    _, before, after, _ = run(config)
    frozen = {name for name in after if name.startswith("frozen.")}
    assert frozen == {"frozen.table", "frozen.first.weight"}
    for name in frozen:
        np.testing.assert_array_equal(after[name], before[name])
    assert not any("table" in name for name in after if name.startswith("opt_state."))
    assert not np.array_equal(after["params.later.weight"], before["params.later.weight"])


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (("tabel",), r"config\.frozen: no parameter has 'tabel' in its path; there are .*table"),
        (("weight", "table", "norm"), r"config\.frozen=.* leaves no parameter to train"),
    ],
)
def test_frozen_names_that_cannot_be_are_refused(frozen, message):
    with pytest.raises(ValueError, match=message):
        plan_of_run(config_of(fsdp=8, frozen=frozen))


# An optimiser in one file whose state has other axes than its parameters.


@pytest.mark.parametrize("layout", ["fsdp", "hsdp zero2 tp"])
def test_adafactor_trains_on_any_mesh_as_on_one_device(layout):
    config = config_of(optim=adafactor.Config(), fsdp=1)
    losses, _, after, _ = run(config, num_devices=1)
    plan = plan_of_run(config_of(optim=adafactor.Config(), **LAYOUTS[layout]))
    specs = {name: leaf.sharding.spec for name, leaf in to_flat(plan.state).items()}
    rows = {name: spec for name, spec in specs.items() if ".v_row.first.weight" in name}
    columns = {name: spec for name, spec in specs.items() if ".v_col.first.weight" in name}
    tensor = "tensor"
    assert list(rows.values()) == [jax.P(None, "fsdp")], rows
    assert list(columns.values()) == [jax.P(None, tensor)], columns
    here, _, _, _ = run(config_of(optim=adafactor.Config(), **LAYOUTS[layout]))
    np.testing.assert_allclose(here, losses, rtol=1e-5)
    assert losses[-1] != losses[0] and any(".v_row." in name for name in after)
