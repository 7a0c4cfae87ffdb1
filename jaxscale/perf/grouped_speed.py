"""Grouped products timed beside `lax.ragged_dot` and a dense product, and checked against float32.

T rows (tokens), E groups (experts), K rows and N columns of a matrix.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.kernels import grouped_fp8, grouped_gradient, grouped_matmul, grouped_programs
from jaxscale.ops import fp8
from jaxscale.ops.execution import Execution
from jaxscale.ops.grouped import matrices_in_8_bits, multiply_8_bits, rows_in_8_bits
from jaxscale.perf.turns import in_one_program, in_turns

PRODUCTS = ("forward", "dgrad", "wgrad")
# Of lax.ragged_dot, which expands each row to all groups on a GPU.
MOST_EXPANDED_GIB = 20
# Products of one program, each with arrays of its own.
PRODUCTS_A_PROGRAM = 8


@dataclasses.dataclass(frozen=True)
class Case:
    rows: int
    groups: int
    summed: int = 2048
    columns: int = 768
    # Of a Dirichlet distribution from which groups' shares are drawn; None: all are equal.
    evenness: float | None = None
    # Rows behind the last group.
    unused: int = 0

    def sizes(self) -> np.ndarray:
        rows = self.rows - self.unused
        if self.evenness is None:
            return np.full(self.groups, rows // self.groups, np.int32)
        rng = np.random.default_rng(0)
        shares = rng.dirichlet(np.full(self.groups, self.evenness))
        return rng.multinomial(rows, shares).astype(np.int32)

    def flop(self) -> int:
        return 2 * int(self.sizes().sum()) * self.summed * self.columns


# The matrices of Qwen3-30B-A3B; `top8`: of 16,384 tokens, each of 8 experts.
CASES = {
    "e64_equal": Case(16384, 64),
    "e64": Case(16384, 64, evenness=2.0),
    "e128_equal": Case(16384, 128),
    "e128": Case(16384, 128, evenness=2.0),
    "top8": Case(8 * 16384, 128, evenness=2.0),
    "tiny": Case(256, 4, summed=128, columns=128, evenness=1.0, unused=50),
}


def measure(names: Sequence[str]) -> Iterator[str]:
    """Lines of text: what is timed on what, then a line for each product of each case."""
    yield f"{jax.devices()[0].device_kind}, jax {jax.__version__}, bfloat16"
    for name in names:
        yield from _case(name, CASES[name])


def _case(name: str, case: Case) -> Iterator[str]:
    sizes = case.sizes()
    yield (
        f"{name}: [{case.rows}, {case.summed}] times [{case.groups}, {case.summed}, "
        f"{case.columns}], groups of {sizes.min()} to {sizes.max()}, {_least_bytes(case):.2e} bytes"
    )
    sets = [operands(case, seed=seed) for seed in range(PRODUCTS_A_PROGRAM)]
    arrays = sets[0]
    reason = grouped_matmul.supported(
        *arrays[:2],
        platform=jax.default_backend(),
        compute_capability=getattr(jax.devices()[0], "compute_capability", "9.0"),
    )
    if reason:
        yield f"  without the kernel: {reason}"
    expanded_gib = case.groups * case.rows * case.summed * 2 / 2**30
    for product in PRODUCTS:
        functions: dict[str, Callable] = {"dense": DENSE[product]}
        if not reason:
            functions["ours"] = OURS[product]
            if product in ROUNDED and not grouped_fp8.objection(arrays[1].shape):
                functions["rounding and fp8"] = _with_rounding(product)
        timings = in_one_program(functions, sets)
        if "rounding and fp8" in functions:
            in_8_bits = [jax.jit(ROUNDED[product])(*each) for each in sets]
            timings |= in_one_program({"fp8": _in_8_bits}, in_8_bits)
        found = None if reason else jax.jit(OURS[product])
        if expanded_gib <= MOST_EXPANDED_GIB:
            by_xla = jax.jit(_by_xla(product))
            timings |= in_turns({"ragged_dot": by_xla}, arrays)
            found = found or by_xla
        off = errors(case, arrays, found={product: found(*arrays)})[product] if found else np.nan
        shown = "  ".join(
            f"{name} {timings[name]:8.3f} ms {case.flop() / timings[name] / 1e9:5.0f} TFLOP/s"
            for name in reversed(timings)
        )
        yield f"  {product:8s} {shown}  error {off:.1e}"


def _least_bytes(case: Case) -> float:
    """What memory must give or take in one of the products."""
    rows, matrices = int(case.sizes().sum()), int((case.sizes() > 0).sum())
    sizes = case.summed * case.columns, case.summed + case.columns
    return 2.0 * (matrices * sizes[0] + rows * sizes[1])


def operands(case: Case, *, seed: int = 0) -> tuple[jax.Array, ...]:
    """x_TK, w_EKN, the gradient of y, and the groups' sizes."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (
        (case.rows, case.summed),
        (case.groups, case.summed, case.columns),
        (case.rows, case.columns),
    )
    arrays = (jax.random.normal(*pair, jnp.bfloat16) for pair in zip(keys, shapes, strict=True))
    return *arrays, jnp.asarray(case.sizes())


def _forward(x_TK, w_EKN, grad_TN, group_sizes_E):
    return grouped_programs.multiply(x_TK, w_EKN, group_sizes_E=group_sizes_E, is_transposed=False)


def _dgrad(x_TK, w_EKN, grad_TN, group_sizes_E):
    return grouped_programs.multiply(
        grad_TN, w_EKN, group_sizes_E=group_sizes_E, is_transposed=True
    )


def _wgrad(x_TK, w_EKN, grad_TN, group_sizes_E):
    return grouped_gradient.weight_gradient(
        x_TK, grad_TN, group_sizes_E=group_sizes_E, out_dtype=w_EKN.dtype
    )


OURS: dict[str, Callable] = dict(forward=_forward, dgrad=_dgrad, wgrad=_wgrad)
# As many products of two numbers, with one matrix for all rows.
DENSE: dict[str, Callable] = dict(
    forward=lambda x_TK, w_EKN, grad_TN, _: x_TK @ w_EKN[0],
    dgrad=lambda x_TK, w_EKN, grad_TN, _: grad_TN @ w_EKN[0].T,
    wgrad=lambda x_TK, w_EKN, grad_TN, _: x_TK.T @ grad_TN,
)


# In 8 bits: the operands of a product, and the product of them.
def _forward_operands(x_TK, w_EKN, grad_TN, group_sizes_E):
    x = rows_in_8_bits(x_TK, dtype=fp8.FORWARD, execution=Execution())
    return x, matrices_in_8_bits(w_EKN, execution=Execution())[1], group_sizes_E


def _dgrad_operands(x_TK, w_EKN, grad_TN, group_sizes_E):
    grad = rows_in_8_bits(grad_TN, dtype=jnp.float8_e5m2, execution=Execution())
    return grad, matrices_in_8_bits(w_EKN, execution=Execution())[0], group_sizes_E


def _in_8_bits(x, w, group_sizes_E):
    return multiply_8_bits(
        x, w, group_sizes_E=group_sizes_E, out_dtype=jnp.bfloat16, execution=Execution()
    )


ROUNDED: dict[str, Callable] = dict(forward=_forward_operands, dgrad=_dgrad_operands)


def _with_rounding(product: str) -> Callable:
    return lambda *arrays: _in_8_bits(*ROUNDED[product](*arrays))


def _by_xla(product: str) -> Callable:
    def function(x_TK, w_EKN, grad_TN, group_sizes_E):
        def forward(x_TK, w_EKN):
            return grouped_matmul.reference(x_TK, w_EKN, group_sizes_E=group_sizes_E)

        if product == "forward":
            return forward(x_TK, w_EKN)
        return jax.vjp(forward, x_TK, w_EKN)[1](grad_TN)[product == "wgrad"]

    return function


def errors(case: Case, arrays, *, found: dict[str, jax.Array]) -> dict[str, float]:
    """Of each product found, all of it, relative to the norm of the one in float32.

    Infinite where rows of no group are not zeros.
    """
    sizes = case.sizes()
    # A window of as many rows for each group, so that one program makes them all.
    window = max(int(sizes.max()), 1)
    begins = jnp.asarray(np.cumsum(sizes) - sizes)

    @jax.jit
    def squares(x_TK, w_EKN, grad_TN, group_sizes_E, found):
        x_TK, grad_TN = (jnp.pad(x, ((0, window), (0, 0))) for x in (x_TK, grad_TN))
        found = {
            name: y if name == "wgrad" else jnp.pad(y, ((0, window), (0, 0)))
            for name, y in found.items()
        }

        def of_group(group):
            def rows_of(x):
                x = lax.dynamic_slice_in_dim(x, begins[group], window).astype(jnp.float32)
                return jnp.where(jnp.arange(window)[:, None] < group_sizes_E[group], x, 0.0)

            x, w, grad = rows_of(x_TK), w_EKN[group].astype(jnp.float32), rows_of(grad_TN)
            with jax.default_matmul_precision("highest"):
                expected = dict(forward=x @ w, dgrad=grad @ w.T, wgrad=x.T @ grad)
            mine = {
                name: y[group].astype(jnp.float32) if name == "wgrad" else rows_of(y)
                for name, y in found.items()
            }
            return {
                name: (((y - expected[name]) ** 2).sum(), (expected[name] ** 2).sum())
                for name, y in mine.items()
            }

        return lax.map(of_group, jnp.arange(case.groups))

    sums = squares(*arrays, found)
    off = {
        name: float(jnp.sqrt(difference.sum() / expected.sum()))
        for name, (difference, expected) in sums.items()
    }
    for name, y in found.items():
        if name != "wgrad" and bool(jnp.any(y[int(sizes.sum()) :] != 0)):
            off[name] = float("inf")
    return off
