"""Products with stored weights: the one place that says in which dtypes they are made.

B rows, S sequence, D model, F mlp.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxscale import sharding as shd
from jaxscale import warned
from jaxscale.config import Recipe
from jaxscale.ops import delayed, fp8
from jaxscale.ops.execution import Execution

# Weights gathered over fsdp bear this name, for a remat policy that keeps them.
GATHERED = "gathered"
# And this one the scales of weights in 8 bits: a few numbers, which every policy keeps.
SCALES = "scales"
# Weights whose input is a norm's result, which is rounded in the launches that normalise and never
# written in 16 bits: 335 MB forward for 16,384 tokens of 4096, and 469 were a kernel of ours to
# round it (compiled for an H200). Other inputs are in memory already: attention's output, an
# activation that its own backward pass shares.
OF_NORMS = ("qkv", "gate", "up")


def linear(
    subscripts: str,
    x,
    *,
    weight,
    name: str,
    out: str,
    execution: Execution,
    axes: str | None = None,
):
    """`linear("BSD,DF->BSF", x, weight=..., name="up", out="batch seq mlp", ...)`: x times it.

    weight: float32 as stored, a Param or an array (then `axes` are its logical axes). It is cast to
    `execution.dtype`, gathered along fsdp and multiplied; the result is `execution.dtype` in the
    layout `out`. The weight's gradient leaves its product in `execution.gradient_dtype`, is
    reduce-scattered in it, and comes out as stored. A remat policy can save the gathered weight,
    by its name GATHERED. name: by which config.precision.weights speaks of it; where that says so,
    the product and those of its gradients are of operands in 8 bits (`ops/fp8.py`), and the weight
    is gathered in 8 bits too.
    """
    dtype = jnp.dtype(execution.dtype)
    names = axes or " ".join(shd.axes_of(weight) or ()) or None
    stored = weight if isinstance(weight, jax.Array) else weight[...]
    x, wide = x.astype(dtype), execution.gradient_dtype
    gather = _cast if execution.is_gathered else _gather(names)
    if (how := execution.fp8) is not None and how.is_for(name):
        specs = _specs_of(subscripts, axes=names, out=out)
        if not (objection := _objection(subscripts, x, stored=stored, specs=specs, how=how)):
            return _in_8_bits(
                subscripts,
                x,
                stored=stored,
                name=name,
                gather=gather,
                specs=specs,
                out=out,
                execution=execution,
            )
        warned.once(f"products of {name!r} are made in {dtype.name}: {objection}")
    if execution.is_gathered:
        return shd.einsum(subscripts, x, stored, out=out)
    if wide != dtype:
        return _with_wide_gradient(subscripts, x, stored=stored, gather=gather, out=out, wide=wide)
    return shd.einsum(subscripts, x, gathered(stored, execution, axes=names), out=out)


def gathered(stored, execution: Execution, *, axes: str | None):
    """A stored weight in `execution.dtype`, whole along fsdp."""
    return checkpoint_name(_gather(axes)(stored, dtype=jnp.dtype(execution.dtype)), GATHERED)


def _gather(axes: str | None):
    # Weight gradients sum over tokens, and these axes split the tokens.
    return functools.partial(shd.gather, axes=axes, summed_over=shd.mesh_axes("batch seq"))


def _cast(stored, *, dtype=None):
    """In place of the gather of a weight that is gathered already."""
    return stored if dtype is None else stored.astype(dtype)


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


# Products of operands in 8 bits.


class _Specs(NamedTuple):
    """The PartitionSpecs of x, the gathered weight and y while they are multiplied."""

    x: P
    weight: P
    y: P


def _specs_of(subscripts: str, *, axes: str | None, out: str) -> _Specs:
    """What the weight splits is split as the weight is, and tokens as in `out` otherwise."""
    x_dims, weight_dims, y_dims = _dims(subscripts)
    if axes is None:
        raise ValueError(f"linear({subscripts!r}): a weight without logical axes needs axes=")
    gathered = {"fsdp", *shd.mesh_axes("embed")}
    split = {
        dim: tuple(axis for axis in shd.mesh_axes(name) if axis not in gathered)
        for dim, name in zip(weight_dims, axes.split(), strict=True)
    }
    taken = {axis for entry in split.values() for axis in entry}
    for dim, name in zip(y_dims, out.split(), strict=True):
        if dim not in split:
            split[dim] = tuple(axis for axis in shd.mesh_axes(name) if axis not in taken)
    return _Specs(*(_spec(split, dims) for dims in (x_dims, weight_dims, y_dims)))


def _spec(split: dict[str, tuple[str, ...]], dims: str) -> P:
    entries = (split[dim] for dim in dims)
    return P(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def _dims(subscripts: str) -> list[str]:
    return subscripts.replace(" ", "").replace("->", ",").split(",")


def _objection(subscripts: str, x, *, stored, specs: _Specs, how: fp8.Fp8) -> str | None:
    """Why the tensor cores cannot make this product, or those of its gradients, in 8 bits."""
    x_dims, weight_dims, _ = _dims(subscripts)
    sizes = dict(zip(x_dims, _part_of(x.shape, specs.x), strict=True))
    sizes |= dict(zip(weight_dims, _part_of(stored.shape, specs.weight), strict=True))
    groups = dict(
        tokens=[dim for dim in x_dims if dim not in weight_dims],
        inputs=[dim for dim in weight_dims if dim in x_dims],
        outputs=[dim for dim in weight_dims if dim not in x_dims],
    )
    for what, dims in groups.items():
        mine = tuple(sizes[dim] for dim in dims)
        if objection := fp8.objection(mine, recipe=how.recipe):
            return f"a device's {' x '.join(map(str, mine))} {what} are {objection}"
    return None


def _part_of(shape, spec: P) -> list[int]:
    """The shape of a device's part."""
    mesh = jax.sharding.get_abstract_mesh()
    return [
        size // math.prod(mesh.shape[axis] for axis in jax.tree.leaves(entry))
        for size, entry in zip(shape, spec, strict=True)
    ]


def _in_8_bits(
    subscripts: str,
    x,
    *,
    stored,
    name: str,
    gather,
    specs: _Specs,
    out: str,
    execution: Execution,
):
    """x times the weight; this product and those of its gradients by `fp8.product` on each device.

    A device scales activations and gradients by what it has itself, since no sum mixes those of two
    devices before scales are undone; or, delayed, by what all had before. A weight's scale is that
    of all its shards, so that they can be gathered in 8 bits.
    """
    how, wide = execution.fp8, execution.gradient_dtype
    assert how is not None
    dtype = x.dtype
    meter = execution.meters.of(name, x=x) if how.recipe == Recipe.FP8_DELAYED else None
    x_dims, weight_dims, y_dims = _dims(subscripts)
    to_x, to_weight = f"{y_dims},{weight_dims}->{x_dims}", f"{x_dims},{y_dims}->{weight_dims}"
    x_spec = _as_it_came(x, specs.x)

    def tell(what: str, **rounded):
        fp8.tell(how.observe, f"{name}.{what}", **rounded)

    device = dict(platform=execution.platform, compute_capability=execution.compute_capability)
    is_of_norm = any(part in name for part in OF_NORMS)

    def on_each_device(dims: str, operands, *, dtypes, out_dtype, specs, out):
        # Both are rounded once more for the weight's gradient.
        role = {subscripts: "x", to_x: "gradient"}.get(dims)
        product = functools.partial(
            fp8.product,
            recipe=how.recipe,
            dtypes=dtypes,
            out_dtype=out_dtype,
            is_accurate=dims != subscripts,
            is_written=dims == to_x or not is_of_norm,
            **device,
            told=functools.partial(tell, role) if role else None,
        )
        return shd.product_of_parts(product, operands, subscripts=dims, specs=specs, out=out)

    def rounded_both_ways(grad):
        """What comes backwards as the operand of dx, and as that of dw."""
        split = len(set(y_dims) - set(weight_dims))
        if not how.weight_gradients or how.recipe not in fp8.READ_ONCE:
            return grad, grad
        part = tuple(_part_of(grad.shape, specs.y))
        if objection := fp8.rounding_objection(part, split, recipe=how.recipe, **device):
            if execution.platform != "cpu":
                warned.once(f"XLA rounds what comes backwards, in more than one read: {objection}")
            return grad, grad

        def on_device(part):
            straight, turned = fp8.read_once(
                part,
                how.gradient_dtype,
                split=split,
                recipe=how.recipe,
                compute_capability=execution.compute_capability,
            )
            tell("gradient", before=part, after=straight)
            return straight, turned

        return shd.map_parts(on_device, (grad,), specs=(specs.y,), out=specs.y)

    def multiply(x, weight):
        return on_each_device(
            subscripts,
            (x, weight),
            dtypes=(fp8.FORWARD, fp8.FORWARD),
            out_dtype=dtype,
            specs=(specs.x, specs.weight),
            out=specs.y,
        )

    def taken(operand, which: int, *, meter, spec: P):
        """As products take it, which round it themselves, or rounded; its largest values."""
        if meter is None:
            return operand, None
        to = (fp8.FORWARD, how.gradient_dtype)[which]

        def local(operand, factor):
            rounded, amax = delayed.quantise(operand, factor, dtype=to)
            tell(("x", "gradient")[which], before=operand, after=rounded)
            return *rounded, amax

        values, scale, amax = shd.map_parts(
            local,
            (operand, meter.factors[which]),
            specs=(spec, P()),
            out=(spec, P(), P(_free_axes())),
        )
        # A number, kept by every policy: nothing is read for it again.
        return fp8.Quantised(values, scale), checkpoint_name(amax, SCALES)

    def quantised(stored, subscripts: str) -> fp8.Quantised:
        """As the second operand of this product.

        Out of x's dtype, as stages hold weights: so every layout has the same values.
        """
        stored = _values_of(stored).astype(dtype)
        runs = fp8.runs_of(subscripts, 1, shape=stored.shape, recipe=how.recipe, is_weight=True)
        scale, here = _scales(stored, runs=runs)
        part = fp8.quantise_with(here, stored, dtype=fp8.FORWARD)
        tell("weight", before=stored, after=part)
        return fp8.Quantised(_named(_values_of(gather(part.values))), scale)

    @jax.custom_vjp
    def product(x, stored, meter):
        x, _ = taken(x, delayed.X, meter=meter, spec=specs.x)
        return multiply(x, quantised(stored, subscripts))

    def forward(x, stored, meter):
        weight = quantised(stored, subscripts)
        is_shared = how.recipe != Recipe.FP8_ROWWISE
        rounded, amax = taken(x, delayed.X, meter=meter, spec=specs.x)
        return multiply(rounded, weight), (
            rounded if how.weight_gradients else x,
            amax,
            weight if is_shared else quantised(stored, to_x),
            stored,
            meter,
        )

    def backward(residuals, grad):
        x, amax, weight, stored, meter = residuals
        rounded, of_gradient = taken(grad, delayed.GRADIENT, meter=meter, spec=specs.y)
        straight, turned = rounded_both_ways(rounded)
        dx = on_each_device(
            to_x,
            (straight, weight),
            dtypes=(how.gradient_dtype, fp8.FORWARD),
            out_dtype=dtype,
            specs=(specs.y, specs.weight),
            out=x_spec,
        )
        whole, pull = jax.vjp(lambda stored: gather(stored, dtype=wide), stored)
        if how.weight_gradients:
            dweight = on_each_device(
                to_weight,
                (x, turned),
                dtypes=(fp8.FORWARD, how.gradient_dtype),
                out_dtype=wide,
                specs=(specs.x, specs.y),
                out=P(*specs.weight, unreduced=jax.typeof(whole).sharding.spec.reduced),
            )
        else:
            dweight = _weight_gradient(subscripts, x, weight=whole, grad=grad, out=out, wide=wide)
        return dx, *pull(dweight), _metered(amax, of_gradient, how=how, meter=meter)

    product.defvjp(forward, backward)
    return shd.constrain(product(x, stored, meter), out)


def _free_axes() -> tuple[str, ...]:
    """All mesh axes that are not manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in mesh.axis_names if axis not in mesh.manual_axes)


def _metered(amax, of_gradient, *, how: fp8.Fp8, meter: delayed.Meter | None):
    """The gradient of the meter."""
    if meter is None:
        return None
    dtypes = fp8.FORWARD, how.gradient_dtype
    if (spec := fp8.spec_of(of_gradient)) is not None:
        # What a stage has kept is no longer known to be split, if that is over axes of size 1.
        amax = jax.sharding.reshard(amax, spec)
    counts = delayed.counts_of(amax, of_gradient_N=of_gradient, dtypes=dtypes)
    counts = counts.astype(meter.counts_N2E.dtype)
    return delayed.Meter(jax.tree.map(jnp.zeros_like, meter.factors), counts)


def _scales(stored, *, runs: tuple[int, ...]):
    """Those of a weight's runs, and those of what each device has of the runs.

    Blocks that are split between devices have one scale all the same: their parts' largest values
    are gathered first.
    """
    spec = fp8.spec_of(stored)
    parts = runs
    if spec is not None and not fp8.are_whole(runs, stored.shape):
        own = _part_of(stored.shape, spec)
        parts = tuple(math.gcd(run, mine) for run, mine in zip(runs, own, strict=True))
    if parts == runs:
        scale = checkpoint_name(fp8.scale_for(stored, fp8.FORWARD, runs=runs), SCALES)
        return scale, scale
    rest = tuple(run // part for run, part in zip(runs, parts, strict=True))
    amax = jax.sharding.reshard(fp8.largest(stored, runs=parts), P())
    scale = checkpoint_name(fp8.scale_for(amax, fp8.FORWARD, runs=rest), SCALES)
    here = scale
    for dim, times in enumerate(rest):
        here = jnp.repeat(here, times, axis=dim)
    return scale, jax.sharding.reshard(here, spec)


def _named(values):
    """GATHERED. As whole numbers: jax rounds floats that it keeps by IEEE's rule, which e4m3 is
    not: of 256 and above it makes NaNs (0.10.2, on CPUs)."""
    named = checkpoint_name(jax.lax.bitcast_convert_type(values, jnp.uint8), GATHERED)
    return jax.lax.bitcast_convert_type(named, values.dtype)


def _as_it_came(x, spec: P) -> P:
    """x's own layout where its type says it, so that its gradient has the same."""
    sharding = jax.typeof(x).sharding
    return sharding.spec if AxisType.Explicit in sharding.mesh.axis_types else spec


def _values_of(array):
    """Without the promise of how its gradient is summed."""
    spec = jax.typeof(array).sharding.spec
    return jax.sharding.reshard(array, P(*spec.partitions)) if spec.reduced else array
