"""Products of operands in 8 bits timed beside one another, and checked against float32.

M rows, N columns of the result, K what is summed.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

from jaxscale.config import Recipe
from jaxscale.ops import fp8
from jaxscale.perf.turns import error, in_turns

PRODUCT = "MK,NK->MN"
# Of the result: a float32 check of all rows would take a second a case.
CHECKED_ROWS = 512
# Delayed scales are multiplied by as tensorwise ones are.
RECIPES = [recipe for recipe in Recipe if recipe not in (Recipe.DTYPE, Recipe.FP8_DELAYED)]


@dataclasses.dataclass(frozen=True)
class Case:
    rows: int
    summed: int
    columns: int
    # Whether the second operand is a weight, or what comes backwards.
    is_weight: bool = True

    def flop(self) -> int:
        return 2 * self.rows * self.summed * self.columns


# Of a layer of Llama 3 8B, 16,384 tokens.
CASES = {
    "out": Case(16384, 4096, 4096),
    "up": Case(16384, 4096, 14336),
    "down": Case(16384, 14336, 4096),
    "up_gradient": Case(14336, 16384, 4096, is_weight=False),
    "tiny": Case(128, 256, 128),
}


def measure(names: Sequence[str]) -> Iterator[str]:
    """Lines of text: what is timed on what, then a line for each recipe of each case."""
    yield f"{jax.devices()[0].device_kind}, jax {jax.__version__}, results in bfloat16"
    for name in names:
        yield from _case(name, CASES[name])


def _case(name: str, case: Case) -> Iterator[str]:
    yield f"{name}: [{case.rows}, {case.summed}] times [{case.summed}, {case.columns}]"
    keys = jax.random.split(jax.random.key(0))
    lhs, rhs = (
        jax.random.normal(key, (lines, case.summed), jnp.bfloat16)
        for key, lines in zip(keys, (case.rows, case.columns), strict=True)
    )
    functions: dict[str, Callable] = {"bfloat16": jax.jit(_in_bfloat16)}
    # What every program of a run is compiled with: else XLA leaves out the rounding on GPUs.
    exact = {"xla_allow_excess_precision": False}
    for recipe in RECIPES:
        product = functools.partial(_product, case=case, recipe=recipe)
        functions[recipe.value] = jax.jit(product, compiler_options=exact)
    with_rounding = in_turns(functions, (lhs, rhs))
    products: dict[str, Callable] = {"bfloat16": functools.partial(jax.jit(_in_bfloat16), lhs, rhs)}
    for recipe in RECIPES:
        operands = _rounded(lhs, rhs, case=case, recipe=recipe)
        products[recipe.value] = functools.partial(jax.jit(_multiplier(recipe)), *operands)
    alone = in_turns(products, ())
    expected = jnp.einsum(
        PRODUCT, *(x.astype(jnp.float32) for x in (lhs[:CHECKED_ROWS], rhs)), precision="highest"
    )
    for name, function in functions.items():
        off = error(function(lhs, rhs)[:CHECKED_ROWS], expected)
        yield (
            f"  {name:15s} product {alone[name]:8.3f} ms "
            f"{case.flop() / alone[name] / 1e9:5.0f} TFLOP/s  with rounding "
            f"{with_rounding[name]:8.3f} ms  error {off:.1e}"
        )


def _in_bfloat16(lhs_MK: jax.Array, rhs_NK: jax.Array) -> jax.Array:
    return jnp.einsum(PRODUCT, lhs_MK, rhs_NK)


def _product(lhs_MK: jax.Array, rhs_NK: jax.Array, *, case: Case, recipe: Recipe) -> jax.Array:
    operands = _quantised(lhs_MK, rhs_NK, case=case, recipe=recipe)
    return _multiplier(recipe)(*operands)


def _multiplier(recipe: Recipe) -> Callable[[fp8.Quantised, fp8.Quantised], jax.Array]:
    def multiply(lhs: fp8.Quantised, rhs: fp8.Quantised) -> jax.Array:
        return fp8.product(
            PRODUCT,
            (lhs, rhs),
            recipe=recipe,
            dtypes=(fp8.FORWARD, fp8.FORWARD),
            out_dtype=jnp.bfloat16,
            platform=jax.default_backend(),
            compute_capability=getattr(jax.devices()[0], "compute_capability", "9.0"),
        )

    return multiply


def _rounded(lhs_MK: jax.Array, rhs_NK: jax.Array, *, case: Case, recipe: Recipe):
    quantised = functools.partial(_quantised, case=case, recipe=recipe)
    return jax.jit(quantised)(lhs_MK, rhs_NK)


def _quantised(lhs_MK, rhs_NK, *, case: Case, recipe: Recipe) -> list[fp8.Quantised]:
    quantised = []
    for i, operand in enumerate((lhs_MK, rhs_NK)):
        runs = fp8.runs_of(
            PRODUCT,
            i,
            shape=operand.shape,
            recipe=recipe,
            is_weight=i == 1 and case.is_weight,
        )
        quantised.append(fp8.quantise(operand, fp8.FORWARD, runs=runs))
    return quantised
