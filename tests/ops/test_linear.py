"""Products with stored weights: dtypes, and gradients that nothing rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import sharding as shd
from jaxscale.config import Dtype
from jaxscale.ops.execution import Execution
from jaxscale.ops.linear import linear

RULES = shd.Rules(
    batch=("data", "fsdp"), seq=None, act_embed=None, embed="fsdp", mlp="tensor", layers=None
)
LAYOUTS = {
    "fsdp": dict(fsdp=8),
    "hsdp": dict(data=2, fsdp=4),
    "hsdp tp": dict(data=2, fsdp=2, tensor=2),
    "dp": dict(data=8),
}
NARROW = Execution(dtype=Dtype.BFLOAT16)
WIDE = Execution(dtype=Dtype.BFLOAT16, reduce_dtype=Dtype.FLOAT32)


@pytest.fixture(params=[(layout, kind) for layout in LAYOUTS for kind in ("explicit", "auto")])
def mesh(request):
    layout, kind = request.param
    return shd.make_mesh(LAYOUTS[layout], axis_types=kind)


@pytest.fixture
def product():
    """A weight that bfloat16 does not hold; inputs and slopes of its product that it does."""
    rng = np.random.default_rng(0)
    x_BSD, slope_BSF = (rng.normal(size=(16, 64, n)).astype(jnp.bfloat16) for n in (8, 16))
    return rng.normal(size=(8, 16)).astype(np.float32), x_BSD, slope_BSF


def sloped(weight_DF, x_BSD, slope_BSF, *, execution):
    """sum(y * slope) of a bfloat16 product y."""
    y_BSF = linear(
        "BSD,DF->BSF",
        x_BSD,
        weight=weight_DF,
        axes="embed mlp",
        name="up",
        out="batch seq mlp",
        execution=execution,
    )
    assert y_BSF.dtype == jnp.bfloat16
    return jnp.sum((y_BSF * shd.constrain(slope_BSF, "batch seq mlp")).astype(jnp.float32))


def gradients_on(mesh, product, execution):
    weight_DF, x_BSD, slope_BSF = product
    with shd.use(mesh, RULES):
        here = shd.shardings(weight_DF, "embed mlp"), shd.shardings(x_BSD, "batch seq act_embed")
        placed = jax.device_put((weight_DF, x_BSD), here)
        gradient = jax.grad(lambda w, x: sloped(w, x, slope_BSF, execution=execution), (0, 1))
        return jax.jit(gradient, out_shardings=here)(*placed)


def errors_of(product, dweight_DF, dx_BSD):
    """The largest of the weight's gradient, and that of the input's as a share of its norm."""
    weight_DF, x_BSD, slope_BSF = (np.asarray(x, np.float64) for x in product)
    assert dweight_DF.dtype == jnp.float32 and dx_BSD.dtype == jnp.bfloat16
    expected = np.einsum("df,bsf->bsd", weight_DF, slope_BSF)
    off = np.linalg.norm(np.asarray(dx_BSD, np.float64) - expected) / np.linalg.norm(expected)
    return np.abs(dweight_DF - np.einsum("bsd,bsf->df", x_BSD, slope_BSF)).max(), off


def test_a_weights_gradient_in_float32_is_never_rounded(mesh, product):
    # Sums of 1024 products of size 1, to 32: float32 is off by 1e-5, bfloat16 by 0.1.
    weight, x = errors_of(product, *gradients_on(mesh, product, WIDE))
    assert weight < 1e-4 and x < 1e-2


def test_in_bfloat16_it_is(mesh, product):
    weight, x = errors_of(product, *gradients_on(mesh, product, NARROW))
    # A sum of 128 is off by up to 0.5, and so is each partial sum of a device.
    assert 1e-3 < weight < 4 and x < 1e-2


def test_without_a_mesh_it_is_the_same(product):
    for execution, low, high in ((WIDE, 0, 1e-4), (NARROW, 1e-3, 1)):
        gradient = jax.grad(lambda *a, e=execution: sloped(*a, execution=e), (0, 1))
        weight, _ = errors_of(product, *gradient(*map(jnp.asarray, product)))
        assert low <= weight < high


def test_a_reduce_dtype_that_is_no_wider_is_the_same_program(product):
    arguments = tuple(map(jnp.asarray, product))
    with shd.use(shd.make_mesh(data=2, fsdp=4), RULES):
        for dtype in Dtype:
            programs = {
                str(
                    jax.make_jaxpr(
                        lambda *a, e=e: linear(
                            "BSD,DF->BSF",
                            a[1],
                            weight=a[0],
                            axes="embed mlp",
                            name="up",
                            out="batch seq mlp",
                            execution=e,
                        )
                    )(*arguments)
                )
                for e in (Execution(dtype=dtype), Execution(dtype=dtype, reduce_dtype=dtype))
            }
            assert len(programs) == 1


@pytest.mark.parametrize("execution", [NARROW, WIDE])
def test_what_a_checkpoint_keeps_of_a_gathered_weight_is_bfloat16(product, capsys, execution):
    policy = jax.checkpoint_policies.save_only_these_names("gathered")
    with shd.use(shd.make_mesh(data=2, fsdp=4), RULES):
        weight = jax.device_put(product[0], shd.shardings(product[0], "embed mlp"))
        kept = jax.checkpoint(lambda *a: sloped(*a, execution=execution), policy=policy)
        jax.ad_checkpoint.print_saved_residuals(kept, weight, *map(jnp.asarray, product[1:]))
    lines = capsys.readouterr().out.splitlines()
    lines = [line for line in lines if "from the argument" not in line]
    assert len(lines) == 1 and lines[0].startswith("bf16[8") and "'gathered'" in lines[0], lines
