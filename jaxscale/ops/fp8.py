"""8-bit floating-point operands of products: how they are scaled, and the product of two.

Sources: FP8 Formats for Deep Learning (Micikevicius et al. 2022, arXiv:2209.05433); tensorwise and
rowwise current scaling as in torchao; blockwise as in DeepSeek-V3 (arXiv:2412.19437, 3.3). What is
scaled by the updates before is in `ops/delayed.py`.

Scales are powers of two. A value then keeps its three (e4m3) or two (e5m2) bits of mantissa
whatever the scale is, unless it is so small beside the largest that it leaves the range. So devices
can have scales of their own and results differ by such values alone, and undoing a scale rounds
nothing. It costs less than one of e4m3's 18 binades.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxscale.config import Float8, PrecisionConfig, Recipe
from jaxscale.kernels import block_scaled_matmul, quantize
from jaxscale.kernels.block_scaled_matmul import BLOCK
from jaxscale.kernels.quantize import STRAIGHT, TURNED, WAYS

FORWARD = jnp.float8_e4m3fn

# Hopper's tensor cores read 16 bytes of an operand at once; cuBLASLt has no other products.
MULTIPLE = 16
# Recipes whose roundings take the program that reads once, where it runs. Of a layer of Llama 3 8B
# and 16,384 tokens it moves 4.7 GB instead of 8.3 blockwise. Tensorwise it is 1.5 times as fast as
# XLA (0.33 ms, 0.49, both ways, [16384, 14336], H200), but no step has been timed with it, and its
# launches are outside of CUDA graphs, with no transfer beside them. Rowwise, a row has to be read
# to its end before its first value can be rounded.
READ_ONCE: tuple[Recipe, ...] = (Recipe.FP8_BLOCKWISE,)

# With one scale for all of an operand.
TENSORWISE = (Recipe.FP8_TENSORWISE, Recipe.FP8_DELAYED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8:
    """Which products with weights are made in 8 bits, and how.

    names: of the weights, or parts of them; empty: all. gradient: of what comes backwards, E4M3 or
    E5M2. weight_gradients: whether the weights' own gradients are such products too. num_first,
    num_last: layers of a stack, at its ends, that have none. observe: called on the host with what
    is rounded, as `tell` says; None: nobody looks.
    """

    recipe: Recipe
    names: tuple[str, ...]
    gradient: Float8
    weight_gradients: bool
    num_first: int
    num_last: int
    observe: Callable[..., None] | None = None

    @property
    def gradient_dtype(self):
        return jnp.float8_e5m2 if self.gradient == Float8.E5M2 else jnp.float8_e4m3fn

    def is_for(self, name: str) -> bool:
        """Whether the products of the weight of this name ("qkv") are."""
        return not self.names or any(part in name for part in self.names)


def fp8_of(config: PrecisionConfig) -> Fp8 | None:
    """None where no product is made in 8 bits."""
    if config.recipe == Recipe.DTYPE:
        return None
    gradient = config.gradients
    if gradient == Float8.AUTO:
        gradient = Float8.E5M2 if config.recipe in TENSORWISE else Float8.E4M3
    return Fp8(
        recipe=config.recipe,
        names=config.weights,
        gradient=gradient,
        weight_gradients=config.weight_gradients,
        num_first=config.first_layers_as_dtype,
        num_last=config.last_layers_as_dtype,
    )


class Quantised(NamedTuple):
    """values * scale is what was quantised. scale: float32, one for each run of values.

    Along a dimension of n values it has n // run: size 1 where all share one.
    """

    values: jax.Array
    scale: jax.Array


def are_whole(runs: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether there is one run along a dimension, or one for each value."""
    return all(run in (1, size) for run, size in zip(runs, shape, strict=True))


def largest(x, *, runs: tuple[int, ...]):
    """Of each run's values the largest, without its sign; runs: how many along each dimension."""
    x = jnp.abs(x)
    if are_whole(runs, x.shape):
        shared = tuple(i for i, run in enumerate(runs) if run > 1)
        return jnp.max(x, axis=shared, keepdims=True)
    return jnp.max(_in_runs(x, runs), axis=tuple(range(1, 2 * x.ndim, 2)))


def scale_for(x, dtype, *, runs: tuple[int, ...]):
    """For each run the least power of two that brings x, divided by it, into the range of dtype.

    float32. NaN where x has one, or an infinity.
    """
    return quantize.scale_of(largest(x, runs=runs).astype(jnp.float32), dtype)


def quantise(x, dtype, *, runs: tuple[int, ...]) -> Quantised:
    """x with a scale for each of its runs."""
    return quantise_with(scale_for(x, dtype, runs=runs), x, dtype=dtype)


def quantise_with(scale, x, *, dtype) -> Quantised:
    """x divided by `scale`, which brings it into dtype's range, and rounded to nearest."""
    # A stage that has nothing to do reads scales that nobody wrote: zeros.
    wide, inverse = x.astype(jnp.float32), jnp.where(scale == 0, 0, 1 / scale)
    runs = tuple(size // few for size, few in zip(x.shape, scale.shape, strict=True))
    if are_whole(runs, x.shape):
        return Quantised((wide * inverse).astype(dtype), scale)
    inverse = jnp.expand_dims(inverse, range(1, 2 * x.ndim, 2))
    values = (_in_runs(wide, runs) * inverse).astype(dtype)
    return Quantised(jax.lax.reshape(values, x.shape, out_sharding=spec_of(x)), scale)


def _in_runs(x, runs: tuple[int, ...]):
    """Each dimension as two: the runs, of which a device has whole ones, and what is in one."""
    pairs = [(size // run, run) for size, run in zip(x.shape, runs, strict=True)]
    if (spec := spec_of(x)) is not None:
        spec = P(*(entry for dim in spec.partitions for entry in (dim, None)))
    return jax.lax.reshape(x, [size for pair in pairs for size in pair], out_sharding=spec)


def spec_of(x) -> P | None:
    """As its type tells."""
    sharding = jax.typeof(x).sharding
    return sharding.spec if AxisType.Explicit in sharding.mesh.axis_types else None


# Exponents that a scale may have, from the least on.
EXPONENTS = range(quantize.LEAST_EXPONENT, quantize.MOST_EXPONENT + 1)


def tell(observe: Callable[..., None] | None, what: str, *, before, after: Quantised) -> None:
    """observe(what, numbers, scales=), on the host: float32 [3], and int32 [len(EXPONENTS)].

    numbers: the values that are not 0, of these those that rounding makes 0, and those that it
    brings to the most there is. scales: how many have which exponent.
    """
    if observe is None:
        return
    is_there, most = before != 0, float(jnp.finfo(after.values.dtype).max)
    values = jnp.abs(after.values.astype(jnp.float32))
    counted = (is_there, is_there & (values == 0), values == most)
    numbers = jnp.stack([jnp.sum(x, dtype=jnp.float32) for x in counted])
    powers = jnp.frexp(after.scale)[1][..., None] - 1
    is_power = powers == jnp.arange(EXPONENTS.start, EXPONENTS.stop)
    scales = jnp.sum(is_power, axis=range(is_power.ndim - 1), dtype=jnp.int32)
    jax.debug.callback(functools.partial(observe, what), numbers, scales=scales)


def runs_of(
    subscripts: str,
    operand: int,
    *,
    shape: tuple[int, ...],
    recipe: Recipe,
    is_weight: bool = False,
) -> tuple[int, ...]:
    """How many values along each dimension of an operand of `subscripts` (0 or 1) share a scale.

    Blockwise 128 of the sum do, and of a weight 128 x 128; `objection` is None for their sizes.
    """
    inputs, result = subscripts.split("->")
    letters = inputs.split(",")[operand]
    sizes = dict(zip(letters, shape, strict=True))
    if recipe in TENSORWISE:
        return shape
    kept, summed = ([dim for dim in letters if (dim in result) == is_kept] for is_kept in (1, 0))
    if recipe == Recipe.FP8_ROWWISE:
        return tuple(sizes[dim] if dim in summed else 1 for dim in letters)
    found = dict.fromkeys(letters, 1)
    for group in (summed, kept) if is_weight else (summed,):
        runs = _runs_of_block([sizes[dim] for dim in group])
        assert runs is not None, "`objection` says no"
        found |= zip(group, runs, strict=True)
    return tuple(found[dim] for dim in letters)


def _runs_of_block(sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Of 128 neighbours in an array of these sizes, how many are along each dimension.

    None where the array does not consist of such blocks.
    """
    left, runs = BLOCK, []
    for size in reversed(sizes):
        runs.append(min(size, left))
        if size % runs[-1] or left % runs[-1]:
            return None
        left //= runs[-1]
    return tuple(reversed(runs)) if left == 1 else None


def objection(sizes: Sequence[int], *, recipe: Recipe) -> str | None:
    """What is wrong with a device's tokens, inputs or outputs of these sizes, if anything."""
    if recipe == Recipe.FP8_BLOCKWISE:
        return None if _runs_of_block(sizes) else f"not in whole blocks of {BLOCK}"
    return f"no multiple of {MULTIPLE}" if math.prod(sizes) % MULTIPLE else None


def product(
    subscripts: str,
    operands,
    *,
    recipe: Recipe,
    dtypes,
    out_dtype,
    is_accurate: bool = False,
    is_written: bool = False,
    platform: str = "cpu",
    compute_capability: str = "9.0",
    told: Callable[..., None] | None = None,
):
    """The einsum of two operands in 8 bits, added up in float32, as `out_dtype`.

    operands: `Quantised`, or arrays that are quantised here, to these dtypes. The result has all
    that one of them keeps before what the other keeps. is_accurate: sums are moved from the tensor
    cores' short accumulators to float32 again and again, as gradients need; blockwise they always
    are. is_written: whether what is quantised here is in memory in any case, so that reading it is
    not saved by leaving the rounding to what makes it (`rounding_objection`). platform,
    compute_capability: of the devices. told: called with `before` and `after` of each operand that
    is quantised here.
    """
    inputs, result = subscripts.split("->")
    summed = [dim for dim in inputs.split(",")[0] if dim not in result]
    parts = []
    for i, dims in enumerate(inputs.split(",")):
        operand = operands[i]
        if not isinstance(operand, Quantised):
            before = operand
            operand = _rounded(
                before,
                dtypes[i],
                subscripts=subscripts,
                operand=i,
                recipe=recipe,
                is_written=is_written,
                platform=platform,
                compute_capability=compute_capability,
            )
            if told is not None:
                told(before=before, after=operand)
        parts.append(_as_matrix(operand, dims=dims, last=summed))
    (lhs, lhs_shape), (rhs, rhs_shape) = parts if result[0] in inputs.split(",")[0] else parts[::-1]
    if recipe == Recipe.FP8_BLOCKWISE:
        multiply = _block_multiplier(
            lhs.values, rhs.values, platform=platform, compute_capability=compute_capability
        )
        y = multiply(
            lhs.values,
            rhs.values,
            lhs_scale=lhs.scale,
            rhs_scale=rhs.scale,
            out_dtype=out_dtype,
        )
        return y.reshape(lhs_shape + rhs_shape)
    multiply = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if is_accurate else jax.lax.Precision.DEFAULT,
        preferred_element_type=out_dtype,
    )
    if recipe in TENSORWISE:
        # XLA makes one product of operands in 8 bits of it, which undoes both scales as it writes.
        y = multiply(_wide(lhs), _wide(rhs))
    else:
        # Multiplied by powers of two: rounding before is rounding after.
        y = multiply(lhs.values, rhs.values).astype(jnp.float32) * lhs.scale * rhs.scale.T
    return y.astype(out_dtype).reshape(lhs_shape + rhs_shape)


def _rounded(
    x,
    dtype,
    *,
    subscripts: str,
    operand: int,
    recipe: Recipe,
    is_written: bool,
    platform: str,
    compute_capability: str,
) -> Quantised:
    """An operand, by the program that reads it once where that gains, else by XLA."""
    way = _way(subscripts, operand)
    # One scale and x as it is: XLA's pass, too, reads once and writes once.
    is_plain = recipe == Recipe.FP8_TENSORWISE and way is not None and way[0] == STRAIGHT
    if is_written and way is not None and not is_plain:
        how: dict[str, Any] = dict(recipe=recipe, compute_capability=compute_capability)
        if rounding_objection(x.shape, way[1], platform=platform, **how) is None:
            return read_once(x, dtype, ways=way[:1], split=way[1], **how)[0]
    return quantise(x, dtype, runs=runs_of(subscripts, operand, shape=x.shape, recipe=recipe))


def _way(subscripts: str, operand: int) -> tuple[str, int] | None:
    """As what the product wants an operand that is seen as a matrix: (STRAIGHT or TURNED, split).

    Its rows are its first `split` dimensions. None where what is summed is neither first nor last.
    """
    inputs, result = subscripts.split("->")
    is_kept = [letter in result for letter in inputs.split(",")[operand]]
    num_kept, num_summed = is_kept.count(True), is_kept.count(False)
    if all(is_kept[:num_kept]):
        return STRAIGHT, num_kept
    return None if any(is_kept[:num_summed]) else (TURNED, num_summed)


def rounding_objection(
    shape: Sequence[int],
    split: int,
    *,
    recipe: Recipe,
    platform: str,
    compute_capability: str,
) -> str | None:
    """Why `read_once` cannot round a device's part of this shape, if anything."""
    if recipe not in READ_ONCE:
        return f"with {recipe.value} XLA rounds"
    matrix = jax.ShapeDtypeStruct(
        (math.prod(shape[:split]), math.prod(shape[split:])), jnp.bfloat16
    )
    return quantize.supported(
        matrix,
        platform=platform,
        compute_capability=compute_capability,
        has_scale=recipe == Recipe.FP8_TENSORWISE,
    )


def read_once(
    x,
    dtype,
    *,
    split: int,
    recipe: Recipe,
    compute_capability: str,
    ways: Sequence[str] = WAYS,
) -> list[Quantised]:
    """x, as `quantise` makes it for products that sum over its last dimensions (STRAIGHT) and over
    its first `split` ones (TURNED), by a program that reads it once (`kernels/quantize.py`).

    Tensorwise after its largest value has been found. Of a device's own part.
    """
    rows, columns = x.shape[:split], x.shape[split:]
    scale = None
    if recipe == Recipe.FP8_TENSORWISE:
        scale = scale_for(x, dtype, runs=x.shape)
    pairs = quantize.quantize(
        x.reshape(math.prod(rows), math.prod(columns)),
        dtype,
        ways=ways,
        scale=None if scale is None else scale.reshape(()),
        compute_capability=compute_capability,
    )
    made = []
    for way, (values, scales) in zip(ways, pairs, strict=True):
        kept, summed = (rows, columns) if way == STRAIGHT else (columns, rows)
        values = values.reshape(kept + summed)
        if scale is None:
            scales = scales.reshape(kept + _num_blocks(summed))
        else:
            scales = scale
        if way == TURNED:
            # Back again, as views: `_as_matrix` turns them once more, and XLA leaves out both.
            order = (*range(len(kept), x.ndim), *range(len(kept)))
            values = values.transpose(order)
            scales = scales if scale is not None else scales.transpose(order)
        made.append(Quantised(values, scales))
    return made


def _num_blocks(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Along each of these dimensions, 128 of which together have one scale."""
    runs = _runs_of_block(sizes)
    assert runs is not None, "`objection` says no"
    return tuple(size // run for size, run in zip(sizes, runs, strict=True))


def _block_multiplier(lhs, rhs, *, platform: str, compute_capability: str):
    """The kernel; or, where the config says `emulate`, the same of wide operands."""
    kernel = block_scaled_matmul
    reason = kernel.supported(lhs, rhs, platform=platform, compute_capability=compute_capability)
    return kernel.multiply if reason is None else kernel.reference


def _as_matrix(
    operand: Quantised, *, dims: str, last: list[str]
) -> tuple[Quantised, tuple[int, ...]]:
    """[what is kept, what is summed], as cuBLASLt wants both, and the sizes of what is kept.

    Left to XLA, the order of several dimensions that are summed may be none that either operand is
    in: 0.25 GB more is moved for q, k and v of a layer of Llama 3 8B and 16,384 tokens.
    """
    kept = [dim for dim in dims if dim not in last]
    order = [dims.index(dim) for dim in (*kept, *last)]
    values, scale = (jnp.transpose(array, order) for array in operand)
    shape = values.shape[: len(kept)]
    num_scales = math.prod(scale.shape[: len(kept)])
    matrix = Quantised(values.reshape(math.prod(shape), -1), scale.reshape(num_scales, -1))
    return matrix, shape


def _wide(operand: Quantised):
    """What was quantised, in bfloat16, which holds the values and the scale without rounding."""
    return operand.values.astype(jnp.bfloat16) * operand.scale.astype(jnp.bfloat16)
