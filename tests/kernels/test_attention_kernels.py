"""Every attention kernel against plain NumPy, and that none lets a document see another.

Run on a GPU with `JAX_PLATFORMS=cuda pytest tests/kernels`, which adds the kernels that a CPU
cannot run.
"""

import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import kernels
from jaxscale.ops.documents import documents_of

NAMES = [
    module.name
    for module in pkgutil.iter_modules(kernels.__path__)
    if module.name.endswith("_attention")
]
# Error of the whole array against float64, relative to its norm. bfloat16 rounds inputs of the
# softmax's products at 2e-3.
RTOL = {jnp.float32: 1e-5, jnp.bfloat16: 5e-3}
# rows, seq, query heads, key heads, head size, documents a row, padding, window
SHAPES = {
    "one document": (2, 256, 4, 4, 64, 1, 0, None),
    "grouped heads": (2, 256, 8, 2, 64, 5, 0, None),
    "head size 128 and padding": (2, 256, 4, 2, 128, 8, 30, None),
    "window": (2, 256, 8, 2, 64, 3, 17, 32),
    "head size 256 and window": (2, 256, 4, 2, 256, 3, 0, 64),
    "window of 1": (1, 128, 2, 2, 64, 2, 0, 1),
}
MAX_DOCUMENTS = 8


@pytest.fixture(params=NAMES)
def kernel(request):
    """The module, and `run(q, k, v, segments, window)` in the kernel's own convention."""
    module = importlib.import_module(f"jaxscale.kernels.{request.param}")

    def run(q, k, v, segments, window, cap=None):
        reason = module.supported(q, k, platform=jax.default_backend(), cap=cap)
        if reason:
            pytest.skip(reason)
        documents = documents_of(segments, segments, max_documents=MAX_DOCUMENTS)
        scale = q.shape[-1] ** -0.5
        return module.attention(q, k, v, documents=documents, scale=scale, window=window, cap=cap)

    return run


def dtype_here():
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def make(shape, seed=0):
    rows, seq, heads, kv_heads, size, documents, padding, window = SHAPES[shape]
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=(rows, seq, n, size)) for n in (heads, kv_heads, kv_heads, heads)]
    segments = np.zeros((rows, seq), np.int32)
    for row in segments:
        cuts = np.sort(rng.choice(np.arange(1, seq - padding), documents - 1, replace=False))
        row[: seq - padding] = 1 + np.searchsorted(cuts, np.arange(seq - padding), side="right")
    return [jnp.asarray(x, dtype_here()) for x in arrays], jnp.asarray(segments), window


def slow_attention(q, k, v, segments, window, cap=None):
    """One query at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    segments, out = np.asarray(segments), np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for b, s, n in np.ndindex(q.shape[:3]):
        if segments[b, s] == 0:
            continue
        first = 0 if window is None else max(0, s - window + 1)
        seen = [t for t in range(first, s + 1) if segments[b, t] == segments[b, s]]
        scores = k[b, seen, n // group] @ q[b, s, n] / q.shape[-1] ** 0.5
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max())
        out[b, s, n] = weights @ v[b, seen, n // group] / weights.sum()
    return out


def error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected)) / max(float(np.linalg.norm(expected)), 1.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_kernel_equals_attention_one_query_at_a_time(kernel, shape):
    (q, k, v, _), segments, window = make(shape)
    out = jax.jit(kernel, static_argnums=4)(q, k, v, segments, window)
    assert out.dtype == q.dtype
    assert error(out, slow_attention(q, k, v, segments, window)) < RTOL[dtype_here()]
    assert not np.asarray(out, np.float32)[np.asarray(segments) == 0].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_kernels_gradients_equal_those_of_the_reference_in_float32(kernel, shape):
    (q, k, v, cotangent), segments, window = make(shape)
    reference = importlib.import_module("jaxscale.kernels.xla_attention").reference
    documents = documents_of(segments, segments, max_documents=MAX_DOCUMENTS)
    options = dict(documents=documents, scale=q.shape[-1] ** -0.5, window=window)
    gradients = jax.jit(
        lambda q, k, v: jax.vjp(lambda *x: kernel(*x, segments, window), q, k, v)[1](cotangent)
    )(q, k, v)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    with jax.default_matmul_precision("highest"):
        expected = jax.vjp(lambda *x: reference(*x, **options), *wide)[1](
            cotangent.astype(jnp.float32)
        )
    for name, mine, theirs in zip("qkv", gradients, expected, strict=True):
        assert error(mine, theirs) < 2 * RTOL[dtype_here()], name


def test_no_document_sees_another(kernel):
    (q, k, v, cotangent), segments, window = make("grouped heads")
    is_other = np.asarray(segments) != 2
    noise = jnp.asarray(np.where(is_other[..., None, None], 3.0, 0.0), q.dtype)

    def run(q, k, v):
        out, vjp = jax.vjp(lambda *x: kernel(*x, segments, window), q, k, v)
        # Only what document 2 puts out counts: what reaches the others' inputs has leaked.
        return out, vjp(jnp.where(is_other[..., None, None], jnp.zeros((), q.dtype), cotangent))

    run = jax.jit(run)
    out, gradients = run(q, k, v)
    changed, _ = run(q + noise, k + noise, v + noise)
    np.testing.assert_array_equal(np.asarray(out)[~is_other], np.asarray(changed)[~is_other])
    assert not np.array_equal(np.asarray(out)[is_other], np.asarray(changed)[is_other])
    for gradient in gradients:
        assert not np.asarray(gradient, np.float32)[is_other].any()
        assert np.asarray(gradient, np.float32)[~is_other].any()


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(kernels.__path__)])
def test_a_kernel_file_offers_a_kernel_its_reference_and_what_it_supports(name):
    module = importlib.import_module(f"jaxscale.kernels.{name}")
    assert callable(module.reference) and callable(module.supported)
    assert callable(getattr(module, name.rsplit("_", 1)[-1]))
    assert callable(module.partial_forward) and callable(module.partial_backward)
    assert module.__doc__ and module.supported.__doc__
    assert type(module.HAS_QUADRATIC_MEMORY) is bool and type(module.TRACKS_VMA) is bool
    for function in (module.attention, module.reference):
        keywords = ["documents", "scale", "window", "cap"]
        assert list(inspect.signature(function).parameters)[3:] == keywords


def test_a_soft_cap_is_a_tanh_of_the_scores(kernel):
    (q, k, v, _), segments, _ = make("grouped heads")
    capped = np.asarray(kernel(q, k, v, segments, None, cap=0.5), np.float64)
    assert error(capped, slow_attention(q, k, v, segments, None, cap=0.5)) < RTOL[dtype_here()]
    assert error(capped, slow_attention(q, k, v, segments, None)) > 0.05
