"""Optimisers: what every file in jaxscale/optim offers, and what AdamW does."""

import dataclasses
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale import optim
from jaxscale import sharding as shd
from jaxscale.models import llama
from jaxscale.optim import adamw, adamw8bit

# What optimisers share is no optimiser.
SHARED = ("axes",)
MODULES = [
    importlib.import_module(f"jaxscale.optim.{info.name}")
    for info in pkgutil.iter_modules(optim.__path__)
    if info.name not in SHARED
]


def name_of(module):
    return module.__name__.rpartition(".")[2]


@pytest.fixture(autouse=True)
def optax_promotion():
    """As in the update: optax raises floats to an int32 count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_the_optimisers_are_found():
    assert {adamw, adamw8bit} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_an_optimiser_is_a_valid_config_that_builds_and_minimises(module):
    config = module.Config()
    config.validate()
    optimizer = config.build(optax.constant_schedule(0.1))
    assert dataclasses.is_dataclass(config) and module.__doc__
    params = {"layers": {"up": jnp.full((4, 4), 3.0)}, "norm": jnp.full((4,), -2.0)}
    state = optimizer.init(params)
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(state))

    def loss(params):
        return sum((x**2).sum() for x in jax.tree.leaves(params))

    first = loss(params)
    for _ in range(20):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    assert loss(params) < 0.7 * first


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_an_optimiser_names_an_axis_for_every_dim_of_its_state(module, llama_params):
    config = module.Config()
    state = jax.eval_shape(config.build(optax.constant_schedule(0.1)).init, llama_params)
    axes = config.state_axes(state, params=llama_params)
    known = {name for box in boxes(llama_params) for name in shd.axes_of(box) or ()}
    num_split = 0

    def check(leaf, names):
        nonlocal num_split
        assert len(names) == leaf.ndim and set(names) <= known | {"_"}
        num_split += bool(set(names) - {"_"})

    jax.tree.map(check, state, axes)
    # State that no axis splits lies whole on every device.
    assert num_split >= len(boxes(llama_params))


def boxes(params):
    return jax.tree.leaves(params, is_leaf=lambda x: shd.axes_of(x) is not None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("b1", 1.0),
        ("b1", -0.1),
        ("b2", 1.0),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("clip_norm", -1.0),
    ],
)
def test_adamw_refuses_values_out_of_range_with_key_and_fix(key, value):
    with pytest.raises(ValueError, match=rf"config\.optim\.{key}={value}: set it"):
        adamw.Config(**{key: value}).validate()


def step(config, params, gradients, learning_rate=0.5):
    optimizer = config.build(optax.constant_schedule(learning_rate))
    return optimizer.update(gradients, optimizer.init(params), params)


def test_weights_decay_and_norms_and_biases_do_not():
    params = {
        name: jnp.ones(3)
        for name in ("embedding", "qkv", "qkv_bias", "attention_norm", "mlp_norm", "norm", "q_norm")
    }
    updates, _ = step(adamw.Config(weight_decay=0.1), params, jax.tree.map(jnp.zeros_like, params))
    for name, update in updates.items():
        decays = name in ("embedding", "qkv")
        np.testing.assert_allclose(update, -0.5 * 0.1 if decays else 0.0, rtol=1e-6, err_msg=name)


def test_every_parameter_of_a_llama_decays_but_norms_and_biases(config_leaf_names):
    decayed, kept = config_leaf_names
    assert decayed == {
        "embedding",
        "layers.qkv",
        "layers.out",
        "layers.gate",
        "layers.up",
        "layers.down",
        "head",
    }
    assert kept == {
        "norm",
        "layers.attention_norm",
        "layers.mlp_norm",
        "layers.qkv_bias",
        "layers.q_norm",
        "layers.k_norm",
    }


@pytest.fixture(scope="module")
def llama_params():
    """Boxes of shapes, one of every kind that a Llama has."""
    config = llama.Config(
        vocab_size=8,
        model_dim=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        mlp_dim=8,
        qkv_bias=True,
        qk_norm=True,
    )
    return nnx.split(jax.eval_shape(lambda: config.build(nnx.Rngs(0))))[1]


@pytest.fixture
def config_leaf_names(llama_params):
    """Names of a Llama's parameters that decay, and that do not."""
    names: tuple[set[str], set[str]] = (set(), set())
    for path, decays in jax.tree_util.tree_leaves_with_path(adamw.Config().decays(llama_params)):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        names[0 if decays else 1].add(name)
    return names


def test_gradients_are_clipped_to_the_global_norm():
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    gradients = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    for clip_norm, scale in ((1.0, 1 / 5), (10.0, 1.0), (0.0, 1.0)):
        _, state = step(adamw.Config(clip_norm=clip_norm, b1=0.9), params, gradients)
        moments = optax.tree.get(state, "mu")
        np.testing.assert_allclose(moments["a"], 0.1 * 3 * scale, rtol=1e-6)
        np.testing.assert_allclose(moments["b"], 0.1 * 4 * scale, rtol=1e-6)


def test_adamw_follows_the_paper():
    """Two updates written out (Loshchilov & Hutter 2019, algorithm 2)."""
    config = adamw.Config(b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.2, clip_norm=0.0)
    optimizer = config.build(optax.constant_schedule(0.3))
    params = {"w": jnp.array([1.0, -2.0])}
    state = optimizer.init(params)
    w, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for t, g in enumerate(([0.5, 1.0], [-0.25, 2.0]), 1):
        updates, state = optimizer.update({"w": jnp.array(g)}, state, params)
        params = optax.apply_updates(params, updates)
        m, v = 0.8 * m + 0.2 * np.array(g), 0.9 * v + 0.1 * np.array(g) ** 2
        w = w - 0.3 * ((m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3) + 0.2 * w)
        np.testing.assert_allclose(params["w"], w, rtol=1e-6)
