"""A layer's gradients out of flat residuals are those of jax.vjp, together and apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.parallel.layer_gradients import LayerGradients

POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "products": jax.checkpoint_policies.dots_saveable,
    "none": None,
}


# An array that is none of the layer's arguments, as the tables of a kernel are.
CONSTANT = np.linspace(0.5, 1.5, 8, dtype=np.float32)


def layer(weights, x, shared):
    up, down, scale = weights["up"], weights["down"], weights["scale"]
    h = jnp.tanh((x * scale * CONSTANT.astype(x.dtype)) @ up) * shared[:, None]
    return x + jax.nn.silu(h) @ down


@pytest.fixture
def arguments():
    keys = jax.random.split(jax.random.key(0), 5)
    weights = {
        "up": jax.random.normal(keys[0], (8, 16)),
        "down": jax.random.normal(keys[1], (16, 8)),
        "scale": jax.random.normal(keys[2], (8,)),
    }
    return weights, jax.random.normal(keys[3], (4, 8)), jax.random.normal(keys[4], (4,))


def products(function, *args) -> int:
    return str(jax.make_jaxpr(function)(*args)).count("dot_general")


@pytest.mark.parametrize("policy", POLICIES)
def test_together_and_apart_they_are_those_of_vjp(arguments, policy):
    weights, x, shared = arguments
    saved = POLICIES[policy]
    run = layer if saved is None else jax.checkpoint(layer, policy=saved)
    parts = LayerGradients(run, weights, x=x, shared=shared, splits=True)
    y, residuals = parts.forward(weights, x, shared=shared)
    wanted_y, pullback = jax.vjp(layer, weights, x, shared)
    np.testing.assert_array_equal(y, wanted_y)
    dy = jnp.cos(y)
    wanted_weights, wanted_x, _ = pullback(dy)
    dx, dweights = parts.backward(weights, residuals, shared=shared, dy=dy)
    first_dx, crossing = parts.input_gradient(weights, residuals, shared=shared, dy=dy)
    later = parts.weight_gradient(weights, residuals, shared=shared, crossing=crossing)
    for mine in (dx, first_dx):
        np.testing.assert_allclose(mine, wanted_x, rtol=1e-5, atol=1e-6)
    for mine in (dweights, later):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
            mine,
            wanted_weights,
        )


def test_weights_are_no_residuals_and_no_product_is_made_twice(arguments):
    weights, x, shared = arguments
    run = jax.checkpoint(layer, policy=POLICIES["full"])
    parts = LayerGradients(run, weights, x=x, shared=shared, splits=True)
    _, residuals = parts.forward(weights, x, shared=shared)
    assert [leaf.shape for leaf in residuals] == [x.shape], "the layer's input alone"
    _, crossing = parts.input_gradient(weights, residuals, shared=shared, dy=x)

    def first(residuals, dy):
        return parts.input_gradient(weights, residuals, shared=shared, dy=dy)

    def later(residuals, crossing):
        return parts.weight_gradient(weights, residuals, shared=shared, crossing=crossing)

    def both(residuals, dy):
        return parts.backward(weights, residuals, shared=shared, dy=dy)

    apart = products(first, residuals, x), products(later, residuals, crossing)
    assert sum(apart) == products(both, residuals, x)
    assert apart[1] == 2, "of each matrix the weight gradient"
    # A vector's gradient is made at once, and crosses as a vector.
    assert any(leaf.shape == (8,) for leaf in crossing)


def test_products_that_make_gradients_alone_are_not_rounded(arguments):
    weights, x, shared = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), arguments)
    parts = LayerGradients(layer, weights, x=x, shared=shared, splits=True, wide=jnp.float32)
    _, residuals = parts.forward(weights, x, shared=shared)
    _, crossing = parts.input_gradient(weights, residuals, shared=shared, dy=x)
    together = parts.backward(weights, residuals, shared=shared, dy=x)[1]
    apart = parts.weight_gradient(weights, residuals, shared=shared, crossing=crossing)
    narrow = LayerGradients(layer, weights, x=x, shared=shared, splits=False)
    _, rounded = narrow.backward(weights, residuals, shared=shared, dy=x)
    for gradients in (together, apart):
        dtypes = {name: leaf.dtype for name, leaf in gradients.items()}
        assert dtypes == dict(up=jnp.float32, down=jnp.float32, scale=jnp.bfloat16)
        for name, leaf in gradients.items():
            assert (leaf.astype(jnp.bfloat16) == rounded[name]).all(), name
            is_narrower = (leaf != rounded[name].astype(leaf.dtype)).any()
            assert is_narrower == (name != "scale"), name
