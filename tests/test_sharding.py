"""The sharding library, also as other projects use it.

On Linen, on an Equinox-style pytree, on a plain dict.
"""

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
from jaxscale.ops.layers import stack_layers

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


def placed(array, axes):
    """On the mesh in use, laid out by these logical axes."""
    return jax.device_put(array, shd.shardings(array, axes))


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
        here = jax.device_put(params, shardings)
        x_BSD = placed(x, "batch seq act_embed")
        gradients = jax.jit(jax.grad(loss), out_shardings=shardings)(here, x_BSD)
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
        self.up = shd.param(rngs, (8, 16), axes="embed mlp", scale=0.1)
        self.scale = shd.param(rngs, (8,), axes="norm", fill=1.0)


def test_params_need_no_mesh_and_a_stack_of_them_names_its_axis(mesh):
    keys = jax.random.split(jax.random.key(0), 3)
    blocks = stack_layers(lambda key: Block(nnx.Rngs(key)), keys)
    shardings = shd.shardings(nnx.split(blocks)[1], mesh=mesh, rules=RULES)
    scale, up = jax.tree.leaves(shardings)
    assert up.spec == P(None, "fsdp", "tensor")
    assert scale.spec == P(None, None)


def test_an_array_of_another_rank_than_its_axes_is_refused_not_guessed_to_be_a_stack(mesh):
    blocks = jax.vmap(lambda key: Block(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
    with pytest.raises(ValueError, match=r"scale: axes 'norm' name 1 dimensions and .* has 2"):
        shd.shardings(nnx.split(blocks)[1], mesh=mesh, rules=RULES)
    with pytest.raises(ValueError, match="a stack has an axis of its own"):
        shd.shardings({"w": jnp.ones((3, 4, 4))}, [("w", "embed mlp")], mesh=mesh, rules=RULES)


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
        shd.param(nnx.Rngs(0), (8, 16), axes="embed", scale=1.0)
    with pytest.raises(ValueError, match="either scale= or fill="):
        shd.param(nnx.Rngs(0), (8,), axes="embed")


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
    def summed(x):
        axes = shd.mesh_axes("batch")

        def local(x):
            assert x.shape == (2, 4)
            # All axes are manual here: there is none left to lay out, or to ask for.
            assert shd.mesh_axes("batch") == () and shd.constrain(x, "batch act_embed") is x
            return jax.lax.psum(x.sum(), axes)

        return shd.shard_map(local, in_axes=("batch act_embed",), out_axes="")(x)

    with shd.use(mesh, RULES):
        x = placed(np.ones((8, 4), np.float32), "batch act_embed")
        assert jax.jit(summed)(x) == 32


def test_a_result_that_differs_between_devices_is_refused(mesh):
    def unsummed(x):
        return shd.shard_map(jnp.sum, in_axes=("batch act_embed",), out_axes="")(x)

    with shd.use(mesh, RULES), pytest.raises(ValueError, match="varying|replicat"):
        jax.jit(unsummed)(placed(np.ones((8, 4), np.float32), "batch act_embed"))


@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_inside_a_region_that_is_manual_over_one_axis_the_others_are_laid_out(axis_types):
    """A weight for each stage; inside, the calls lay out what is left of the mesh."""
    mesh = shd.make_mesh(stage=2, fsdp=2, tensor=2, axis_types=axis_types)
    rules = shd.Rules(
        batch="fsdp",
        act_embed=None,
        embed="fsdp",
        mlp="tensor",
        act_mlp="tensor",
        words=("stage", "tensor"),
    )
    rng = np.random.default_rng(0)
    ups, x = (
        rng.normal(size=(2, 8, 16)).astype(np.float32),
        rng.normal(size=(4, 8)).astype(np.float32),
    )

    def stage_loss(up_DF, x_BD):
        assert shd.mesh_axes("words") == ("tensor",)
        up_DF = shd.gather(shd.constrain(up_DF, "embed mlp"), axes="embed mlp")
        if axis_types == "explicit":
            assert jax.typeof(up_DF).sharding.spec == P(None, "tensor")
        y_BF = shd.einsum(
            "BD,DF->BF", shd.constrain(x_BD, "batch act_embed"), up_DF, out="batch act_mlp"
        )
        axes = shd.mesh_axes("batch"), shd.mesh_axes("mlp")

        def local(y):
            return jax.lax.psum(jnp.sum(jnp.tanh(y)), (*axes[0], *axes[1]))

        return shd.shard_map(local, in_axes=("batch act_mlp",), out_axes="")(y_BF)

    def loss(ups, x):
        def region(ups, x):
            return stage_loss(ups[0], x)[None]

        mapped = jax.shard_map(
            region,
            axis_names={"stage"},
            in_specs=(P("stage"), P()),
            out_specs=P("stage"),
            check_vma=False,
        )
        return mapped(ups, x).sum()

    expected, gradients = jax.value_and_grad(
        lambda ups: jnp.tanh(jnp.einsum("BD,SDF->SBF", x, ups)).sum()
    )(ups)
    with shd.use(mesh, rules):
        value, got = jax.jit(jax.value_and_grad(loss))(ups, x)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(got, gradients, rtol=1e-4, atol=1e-5)


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
