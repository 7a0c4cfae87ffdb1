"""Every attention kernel against plain NumPy, and that none lets a document see another.

Run on a GPU with `python scripts/test_kernels_gpu.py`, which adds the kernels that a CPU cannot
run.
"""

import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import kernels
from jaxscale.ops.deal import Parts
from jaxscale.ops.documents import documents_of

NAMES = [
    module.name
    for module in pkgutil.iter_modules(kernels.__path__)
    if module.name.endswith("_attention")
]
# Error of the whole array against float64, relative to its norm. bfloat16 rounds inputs of the
# softmax's products at 2e-3.
RTOL = {jnp.float32: 1e-5, jnp.bfloat16: 5e-3}
# rows, seq, query heads, key heads, head size (and of values, if it is another), documents a row,
# padding, window
SHAPES = {
    "one document": (2, 256, 4, 4, 64, 1, 0, None),
    "grouped heads": (2, 256, 8, 2, 64, 5, 0, None),
    "head size 128 and padding": (2, 256, 4, 2, 128, 8, 30, None),
    "window": (2, 256, 8, 2, 64, 3, 17, 32),
    "head size 256 and window": (2, 256, 4, 2, 256, 3, 0, 64),
    "head size 256, grouped heads": (1, 384, 8, 2, 256, 2, 20, None),
    "values of another head size": (2, 256, 4, 2, (192, 128), 3, 10, None),
    "window of 1": (1, 128, 2, 2, 64, 2, 0, 1),
    "short documents": (2, 512, 4, 2, 128, 8, 100, None),
    "a length of no whole tiles": (2, 200, 4, 2, 64, 3, 5, None),
}
MAX_DOCUMENTS = 8


@pytest.fixture(params=NAMES)
def kernel(request):
    """The module, and `run(q, k, v, segments, window)` in the kernel's own convention."""
    module = importlib.import_module(f"jaxscale.kernels.{request.param}")

    def run(q, k, v, segments, window, **options):
        cap = options.get("cap")
        sizes = dict(cap=cap, v_head_size=v.shape[-1])
        reason = module.supported(q, k, platform=jax.default_backend(), **sizes)
        if reason:
            pytest.skip(reason)
        documents = documents_of(segments, segments, max_documents=MAX_DOCUMENTS)
        scale = q.shape[-1] ** -0.5
        options |= dict(documents=documents, scale=scale, window=window)
        return module.attention(q, k, v, **options)

    return run


def dtype_here():
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def make(shape, seed=0):
    rows, seq, heads, kv_heads, size, documents, padding, window = SHAPES[shape]
    rng = np.random.default_rng(seed)
    size, v_size = size if isinstance(size, tuple) else (size, size)
    shapes = (heads, size), (kv_heads, size), (kv_heads, v_size), (heads, v_size)
    arrays = [rng.normal(size=(rows, seq, *shape)) for shape in shapes]
    segments = np.zeros((rows, seq), np.int32)
    for row in segments:
        cuts = np.sort(rng.choice(np.arange(1, seq - padding), documents - 1, replace=False))
        row[: seq - padding] = 1 + np.searchsorted(cuts, np.arange(seq - padding), side="right")
    return [jnp.asarray(x, dtype_here()) for x in arrays], jnp.asarray(segments), window


def slow_attention(q, k, v, segments, window, cap=None):
    """One query at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    segments, out = np.asarray(segments), np.zeros((*q.shape[:3], v.shape[-1]))
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
    assert_gradients_are_the_references(kernel, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_capped_kernels_gradients_equal_those_of_the_reference_in_float32(kernel, shape):
    # Scores of these arrays are about 1: at this cap tanh is far from a line.
    assert_gradients_are_the_references(kernel, shape, cap=2.0)


def assert_gradients_are_the_references(kernel, shape, cap=None):
    (q, k, v, cotangent), segments, window = make(shape)
    reference = importlib.import_module("jaxscale.kernels.xla_attention").reference
    documents = documents_of(segments, segments, max_documents=MAX_DOCUMENTS)
    options = dict(documents=documents, scale=q.shape[-1] ** -0.5, window=window, cap=cap)

    def attention(*x):
        return kernel(*x, segments, window, cap=cap)

    gradients = jax.jit(lambda q, k, v: jax.vjp(attention, q, k, v)[1](cotangent))(q, k, v)
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


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_file_offers_a_kernel_its_reference_and_what_it_supports(name):
    module = importlib.import_module(f"jaxscale.kernels.{name}")
    assert callable(module.reference) and callable(module.supported)
    assert callable(getattr(module, name.rsplit("_", 1)[-1]))
    assert callable(module.partial_forward) and callable(module.partial_backward)
    assert module.__doc__ and module.supported.__doc__
    for name in ("HAS_QUADRATIC_MEMORY", "TRACKS_VMA"):
        assert type(getattr(module, name)) is bool
    for function in (module.attention, module.reference):
        keywords = ["documents", "scale", "window", "cap", "deterministic"]
        assert list(inspect.signature(function).parameters)[3:] == keywords


def test_a_soft_cap_is_a_tanh_of_the_scores(kernel):
    (q, k, v, _), segments, _ = make("grouped heads")
    capped = np.asarray(kernel(q, k, v, segments, None, cap=0.5), np.float64)
    assert error(capped, slow_attention(q, k, v, segments, None, cap=0.5)) < RTOL[dtype_here()]
    assert error(capped, slow_attention(q, k, v, segments, None)) > 0.05


@pytest.mark.parametrize(
    "shape", ["short documents", "head size 256 and window", "values of another head size"]
)
@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_deterministic_backward_pass_gives_the_same_bits_and_the_same_gradients(
    kernel, request, shape, cap
):
    if "cudnn" in request.node.name:
        pytest.skip("an option of XLA decides (xla/options.py)")
    (q, k, v, cotangent), segments, window = make(shape)

    def gradients(**options):
        run = jax.jit(
            lambda q, k, v: jax.vjp(
                lambda *x: kernel(*x, segments, window, cap=cap, **options), q, k, v
            )[1](cotangent)
        )
        return [[np.asarray(x, np.float32) for x in run(q, k, v)] for _ in range(3)]

    first, *others = gradients(deterministic=True)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(first, gradients()[0], strict=True):
        assert error(mine, theirs) < RTOL[dtype_here()]


# Queries of two documents over keys that stand elsewhere; nobody looks at the rest.
PARTS = Parts(
    q_starts_BM=jnp.array([[0, 70, 0], [100, 0, 0]], jnp.int32),
    q_lengths_BM=jnp.array([[60, 100, 0], [128, 0, 0]], jnp.int32),
    k_starts_BM=jnp.array([[30, 120, 0], [0, 0, 0]], jnp.int32),
    k_lengths_BM=jnp.array([[60, 100, 0], [128, 0, 0]], jnp.int32),
)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_attention_to_some_keys_and_its_part_of_the_gradients_are_the_references(name, causal):
    module = importlib.import_module(f"jaxscale.kernels.{name}")
    reference = importlib.import_module("jaxscale.kernels.xla_attention")
    (q, k, v, cotangent), _, _ = make("head size 128 and padding")
    if reason := module.supported(q, k, platform=jax.default_backend()):
        pytest.skip(reason)
    options = dict(parts=PARTS, causal=causal, scale=q.shape[-1] ** -0.5)

    def run(module, *arrays, lse_of):
        out, lse = module.partial_forward(*arrays[:3], **options)
        # Of an attention to more keys than these.
        merged = jnp.where(lse > -1e29, lse + 0.5, lse) if lse_of is None else lse_of
        grads = module.partial_backward(
            *arrays[:3], out_BSNH=out, lse_BSN=merged, grad_BSNH=arrays[3], **options
        )
        return out, lse, merged, *grads

    wide = [x.astype(jnp.float32) for x in (q, k, v, cotangent)]
    with jax.default_matmul_precision("highest"):
        expected = run(reference, *wide, lse_of=None)
    found = run(module, q, k, v, cotangent, lse_of=expected[2])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-2, atol=1e-2)
    for i, name in ((0, "out"), (3, "dq"), (4, "dk"), (5, "dv")):
        assert error(found[i], expected[i]) < 2 * RTOL[dtype_here()], name
