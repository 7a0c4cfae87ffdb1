"""Products of rows with the matrix of their group: what dropless experts are made of.

T rows (tokens), R runs of them, E groups (experts), K rows and N columns of a matrix.
"""

import functools

import jax
import jax.numpy as jnp

from jaxscale import sharding as shd
from jaxscale import warned
from jaxscale.config import Recipe
from jaxscale.kernels import grouped_fp8, grouped_matmul, quantize_grouped
from jaxscale.ops import fp8
from jaxscale.ops.execution import Execution


def grouped_product(
    x_TK,
    w_EKN,
    *,
    group_sizes_RE,
    name: str,
    execution: Execution,
    tokens: str = "batch",
    inputs: str = "_",
    outputs: str = "_",
):
    """y_TN: each row of x times w[e] of its group e, in x's dtype; rows of no group give zeros.

    Each device has a run of rows of its own, sorted by group: R is the number of devices that split
    the rows (1 outside of `sharding.use`), and group_sizes_RE says how long each group of each run
    is; integers, of a run no more than its rows. No capacity, no padding; sums are float32. The
    gradient of w has w's dtype, float32 or x's.

    name: by which config.precision.weights speaks of w. Where it is named there, y and the gradient
    of x are products in 8 bits, with a scale for each row and each of a device's matrices; where no
    weights are named, which is all of the others, it is not (docs/precision.md).

    tokens, inputs, outputs: the logical axes of T, K and N. Of the mesh axes that split inputs y is
    the sum. E is whole on each device. Raises ValueError for shapes that do not fit each other.
    """
    summed_over = shd.mesh_axes(inputs)

    def local(x_TK, w_EKN, group_sizes_RE):
        if len(group_sizes_RE) != 1:
            raise ValueError(
                f"group_sizes has {len(group_sizes_RE)} runs on each device that splits "
                f"{tokens!r}; it must have one"
            )
        y_TN = _on_device(x_TK, w_EKN, group_sizes_RE[0], name=name, execution=execution)
        return jax.lax.psum(y_TN, summed_over) if summed_over else y_TN

    mapped = shd.shard_map(
        local,
        in_axes=(f"{tokens} {inputs}", f"_ {inputs} {outputs}", f"{tokens} _"),
        out_axes=f"{tokens} {outputs}",
    )
    return mapped(x_TK, w_EKN, group_sizes_RE)


def _on_device(x_TK, w_EKN, group_sizes_E, *, name: str, execution: Execution):
    if (how := execution.fp8) is not None and how.is_for(name):
        if not (objection := _objection(w_EKN, how=how)):
            operands = _varying_alike(x_TK, w_EKN, group_sizes_E)
            return _in_8_bits(*operands, name=name, execution=execution)
        warned.once(f"products of {name!r} are made in {x_TK.dtype.name}: {objection}")
    reason = grouped_matmul.supported(x_TK, w_EKN, **_device(execution))
    if reason is None:
        x_TK, w_EKN, group_sizes_E = _varying_alike(x_TK, w_EKN, group_sizes_E)
        return grouped_matmul.grouped_matmul(x_TK, w_EKN, group_sizes_E=group_sizes_E)
    if execution.platform != "cpu":
        warned.once(f"all rows are multiplied with all {len(w_EKN)} matrices: {reason}")
    return grouped_matmul.reference(x_TK, w_EKN, group_sizes_E=group_sizes_E)


def _device(execution: Execution) -> dict[str, str]:
    return dict(platform=execution.platform, compute_capability=execution.compute_capability)


def _varying_alike(*arrays):
    """Over the mesh axes that any of them varies over, so that gradients are summed over them."""
    varying = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(array, tuple(union - mine), to="varying") if union - mine else array
        for array, mine in zip(arrays, varying, strict=True)
    ]


# Products of operands in 8 bits.


def _objection(w_EKN, *, how: fp8.Fp8) -> str | None:
    """Why there is no such product of these matrices, if so."""
    if not how.names:
        return (
            "grouped products are in 8 bits where config.precision.weights names them; with few "
            "rows a group rounding costs more than they gain"
        )
    if how.recipe != Recipe.FP8_TENSORWISE:
        return f"grouped products know {Recipe.FP8_TENSORWISE.value}, not {how.recipe.value}"
    odd = grouped_fp8.objection(w_EKN.shape)
    return f"a device's matrices are {odd}" if odd else None


def _in_8_bits(x_TK, w_EKN, group_sizes_E, *, name: str, execution: Execution):
    """y and x's gradient of operands in 8 bits; w's gradient in x's dtype.

    A sum over a group's few rows has more to read and store than to multiply: with 256 rows a group
    half the bytes of x and of what comes backwards are 16% of all, and turning both over would
    move as many.
    """
    grouped_matmul.check(x_TK, w_EKN, group_sizes_E=group_sizes_E)
    how, dtype = execution.fp8, x_TK.dtype
    assert how is not None
    if how.weight_gradients:
        warned.once(f"the gradients of the matrices {name!r} are made in {dtype.name}")
    tell = functools.partial(fp8.tell, how.observe)
    multiply = functools.partial(multiply_8_bits, out_dtype=dtype, execution=execution)

    @jax.custom_vjp
    def product(x_TK, w_EKN, group_sizes_E):
        return forward(x_TK, w_EKN, group_sizes_E)[0]

    def forward(x_TK, w_EKN, group_sizes_E):
        # Out of x's dtype, as `linear` rounds weights.
        narrow_EKN = w_EKN.astype(dtype)
        w, turned = matrices_in_8_bits(narrow_EKN, execution=execution)
        tell(f"{name}.weight", before=narrow_EKN, after=w)
        x = rows_in_8_bits(x_TK, dtype=fp8.FORWARD, execution=execution)
        tell(f"{name}.x", before=x_TK, after=x)
        y_TN = multiply(x, turned, group_sizes_E=group_sizes_E)
        # An array without values tells the dtype of the gradient.
        return y_TN, (x_TK, w, group_sizes_E, jnp.zeros((0,), w_EKN.dtype))

    def backward(residuals, grad_TN):
        x_TK, w, group_sizes_E, like_w = residuals
        grad = rows_in_8_bits(grad_TN, dtype=how.gradient_dtype, execution=execution)
        tell(f"{name}.gradient", before=grad_TN, after=grad)
        dx_TK = multiply(grad, w, group_sizes_E=group_sizes_E)
        weight_gradient = _weight_gradient_by(x_TK, w.values.shape, execution=execution)
        options = dict(group_sizes_E=group_sizes_E, out_dtype=like_w.dtype)
        return dx_TK, weight_gradient(x_TK, grad_TN, **options), None

    product.defvjp(forward, backward)
    return product(x_TK, w_EKN, group_sizes_E)


def matrices_in_8_bits(w_EKN, *, execution: Execution) -> tuple[fp8.Quantised, fp8.Quantised]:
    """w as it is, for x's gradient, and [E, N, K], for y; a scale for each matrix."""
    reason = quantize_grouped.matrices_supported(w_EKN, **_device(execution))
    if reason is None:
        values_EKN, turned_ENK, scale_E = quantize_grouped.quantize_matrices(
            w_EKN, fp8.FORWARD, compute_capability=execution.compute_capability
        )
        scale = scale_E[:, None, None]
        return fp8.Quantised(values_EKN, scale), fp8.Quantised(turned_ENK, scale)
    _say_who_rounds(reason, execution=execution)
    w = fp8.quantise(w_EKN, fp8.FORWARD, runs=(1, *w_EKN.shape[1:]))
    return w, fp8.Quantised(w.values.transpose(0, 2, 1), w.scale)


def rows_in_8_bits(x_TK, *, dtype, execution: Execution) -> fp8.Quantised:
    """With a scale for each row: a row is at hand when its largest value is known."""
    reason = quantize_grouped.rows_supported(x_TK, **_device(execution))
    if reason is None:
        values_TK, scale_T = quantize_grouped.quantize_rows(
            x_TK, dtype, compute_capability=execution.compute_capability
        )
        return fp8.Quantised(values_TK, scale_T[:, None])
    _say_who_rounds(reason, execution=execution)
    return fp8.quantise(x_TK, dtype, runs=(1, x_TK.shape[1]))


def _say_who_rounds(reason: str, *, execution: Execution) -> None:
    if execution.platform != "cpu":
        warned.once(f"XLA rounds what grouped products read in 8 bits: {reason}")


def multiply_8_bits(
    x: fp8.Quantised,
    w: fp8.Quantised,
    *,
    group_sizes_E,
    out_dtype,
    execution: Execution,
):
    """By our kernel; or, where the config says `emulate`, the same of wide operands."""
    scales = dict(x_scale_T=x.scale.reshape(-1), w_scale_E=w.scale.reshape(-1))
    options = dict(group_sizes_E=group_sizes_E, out_dtype=out_dtype, **scales)
    reason = grouped_fp8.supported(x.values, w.values, **_device(execution))
    if reason is None:
        return grouped_fp8.multiply(x.values, w.values, **options)
    if execution.platform != "cpu":
        warned.once(f"all rows are multiplied with all {len(w.values)} matrices: {reason}")
    return grouped_fp8.reference(x.values, w.values, **options)


def _weight_gradient_by(x_TK, shape, *, execution: Execution):
    """Our kernel, or XLA."""
    matrices_EKN = jax.ShapeDtypeStruct(shape, x_TK.dtype)
    if grouped_matmul.supported(x_TK, matrices_EKN, **_device(execution)):
        return grouped_matmul.reference_weight_gradient
    return grouped_matmul.weight_gradient
