"""Grouped products against NumPy: interpreted, with their races looked for, where no GPU is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.kernels import grouped_gradient, grouped_programs
from jaxscale.kernels import grouped_matmul as kernel
from jaxscale.kernels.grouped_programs import Tiles
from jaxscale.kernels.grouped_visits import ALIGNED, TILE_T, visits_of
from tests.kernels.grouped import GROUPS, check_refused, make_few_programs, needs_kernel
from tests.kernels.mosaic import interpreted

SHAPE = (128, 192)  # K, N
# Tolerances of the largest value: bfloat16 rounds once, float32 sums in some order.
ATOL = {"bfloat16": 2**-8, "float32": 1e-5}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    make_few_programs(monkeypatch)
    # Tiles in bfloat16 are held; in 8 bits they are not (test_grouped_fp8.py).
    monkeypatch.setattr(grouped_programs, "HELD_ROWS", 0)


def operands(name: str, *, shape=SHAPE, dtype=jnp.bfloat16):
    """x_TK, w_EKN, the gradient of y, sizes."""
    (num_rows, sizes), (K, N), rng = GROUPS[name], shape, np.random.default_rng(0)
    shapes = (num_rows, K), (len(sizes), K, N), (num_rows, N)
    arrays = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    x_TK, w_EKN, grad_TN = arrays
    return x_TK, w_EKN.astype(dtype), grad_TN, jnp.asarray(sizes, jnp.int32)


def expected(x_TK, w_EKN, grad_TN, sizes_E) -> list[np.ndarray]:
    """y, dx, dw."""
    x, w, grad = (np.asarray(array).astype(np.float64) for array in (x_TK, w_EKN, grad_TN))
    y, dx, dw = np.zeros_like(grad), np.zeros_like(x), np.zeros_like(w)
    ends = np.cumsum(sizes_E)
    for group, (size, end) in enumerate(zip(np.asarray(sizes_E), ends, strict=True)):
        rows = slice(end - size, end)
        y[rows], dx[rows] = x[rows] @ w[group], grad[rows] @ w[group].T
        dw[group] = x[rows].T @ grad[rows]
    return [y, dx, dw]


def made(function, x_TK, w_EKN, grad_TN, sizes_E):
    y_TN, pull = jax.vjp(lambda x, w: function(x, w, group_sizes_E=sizes_E), x_TK, w_EKN)
    return [y_TN, *pull(grad_TN)]


def assert_close(found, wanted) -> None:
    for array, value in zip(found, wanted, strict=True):
        atol = ATOL[array.dtype.name] * max(np.abs(value).max(), 1)
        np.testing.assert_allclose(np.asarray(array).astype(np.float64), value, atol=atol, rtol=0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", GROUPS)
def test_the_reference_is_each_groups_product(name, dtype):
    arrays = operands(name, dtype=dtype)
    found = made(kernel.reference, *arrays)
    # Its gradients are rounded to bfloat16, whatever comes out.
    wanted = expected(*arrays)
    assert [x.dtype for x in found] == [jnp.bfloat16, jnp.bfloat16, dtype]
    assert_close([x.astype(jnp.bfloat16) for x in found], wanted)


@needs_kernel
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, jnp.bfloat16) for name in GROUPS), ("empty ones", jnp.float32)]
)
def test_a_product_and_its_gradients_are_those_of_each_group(name, dtype):
    arrays = operands(name, dtype=dtype)
    with interpreted():
        found = made(kernel.grouped_matmul, *arrays)
    assert [x.dtype for x in found] == [jnp.bfloat16, jnp.bfloat16, dtype]
    assert_close(found, expected(*arrays))


# K, N, and tiles: more blocks of the sum than stages, and tiles that reach out of the matrix.
SHAPES = {
    "long sums": ((64 * 9, 64), Tiles(columns=64, stages=4, is_held=True)),
    "narrow tiles": ((64, 320), Tiles(columns=128, stages=2, together=2)),
    "tiles of half a matrix": ((128, 320), Tiles(columns=128, stages=2, together=2)),
    "wide tiles": ((192, 320), Tiles(columns=256, stages=2, is_held=True)),
    "more parts than blocks": ((64, 192), Tiles(columns=192, stages=3, is_held=True)),
    "three parts": ((192, 192), Tiles(columns=192, stages=3)),
}


@needs_kernel
@pytest.mark.parametrize("name", SHAPES)
def test_tiles_of_any_size_make_the_same(name):
    shape, tiles = SHAPES[name]
    x_TK, w_EKN, grad_TN, sizes_E = operands("rows of no group", shape=shape)
    options = dict(group_sizes_E=sizes_E, tiles=tiles)
    # A card makes zeros of x's gradient with tiles twice as wide as the matrix (see `Tiles`).
    is_wide = tiles.columns >= 2 * shape[0]
    of_x = options | dict(tiles=tiles._replace(columns=shape[0]) if is_wide else tiles)
    with interpreted():
        found = [
            grouped_programs.multiply(x_TK, w_EKN, is_transposed=False, **options),
            grouped_programs.multiply(grad_TN, w_EKN, is_transposed=True, **of_x),
            grouped_gradient.weight_gradient(x_TK, grad_TN, out_dtype=jnp.float32, **options),
        ]
    assert_close(found, expected(x_TK, w_EKN, grad_TN, sizes_E))


@needs_kernel
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # products not stored
def test_rows_of_no_group_may_hold_anything():
    x_TK, w_EKN, grad_TN, sizes_E = operands("rows of no group")
    used = int(sizes_E.sum())
    wanted = expected(x_TK, w_EKN, grad_TN, sizes_E)
    x_TK, grad_TN = x_TK.at[used:].set(np.nan), grad_TN.at[used:].set(np.inf)
    with interpreted():
        found = made(kernel.grouped_matmul, x_TK, w_EKN, grad_TN, sizes_E)
    assert_close(found, wanted)


@pytest.mark.parametrize("seed", range(20))
def test_tiles_cover_each_row_once_and_begin_where_shared_memory_lets_them(seed):
    rng = np.random.default_rng(seed)
    num_groups, num_rows = int(rng.integers(1, 40)), int(rng.integers(1, 200)) * ALIGNED
    used = int(rng.integers(0, num_rows + 1))
    sizes = rng.multinomial(used, rng.dirichlet(np.full(num_groups, 0.3)))
    visits = visits_of(jnp.asarray(sizes, jnp.int32), num_rows=num_rows)
    num, tiles = int(visits.counts[-1]), np.asarray(visits.tiles)
    group_of_row = np.repeat(np.arange(num_groups + 1), [*sizes, num_rows - used])
    seen = np.zeros(num_rows, int)
    assert num <= len(tiles)
    for group, first, begin, end in tiles[:num]:
        assert first % ALIGNED == 0 and first <= begin < end <= first + TILE_T
        assert (group_of_row[begin:end] == group).all()
        seen[begin:end] += 1
    assert (seen == 1).all()
    # One tile more than whole ones for each group that is there, and for the rows of none.
    there = np.count_nonzero([*sizes, num_rows - used])
    assert num <= (num_rows + there * (TILE_T + ALIGNED - 2)) // TILE_T


def test_sizes_that_are_too_large_lead_nowhere_else():
    visits = visits_of(jnp.asarray([100, 100, 50], jnp.int32), num_rows=128)
    num = int(visits.counts[-1])
    assert num <= len(visits.tiles) and visits.tiles[:num, 3].max() == 128


@needs_kernel
def test_groups_that_are_too_large_end_with_the_rows():
    x_TK, w_EKN, grad_TN, _ = operands("rows of no group")
    too_large, as_it_is = (jnp.asarray([70, 100, size], jnp.int32) for size in (200, 94))
    with interpreted():
        found = made(kernel.grouped_matmul, x_TK, w_EKN, grad_TN, too_large)
    assert_close(found, expected(x_TK, w_EKN, grad_TN, as_it_is))


@needs_kernel
@pytest.mark.parametrize(("num_rows", "are_held"), [(24, False), (32, True)])
def test_tiles_are_held_where_groups_are_large(num_rows, are_held, monkeypatch):
    monkeypatch.setattr(grouped_programs, "HELD_ROWS", 16)
    seen: list[Tiles] = []
    monkeypatch.setattr(grouped_programs, "launch", lambda *_, tiles, **__: seen.append(tiles))
    x_TK, w_EKN = jnp.zeros((num_rows, 64), jnp.bfloat16), jnp.zeros((2, 64, 64), jnp.bfloat16)
    sizes_E = jnp.zeros(2, jnp.int32)
    grouped_programs.multiply(x_TK, w_EKN, group_sizes_E=sizes_E, is_transposed=False)
    assert [tiles.is_held for tiles in seen] == [are_held]


def test_the_widest_tile_is_taken_that_wastes_least():
    widths = {
        columns: grouped_programs.tiles_for(columns).columns
        for columns in (64, 768, 1408, 2048, 576)
    }
    assert widths == {64: 64, 768: 256, 1408: 128, 2048: 256, 576: 192}


REFUSED: dict[str, dict[str, Any]] = {
    "needs an NVIDIA GPU, not cpu": dict(platform="cpu"),
    "for compute capability 9.0, not 10.0": dict(compute_capability="10.0"),
    "takes x of bfloat16, not float32": dict(x=(jnp.float32, 64, 64)),
    "takes w of bfloat16 or float32, not float16": dict(w=(jnp.float16, 2, 64, 64)),
    "a multiple of 8 rows, not 65": dict(x=(jnp.bfloat16, 65, 64)),
    "multiples of 64, not 96": dict(w=(jnp.bfloat16, 2, 64, 96)),
}


@needs_kernel
@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_cannot_run_is_told(reason):
    case = dict(
        platform="gpu",
        compute_capability="9.0",
        x=(jnp.bfloat16, 64, 64),
        w=(jnp.bfloat16, 2, 64, 64),
    )
    check_refused(kernel, case, change=REFUSED[reason], reason=reason)


MISTAKES: dict[str, dict[str, tuple]] = {
    "x has the shape": dict(x=(2, 8, 64)),
    "w has the shape": dict(w=(64, 64)),
    "group_sizes has the shape": dict(group_sizes=(1, 2)),
    "x has 128 columns and each matrix of w 64 rows": dict(x=(8, 128)),
    "group_sizes has 3 groups and w 2 matrices": dict(group_sizes=(3,)),
}


@pytest.mark.parametrize("function", [kernel.grouped_matmul, kernel.reference])
@pytest.mark.parametrize("message", MISTAKES)
def test_shapes_that_do_not_fit_are_named(message, function):
    shapes = dict(x=(8, 64), w=(2, 64, 64), group_sizes=(2,)) | MISTAKES[message]
    x_TK, w_EKN = (jnp.zeros(shapes[name], jnp.bfloat16) for name in ("x", "w"))
    with pytest.raises(ValueError, match=message):
        function(x_TK, w_EKN, group_sizes_E=jnp.zeros(shapes["group_sizes"], jnp.int32))
    with pytest.raises(ValueError, match="group_sizes must be integers, not float32"):
        function(
            jnp.zeros((8, 64)), jnp.zeros((2, 64, 64)), group_sizes_E=jnp.zeros(2, jnp.float32)
        )


# What `reference` multiplies and the kernel would leave out, or read as something else.
UNSUPPORTED: dict[str, dict[str, tuple]] = {
    "takes x of a multiple of 8 rows, not 9": dict(x=(9, 64)),
    "takes w of multiples of 64, not 96": dict(x=(8, 96), w=(2, 96, 64)),
    "takes w of multiples of 64, not 32": dict(w=(2, 64, 32)),
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_sizes_that_the_kernel_has_not_are_named(message):
    shapes = dict(x=(8, 64), w=(2, 64, 64)) | UNSUPPORTED[message]
    x_TK, w_EKN = (jnp.zeros(shapes[name], jnp.bfloat16) for name in ("x", "w"))
    sizes = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=message):
        kernel.grouped_matmul(x_TK, w_EKN, group_sizes_E=sizes)
    with pytest.raises(ValueError, match="takes x of bfloat16, not float16"):
        wide = jnp.zeros((8, 64), jnp.float16), jnp.zeros((2, 64, 64), jnp.float16)
        kernel.grouped_matmul(*wide, group_sizes_E=sizes)
