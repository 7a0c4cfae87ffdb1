"""Products with stored weights: the one place that says in which dtypes they are made.

B rows, S sequence, D model, F mlp.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxscale import sharding as shd
from jaxscale.ops.execution import Execution

# Weights gathered over fsdp bear this name, for a remat policy that keeps them.
GATHERED = "gathered"


def linear(subscripts: str, x, *, weight, out: str, execution: Execution, axes: str | None = None):
    """`linear("BSD,DF->BSF", x, weight=..., out="batch seq mlp", ...)`: x times a stored weight.

    weight: float32 as stored, a Param or an array (then `axes` are its logical axes). It is cast to
    `execution.dtype`, gathered along fsdp and multiplied; the result is `execution.dtype` in the
    layout `out`. The weight's gradient leaves its product in `execution.gradient_dtype`, is
    reduce-scattered in it, and comes out as stored. A remat policy can save the gathered weight,
    by its name GATHERED.
    """
    dtype = jnp.dtype(execution.dtype)
    names = axes or " ".join(shd.axes_of(weight) or ()) or None
    stored = weight if isinstance(weight, jax.Array) else weight[...]
    x, wide = x.astype(dtype), execution.gradient_dtype
    if execution.is_gathered:
        return shd.einsum(subscripts, x, stored, out=out)
    gather = _gather(names)
    if wide != dtype:
        return _with_wide_gradient(subscripts, x, stored=stored, gather=gather, out=out, wide=wide)
    return shd.einsum(subscripts, x, gathered(stored, execution, axes=names), out=out)


def gathered(stored, execution: Execution, *, axes: str | None):
    """A stored weight in `execution.dtype`, whole along fsdp."""
    return checkpoint_name(_gather(axes)(stored, dtype=jnp.dtype(execution.dtype)), GATHERED)


def _gather(axes: str | None):
    # Weight gradients sum over tokens, and these axes split the tokens.
    return functools.partial(shd.gather, axes=axes, summed_over=shd.mesh_axes("batch seq"))


def _with_wide_gradient(subscripts, x, *, stored, gather, out, wide):
    """The same product; nothing rounds the weight's gradient to x's dtype before it is summed."""

    def multiply(x, weight):
        return shd.einsum(subscripts, x, weight, out=out)

    @jax.custom_vjp
    def product(x, stored):
        return multiply(x, gather(stored, dtype=x.dtype))

    def forward(x, stored):
        weight = checkpoint_name(gather(stored, dtype=x.dtype), GATHERED)
        return multiply(x, weight), (x, weight, stored)

    def backward(residuals, grad):
        x, weight, stored = residuals
        (dx,) = jax.linear_transpose(lambda x: multiply(x, weight), x)(grad)
        dweight = _weight_gradient(subscripts, x, weight=weight, grad=grad, out=out, wide=wide)
        # The gather is linear: its value is not needed, and XLA does not make it again.
        (dstored,) = jax.vjp(lambda stored: gather(stored, dtype=wide), stored)[1](dweight)
        return dx, dstored

    product.defvjp(forward, backward)
    return product(x, stored)


def _weight_gradient(subscripts, x, *, weight, grad, out, wide):
    """x times grad, in the dtype `wide` and laid out as the weight is."""
    x_dims, weight_dims, out_dims = subscripts.replace(" ", "").replace("->", ",").split(",")
    product = functools.partial(
        jnp.einsum, f"{x_dims},{out_dims}->{weight_dims}", preferred_element_type=wide
    )
    sharding = jax.typeof(weight).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return product(x, shd.constrain(grad, out))
    spec = sharding.spec
    if spec.reduced:
        # Its transpose is a sum that is yet to be made; what it sums over must be split alike.
        entries = dict(zip(weight_dims, spec.partitions, strict=True))
        entries |= dict(zip(x_dims, jax.typeof(x).sharding.spec.partitions, strict=True))
        grad = jax.sharding.reshard(grad, P(*(entries[dim] for dim in out_dims)))
    else:
        grad = shd.constrain(grad, out)
    return product(x, grad, out_sharding=P(*spec.partitions, unreduced=spec.reduced))
