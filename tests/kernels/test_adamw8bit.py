"""An update of AdamW with moments of 8 bits in one launch is, bit by bit, what XLA makes of it."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.kernels import adamw8bit as kernel
from jaxscale.kernels import triton_calls
from jaxscale.kernels.adamw8bit import Moments, Numbers, Settings
from tests.kernels import interpreted

CAPABILITY = "9.0"
SETTINGS = Settings(b1=0.9, b2=0.95, eps=1e-8, decay=0.1)
# (shape, model dimension, block): in the middle, first, last; columns and rows that no tile fills.
CASES: dict[str, tuple[tuple[int, ...], int, int]] = {
    "gate": ((2, 128, 96), 1, 64),
    "qkv": ((2, 64, 2, 3, 16), 1, 16),
    "head": ((64, 40), 0, 64),
    "embedding": ((37, 128), 1, 64),
    "narrow": ((3, 32, 2), 1, 8),
}

# NumPy's word for 1 / 0, which the interpreter makes before it is chosen not to be taken.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero", "ignore:overflow encountered")
interpreted.install()


def drawn(case, *, seed=0):
    """(parameter, gradient, Moments, axis): values of many sizes, blocks of zeros among them."""
    shape, axis, block = CASES[case]
    rng = np.random.default_rng(seed)
    blocks = (*shape[:axis], shape[axis] // block, *shape[axis + 1 :])
    sizes = 10.0 ** rng.uniform(-12, 0, blocks) * rng.integers(0, 4, blocks)
    sizes = np.repeat(sizes, block, axis=axis)
    gradient = rng.normal(size=shape) * sizes * 10.0 ** rng.uniform(-5, 0, shape)
    old = Moments(
        jnp.asarray(rng.integers(-127, 128, shape), jnp.int8),
        jnp.asarray(10.0 ** rng.uniform(-16, -4, blocks) * rng.integers(0, 3, blocks), jnp.float32),
        jnp.asarray(rng.integers(0, 256, shape), jnp.uint8),
        jnp.asarray(10.0 ** rng.uniform(-16, -4, blocks) * rng.integers(0, 3, blocks), jnp.float32),
    )
    p = jnp.asarray(rng.normal(size=shape), jnp.float32)
    return p, jnp.asarray(gradient, jnp.float32), old, axis


def numbers_of(count=7, *, is_good=True, clip=0.37, settings=SETTINGS):
    of_m, of_v = (1 / (1 - decay**count) for decay in (settings.b1, settings.b2))
    clip, of_m, of_v, rate = (jnp.float32(x) for x in (clip, of_m, of_v, -1e-3))
    return Numbers(clip, of_m, of_v, rate, jnp.int32(count), jnp.asarray(is_good))


def both(case, *, numbers=None, settings=SETTINGS, **how):
    """(found, expected): (parameter, Moments), of NumPy."""
    p, gradient, old, _ = drawn(case)
    numbers = numbers or numbers_of(settings=settings)
    found = updated(p, gradient, old=old, numbers=numbers, settings=settings, **how)
    # Numbers that XLA knows it folds, and rounds otherwise.
    reference = jax.jit(functools.partial(kernel.reference, settings=settings))
    expected = reference(p, gradient, old=old, numbers=numbers)
    return jax.tree.map(np.asarray, (found, expected))


def updated(p, gradient, *, old, numbers=None, settings=SETTINGS, **how):
    program: Any = functools.partial(
        kernel.update, settings=settings, compute_capability=CAPABILITY, **how
    )
    program = jax.jit(program) if interpreted.IS_GPU else program
    return program(p, gradient, old=old, numbers=numbers or numbers_of())


def check_same(found, expected):
    for mine, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(mine, wanted)


@interpreted.starts_interpreter
def test_the_program_in_the_interpreter():
    interpreted.run_interpreted(__file__)


@interpreted.runs_programs
@pytest.mark.parametrize("case", CASES)
def test_parameter_codes_and_scales_are_those_of_the_reference_to_the_bit(case):
    found, expected = both(case)
    check_same(found, expected)
    assert len(np.unique(found[1].mu)) > 100 and len(np.unique(found[1].nu)) > 100
    assert (found[1].nu_scale == 0).any()


@interpreted.runs_programs
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("b1", "b2"), [(0.0, 0.0), (0.9, 0.999), (0.999, 0.9999)])
def test_so_they_are_for_other_settings(b1, b2, decay):
    settings = Settings(b1=b1, b2=b2, eps=1e-8, decay=decay)
    check_same(*both("gate", settings=settings, numbers=numbers_of(settings=settings)))


@interpreted.runs_programs
@pytest.mark.parametrize("tile", [(1024, 2), (2048, 4), (8192, 8)])
@pytest.mark.parametrize("case", ["gate", "embedding"])
def test_tiles_of_any_size_make_the_same(case, tile):
    check_same(*both(case, tile=tile))


@interpreted.runs_programs
@pytest.mark.parametrize("case", ["gate", "embedding"])
def test_an_update_that_is_not_good_leaves_all_as_it_was(case):
    p, _, old, _ = drawn(case)
    found, expected = both(case, numbers=numbers_of(is_good=False, clip=np.nan))
    check_same(found, expected)
    check_same(found, jax.tree.map(np.asarray, (p, old)))


@interpreted.runs_programs
@pytest.mark.parametrize("case", ["gate", "qkv", "head", "embedding"])
def test_parts_of_a_parameter_are_made_as_the_whole_is(case):
    """The halves of its model dimension, and of the one behind it."""
    p, gradient, old, axis = drawn(case)
    behind = int(np.prod(p.shape[axis + 1 :]))
    whole = updated(p, gradient, old=old)
    for dim in range(axis, min(axis + 2, p.ndim)):
        stride = behind if dim == axis else behind // p.shape[dim]
        if old.mu_scale.shape[dim] % 2:
            continue
        for half in range(2):

            def part(x, half=half, dim=dim):
                return jnp.split(x, 2, axis=dim)[half]

            place = half * stride * (p.shape[dim] // 2)
            moments = Moments(*map(part, old))
            found = updated(part(p), part(gradient), old=moments, place=place, behind=behind)
            check_same(*jax.tree.map(np.asarray, (found, jax.tree.map(part, whole))))


# What it does not run.

REFUSED: dict[str, dict[str, Any]] = {
    "takes float32, not bfloat16": dict(dtype=jnp.bfloat16),
    "a power of two from 4, not 24": dict(shape=(48, 8), block=24),
    "a power of two from 4, not 2": dict(block=2),
    "the shapes [64, 8], [8, 64], [64, 8], [64, 8]; they must": dict(of_gradient=(8, 64)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_cannot_take_is_told(reason):
    case: dict[str, Any] = dict(shape=(64, 8), block=16, dtype=jnp.float32) | REFUSED[reason]
    gradient = jax.ShapeDtypeStruct(case.get("of_gradient", case["shape"]), case["dtype"])
    p = jax.ShapeDtypeStruct(case["shape"], case["dtype"])
    scale = jax.ShapeDtypeStruct((p.shape[0] // case["block"], 8), jnp.float32)
    codes = (jax.ShapeDtypeStruct(p.shape, dtype) for dtype in (jnp.int8, jnp.uint8))
    mu, nu = codes
    old = Moments(mu, scale, nu, scale)
    found = kernel.supported(p, gradient, old=old)
    assert found is not None and reason in found
    unused: dict[str, Any] = dict(numbers=None, settings=SETTINGS, compute_capability=CAPABILITY)
    with pytest.raises(ValueError, match=re.escape(reason)):
        kernel.update(p, gradient, old=old, **unused)


def test_where_it_cannot_run_it_says_so(monkeypatch):
    monkeypatch.setattr(triton_calls.importlib.util, "find_spec", lambda name: name)
    assert kernel.device_supported("gpu", "9.0") is None
    assert "not cpu" in str(kernel.device_supported("cpu", "0"))
    assert "8.0 or more, not 7.5" in str(kernel.device_supported("gpu", "7.5"))
    monkeypatch.setattr(triton_calls.importlib.util, "find_spec", lambda _: None)
    assert kernel.device_supported("gpu", "9.0") == "it needs jax_triton and triton"
