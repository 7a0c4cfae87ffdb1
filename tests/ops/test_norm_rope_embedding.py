import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import sharding as shd
from jaxscale.ops import rope
from jaxscale.ops.embedding import embed
from jaxscale.ops.norm import rms_norm
from jaxscale.ops.ordered_rows import rows_in_order


def placed(array, axes):
    """On the mesh in use, laid out by these logical axes."""
    return jax.device_put(array, shd.shardings(array, axes))


def test_rms_norm_divides_by_the_root_mean_square():
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    scale = np.linspace(0.5, 2, 8, dtype=np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(
        rms_norm(jnp.asarray(x), jnp.asarray(scale), eps=1e-5), expected, rtol=1e-5
    )
    assert (
        rms_norm(jnp.asarray(x, jnp.bfloat16), jnp.asarray(scale), eps=1e-5).dtype == jnp.bfloat16
    )


def test_rotated_dot_products_depend_on_the_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def score(s, t):
        turned = [
            rope.rotate(x, *rope.angles(jnp.array([[place]], jnp.int32), 16, theta=100.0))
            for x, place in ((q, s), (k, t))
        ]
        return jnp.sum(turned[0] * turned[1])

    np.testing.assert_allclose(score(7, 3), score(104, 100), rtol=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_rotation_turns_pair_i_by_position_times_its_frequency():
    cos, sin = rope.angles(jnp.array([[3]], jnp.int32), 4, theta=100.0)
    np.testing.assert_allclose(cos[0, 0], np.cos([3.0, 0.3]), rtol=1e-6)
    x = jnp.array([1.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
    np.testing.assert_allclose(
        rope.rotate(x, cos, sin)[0, 0, 0], [np.cos(3.0), 0, np.sin(3.0), 0], rtol=1e-6
    )


def test_llama_31_scaling_stretches_long_wavelengths_only():
    scaling = rope.Scaling(factor=8.0, low=1.0, high=4.0, original_seq_len=8192)
    plain = rope.frequencies(128, theta=500_000.0, scaling=None)
    scaled = rope.frequencies(128, theta=500_000.0, scaling=scaling)
    wavelength = 2 * np.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    np.testing.assert_array_equal(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    between = ~short & ~long
    assert (
        between.any()
        and (scaled[between] < plain[between]).all()
        and (scaled[between] > plain[between] / 8).all()
    )


@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
@pytest.mark.parametrize(
    "rules",
    [
        dict(vocab="tensor", embed="fsdp"),
        dict(vocab=None, embed="fsdp"),
        dict(vocab="tensor", embed=None),
    ],
)
@pytest.mark.parametrize("in_order", [False, True])
def test_a_split_table_gives_the_same_rows_and_gradient(rules, axis_types, in_order):
    rng = np.random.default_rng(0)
    table, tokens = (
        rng.normal(size=(32, 8)).astype(np.float32),
        rng.integers(0, 32, (8, 6)).astype(np.int32),
    )
    weights = rng.normal(size=(8, 6, 8)).astype(np.float32)
    rules = shd.Rules(
        batch=("data", "fsdp"),
        seq=None,
        residual_rows=("data", "fsdp"),
        residual_seq="tensor",
        act_embed=None,
    ).replace(**rules)
    mesh = shd.make_mesh(data=2, fsdp=2, tensor=2, axis_types=axis_types)

    def weighted(table, tokens, weights):
        x = embed(tokens, table, dtype=jnp.float32, in_order=in_order)
        return jnp.sum(x * weights), x

    with shd.use(mesh, rules):
        table_here = placed(table, "vocab embed")
        ids = placed(tokens, "batch seq")
        w = placed(weights, "batch seq act_embed")
        gradient, x = jax.jit(jax.grad(weighted, has_aux=True))(table_here, ids, w)
    np.testing.assert_array_equal(x, table[tokens])
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, weights)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 100])
@pytest.mark.parametrize("num_kinds", [1, 5, 40])
def test_rows_of_one_token_are_summed_in_order(num_tokens, num_kinds):
    rng = np.random.default_rng(num_tokens)
    table = rng.normal(size=(32, 8)).astype(np.float32)
    index = rng.integers(-2, num_kinds - 2, num_tokens).astype(np.int32)
    weights = rng.normal(size=(num_tokens, 8)).astype(np.float32)
    rows, gradient_of = jax.vjp(lambda table: rows_in_order(table, index), jnp.asarray(table))
    (gradient,) = gradient_of(jnp.asarray(weights))
    inside = (index >= 0) & (index < 32)
    np.testing.assert_array_equal(rows, np.where(inside[:, None], table[index % 32], 0))
    expected = np.zeros_like(table)
    np.add.at(expected, index[inside], weights[inside])
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
