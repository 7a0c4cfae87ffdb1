"""The sharding library, also as other projects use it: on Linen, on an Equinox-style pytree, on a plain dict."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale import sharding as shd

RULES = shd.Rules(
    batch=("data", "fsdp"),
    seq=None,
    act_embed=None,
    embed="fsdp",
    mlp="tensor",
    act_mlp="tensor",
    layers=None,
    norm=None,
)
BOTH_AXIS_TYPES = pytest.mark.parametrize("axis_types", ["explicit", "auto"])


@pytest.fixture(params=["explicit", "auto"])
def mesh(request):
    return shd.make_mesh(data=2, fsdp=2, tensor=2, axis_types=request.param)


def spec_of(tree, *path):
    for key in path:
        tree = tree[key]
    return tree.spec


# Mesh and rules.


def test_a_mesh_has_every_axis_and_puts_unknown_ones_first():
    mesh = shd.make_mesh(replica=2, tensor=4)
    assert mesh.axis_names == ("replica", *shd.MESH_AXES)
    assert mesh.shape["replica"] == 2 and mesh.shape["tensor"] == 4 and mesh.shape["fsdp"] == 1


def test_a_mesh_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match=r"fsdp=3.*needs 3 devices and 8 are here"):
        shd.make_mesh(fsdp=3)


def test_a_spec_names_the_mesh_axes_of_each_dimension():
    assert RULES.spec("batch seq act_embed") == P(("data", "fsdp"), None, None)
    assert RULES.spec("_ embed mlp") == P(None, "fsdp", "tensor")


def test_an_unknown_logical_axis_is_refused_by_name():
    with pytest.raises(ValueError, match="'vocab' has no rule.*batch, seq"):
        RULES.spec("vocab embed")


def test_one_mesh_axis_cannot_split_two_dimensions():
    with pytest.raises(ValueError, match="'fsdp' splits both 'batch' and 'embed'"):
        RULES.spec("batch embed")


def test_a_size_that_does_not_divide_is_refused_with_the_key(mesh):
    with pytest.raises(
        ValueError,
        match=r"'mlp' of size 7 cannot be split over mesh axes tensor=2.*config\.mesh\.tensor",
    ):
        RULES.spec("embed mlp", (4, 7), mesh=mesh)


def test_a_rule_for_an_axis_the_mesh_has_not_is_refused():
    with (
        pytest.raises(ValueError, match="'model', and the mesh has"),
        shd.use(shd.make_mesh(data=8), shd.Rules(mlp="model")),
    ):
        pass


def test_replace_changes_one_rule_and_adds_another():
    rules = RULES.replace(embed=None, vocab="tensor")
    assert rules.spec("vocab embed") == P("tensor", None)
    assert RULES.mesh_axes("embed") == ("fsdp",)


def test_padding_rounds_up_and_leaves_multiples():
    assert [shd.padded(n) for n in (1, 128, 257)] == [128, 128, 384]


# Other people's trees.


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal(0.02)
        x = nn.Dense(
            16, kernel_init=nn.with_partitioning(init, ("embed", "mlp")), use_bias=False, name="up"
        )(x)
        return nn.Dense(
            8, kernel_init=nn.with_partitioning(init, ("mlp", "embed")), use_bias=False, name="down"
        )(x)


def test_a_linen_model_is_sharded_by_its_metadata(mesh):
    model, x = LinenMlp(), jnp.ones((4, 8))
    abstract = jax.eval_shape(model.init, jax.random.key(0), x)
    shardings = shd.shardings(abstract, mesh=mesh, rules=RULES)
    params = nn.meta.unbox(jax.jit(model.init, out_shardings=shardings)(jax.random.key(0), x))
    assert params["params"]["up"]["kernel"].sharding.spec == P("fsdp", "tensor")
    assert params["params"]["down"]["kernel"].sharding.spec == P("tensor", "fsdp")


def test_a_linen_model_without_metadata_is_sharded_by_patterns(mesh):
    abstract = jax.eval_shape(nn.Dense(16).init, jax.random.key(0), jnp.ones((4, 8)))
    shardings = shd.shardings(
        abstract, [("kernel$", "embed mlp"), ("bias$", "mlp")], mesh=mesh, rules=RULES
    )
    assert spec_of(shardings, "params", "kernel") == P("fsdp", "tensor")
    assert spec_of(shardings, "params", "bias") == P("tensor")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    """As in Equinox: a dataclass that is a pytree of its arrays."""

    weight: jax.Array
    bias: jax.Array


def test_an_equinox_style_module_is_sharded_by_patterns(mesh):
    model = {"first": Linear(jnp.ones((8, 16)), jnp.ones(16))}
    shardings = shd.shardings(
        model, [(r"first/weight", "embed mlp"), ("bias", "mlp")], mesh=mesh, rules=RULES
    )
    assert isinstance(shardings["first"], Linear)
    placed = jax.device_put(model, shardings)
    assert placed["first"].weight.sharding == NamedSharding(mesh, P("fsdp", "tensor"))


def test_a_plain_dict_trains_with_gather_and_einsum(mesh):
    rng = np.random.default_rng(0)
    params = {
        "up": rng.normal(size=(8, 16)).astype(np.float32),
        "down": rng.normal(size=(16, 8)).astype(np.float32),
    }
    x = rng.normal(size=(8, 4, 8)).astype(np.float32)

    def loss(params, x_BSD):
        up = shd.gather(params["up"], axes="embed mlp")
        down = shd.gather(params["down"], axes="mlp embed")
        h_BSF = jax.nn.relu(shd.einsum("BSD,DF->BSF", x_BSD, up, out="batch seq act_mlp"))
        return jnp.mean(shd.einsum("BSF,FD->BSD", h_BSF, down, out="batch seq act_embed") ** 2)

    expected = jax.grad(loss)(params, x)
    shardings = shd.shardings(
        params, [("up", "embed mlp"), ("down", "mlp embed")], mesh=mesh, rules=RULES
    )
    with shd.use(mesh, RULES):
        placed = jax.device_put(params, shardings)
        x_BSD = shd.global_array(lambda index: x[index], x.shape, "batch seq act_embed")
        gradients = jax.jit(jax.grad(loss), out_shardings=shardings)(placed, x_BSD)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-6)
        assert gradient.sharding == shardings[name]


def test_an_undescribed_array_is_refused_by_path(mesh):
    with pytest.raises(ValueError, match=r"mlp/w: nothing says.*\(4, 4\)"):
        shd.shardings({"mlp": {"w": jnp.ones((4, 4))}}, mesh=mesh, rules=RULES)
    with pytest.raises(ValueError, match="mlp/w.*add a pattern"):
        shd.shardings({"mlp": {"w": jnp.ones((4, 4))}}, [("bias", "mlp")], mesh=mesh, rules=RULES)


def test_an_indivisible_array_is_refused_by_path(mesh):
    with pytest.raises(ValueError, match="w: axis 'embed' of size 5"):
        shd.shardings({"w": jnp.ones((5, 4))}, [("w", "embed mlp")], mesh=mesh, rules=RULES)


# Flax NNX.


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = shd.param(rngs, (8, 16), "embed mlp", scale=0.1)
        self.scale = shd.param(rngs, (8,), "norm", fill=1.0)


def test_params_need_no_mesh_and_stack_under_vmap(mesh):
    blocks = jax.vmap(lambda key: Block(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
    shardings = shd.shardings(nnx.split(blocks)[1], mesh=mesh, rules=RULES)
    scale, up = jax.tree.leaves(shardings)
    assert up.spec == P(None, "fsdp", "tensor")
    assert scale.spec == P(None, None)


def test_values_do_not_depend_on_the_layout():
    def init(key):
        return nnx.split(Block(nnx.Rngs(key)))[1]

    alone = jax.jit(init)(jax.random.key(0))
    for sizes in (dict(fsdp=8), dict(tensor=8), dict(data=2, fsdp=2, tensor=2)):
        shardings = shd.shardings(alone, mesh=shd.make_mesh(sizes), rules=RULES)
        here = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
        np.testing.assert_array_equal(here["up"][...], alone["up"][...])


def test_param_refuses_axes_that_do_not_fit_the_shape():
    with pytest.raises(ValueError, match="names 1 dimensions and the shape"):
        shd.param(nnx.Rngs(0), (8, 16), "embed", scale=1.0)
    with pytest.raises(ValueError, match="either scale= or fill="):
        shd.param(nnx.Rngs(0), (8,), "embed")


# The calls inside a model.


def test_outside_use_every_call_is_plain():
    x = jnp.arange(6.0).reshape(2, 3)
    assert shd.constrain(x, "anything at all") is x
    np.testing.assert_array_equal(shd.einsum("ab,cb->ac", x, x, out="what ever"), x @ x.T)
    np.testing.assert_array_equal(shd.reshape(x, (3, 2), out="a b"), x.reshape(3, 2))
    assert shd.gather({"w": x}, dtype=jnp.bfloat16)["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        shd.shard_map(lambda x: 2 * x, in_axes=("a b",), out_axes="a b")(x), 2 * x
    )


@pytest.fixture
def product():
    """A weight that bfloat16 does not hold; inputs of a product and slopes of its result that it does."""
    rng = np.random.default_rng(0)
    x_BSD, slope_BSF = (rng.normal(size=(16, 64, size)).astype(jnp.bfloat16) for size in (8, 16))
    return rng.normal(size=(8, 16)).astype(np.float32), x_BSD, slope_BSF


def sloped_product(weight_DF, x_BSD, slope_BSF):
    """sum(y * slope) of a bfloat16 product y with a gathered weight, whose gradient is to be float32."""
    weight_DF = shd.gather(
        weight_DF, dtype=jnp.bfloat16, reduce_dtype=jnp.float32, axes="embed mlp", name="gathered"
    )
    y_BSF = shd.einsum("BSD,DF->BSF", x_BSD, weight_DF, out="batch seq mlp", dtype=jnp.bfloat16)
    assert weight_DF.dtype == jnp.float32 and y_BSF.dtype == jnp.bfloat16
    return jnp.sum((y_BSF * shd.constrain(slope_BSF, "batch seq mlp")).astype(jnp.float32))


def assert_gradients_are_those_of(product, dweight_DF, dx_BSD):
    weight_DF, x_BSD, slope_BSF = (np.asarray(x, np.float64) for x in product)
    assert dweight_DF.dtype == jnp.float32 and dx_BSD.dtype == jnp.bfloat16
    # Sums of 1024 products of size 1, to 32: float32 is off by 1e-5, bfloat16 by 0.1.
    np.testing.assert_allclose(dweight_DF, np.einsum("bsd,bsf->df", x_BSD, slope_BSF), atol=1e-4)
    expected_BSD = np.einsum("df,bsf->bsd", weight_DF, slope_BSF)
    assert np.linalg.norm(np.asarray(dx_BSD, np.float64) - expected_BSD) < 1e-2 * np.linalg.norm(
        expected_BSD
    )


def test_the_weight_gradient_of_a_bfloat16_product_can_be_float32(mesh, product):
    weight_DF, x_BSD, slope_BSF = product
    placement = shd.shardings(weight_DF, [("", "embed mlp")], mesh=mesh, rules=RULES)
    with shd.use(mesh, RULES):
        x_BSD = shd.global_array(lambda index: x_BSD[index], x_BSD.shape, "batch seq act_embed")
        differentiated = jax.jit(
            jax.grad(sloped_product, (0, 1)), out_shardings=(placement, x_BSD.sharding)
        )
        assert_gradients_are_those_of(
            product, *differentiated(jax.device_put(weight_DF, placement), x_BSD, slope_BSF)
        )


def test_without_a_mesh_it_can_too(product):
    assert_gradients_are_those_of(
        product, *jax.grad(sloped_product, (0, 1))(*map(jnp.asarray, product))
    )


def test_a_reduce_dtype_that_is_no_wider_has_no_effect(mesh):
    with shd.use(mesh, RULES):
        w = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("fsdp", "tensor")))
        for dtype, reduce_dtype in (
            (jnp.float32, jnp.bfloat16),
            (jnp.bfloat16, jnp.bfloat16),
            (None, jnp.float32),
        ):
            options = dict(dtype=dtype, axes="embed mlp")
            plain = jax.make_jaxpr(lambda w, options=options: shd.gather(w, **options))(w)
            options["reduce_dtype"] = reduce_dtype
            assert str(
                jax.make_jaxpr(lambda w, options=options: shd.gather(w, **options))(w)
            ) == str(plain)


def test_what_a_checkpoint_keeps_of_a_gathered_weight_is_bfloat16(mesh, product, capsys):
    policy = jax.checkpoint_policies.save_only_these_names("gathered")
    with shd.use(mesh, RULES):
        placed = jax.device_put(product[0], shd.shardings(product[0], [("", "embed mlp")]))
        kept = jax.checkpoint(sloped_product, policy=policy)
        jax.ad_checkpoint.print_saved_residuals(kept, placed, *map(jnp.asarray, product[1:]))
    lines = [
        line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line
    ]
    assert len(lines) == 1 and lines[0].startswith("bf16[8") and "'gathered'" in lines[0], lines


def test_a_product_in_a_dtype_is_of_two_operands():
    x = jnp.ones((2, 2))
    with pytest.raises(
        ValueError,
        match="'ab,bc,cd->ad'.* of 3 operands: with dtype= it takes two and their result",
    ):
        shd.einsum("ab,bc,cd->ad", x, x, x, out="_ _", dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="'ab,bc'.* of 2 operands"):
        shd.einsum("ab,bc", x, x, out="_ _", dtype=jnp.bfloat16)


def test_constrain_moves_an_array(mesh):
    with shd.use(mesh, RULES):
        x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data", None)))
        assert jax.jit(lambda x: shd.constrain(x, "act_embed mlp"))(x).sharding.spec == P(
            None, "tensor"
        )


def test_the_same_function_under_other_rules_is_traced_again():
    mesh = shd.make_mesh(data=8)
    seen = []

    @jax.jit
    def f(x):
        seen.append(shd.mesh_axes("batch"))
        return shd.constrain(x, "batch")

    for rules in (shd.Rules(batch="data"), shd.Rules(batch=None)):
        with shd.use(mesh, rules):
            f(jnp.ones(8))
    assert seen == [("data",), ()]


def test_shard_map_sees_local_parts_and_named_axes(mesh):
    def local(x):
        assert x.shape == (2, 4)
        return jax.lax.psum(x.sum(), shd.mesh_axes("batch"))

    with shd.use(mesh, RULES):
        x = shd.global_array(
            lambda index: np.ones((8, 4), np.float32)[index], (8, 4), "batch act_embed"
        )
        assert jax.jit(shd.shard_map(local, in_axes=("batch act_embed",), out_axes=""))(x) == 32


def test_a_missing_out_axis_is_an_error_on_an_explicit_mesh():
    mesh = shd.make_mesh(fsdp=2, tensor=4)
    with shd.use(mesh, RULES):
        x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("fsdp", "tensor")))
        w = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("tensor", None)))
        with pytest.raises(Exception, match="sharding"):
            jax.jit(lambda x, w: x @ w)(x, w)


def test_explain_lists_every_array_and_the_total(mesh):
    table = shd.explain(
        {"up": jnp.ones((1024, 512)), "step": jnp.ones(())},
        [("up", "embed mlp")],
        mesh=mesh,
        rules=RULES,
    )
    lines = [line.split() for line in table.splitlines()]
    assert ["up", "1024x512", "embed", "mlp", "(fsdp,", "tensor)", "0.500"] in lines
    assert lines[-1] == ["total", "0.500"]
