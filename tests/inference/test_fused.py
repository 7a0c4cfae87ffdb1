"""A layer for one token in one launch is the model's own; on a GPU, with jax-triton."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.config import Dtype
from jaxscale.inference import fused
from jaxscale.inference.engine import MULTIPLE, Engine
from jaxscale.inference.sampling import Sampling
from jaxscale.models import gemma, llama
from jaxscale.ops import rope
from jaxscale.ops.execution import Execution
from jaxscale.ops.kept import Kept
from jaxscale.perf.generate_speed import DrawnWeights

TOKENS = 640
SIZES: dict[str, Any] = dict(
    vocab_size=257, model_dim=320, num_layers=1, num_heads=6, mlp_dim=832, init_scale=0.1
)
KINDS: dict[str, dict[str, Any]] = {
    "llama": dict(num_kv_heads=2, head_size=64),
    "many query heads": dict(num_kv_heads=1, head_size=32),
    "mistral": dict(num_kv_heads=6, head_size=128, window=100),
    "qwen2": dict(num_kv_heads=2, head_size=64, qkv_bias=True),
    "qwen3": dict(num_kv_heads=3, head_size=64, qk_norm=True),
    # More rows and columns than a tile has.
    "wide": dict(model_dim=2560, mlp_dim=9728, num_heads=32, num_kv_heads=8, head_size=128),
}

MATRICES = ("qkv", "out", "gate", "up", "down")

needs_gpu = pytest.mark.skipif(
    jax.default_backend() != "gpu" or importlib.util.find_spec("jax_triton") is None,
    reason="needs a GPU and jax-triton",
)


def on(platform="gpu", dtype=Dtype.BFLOAT16) -> Execution:
    return Execution(dtype=dtype, platform=platform, compute_capability="9.0")


def drawn(c: llama.Config):
    """A layer's weights, all of which count: norms and biases are not 1 and 0."""
    layer = llama.Block(c, nnx.Rngs(0))
    key = jax.random.key(1)
    graphdef, state = nnx.split(layer)
    filled = []
    for number, (path, box) in enumerate(nnx.to_flat_state(state)):
        value = box.get_value()
        if path[-1] in MATRICES:
            value = value.astype(jnp.bfloat16)
        else:
            value += 0.2 * jax.random.normal(jax.random.fold_in(key, number), value.shape)
        filled.append((path, box.replace(value)))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def after(block, layer, inputs, *, place: int, execution: Execution):
    """(x, keys, values) after a block, in float32; inputs: x, keys and values before it."""
    c, dtype = layer.c, jnp.dtype(execution.dtype)
    graphdef, state = nnx.split(layer)
    state = jax.tree.map(lambda a: a.astype(dtype) if a.dtype == jnp.bfloat16 else a, state)

    @jax.jit
    def run(state, x, keys, values, place):
        place = place[None, None]
        kept = Kept(jnp.zeros_like(place), place, None, keys=keys, values=values)
        shared = rope.angles(place, c.head_dim(), theta=c.rope_theta), kept
        x, _ = block(x, nnx.merge(graphdef, state), shared, execution)
        return x, kept.keys, kept.values

    out = run(state, *(a.astype(dtype) for a in inputs), jnp.int32(place))
    return [np.asarray(a, np.float32) for a in out]


@needs_gpu
@pytest.mark.parametrize("place", [0, 1, 63, 64, 257, TOKENS - 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_the_models_own(kind, place):
    c = llama.Config(**SIZES | KINDS[kind])
    layer = drawn(c)
    rng = np.random.default_rng(place)
    kept = (1, c.num_kv_heads, TOKENS, c.head_dim())
    inputs = [
        jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((1, 1, c.model_dim), kept, kept)
    ]
    expected = after(llama.block, layer, inputs, place=place, execution=on(dtype=Dtype.FLOAT32))
    theirs = after(llama.block, layer, inputs, place=place, execution=on())
    cores = jax.devices()[0].core_count
    ours = after(fused.Layers(cores).block, layer, inputs, place=place, execution=on())
    for mine, plain, right in zip(ours, theirs, expected, strict=True):
        error, usual = np.abs(mine - right), np.abs(plain - right).max()
        assert error.max() <= 2 * usual + 1e-6
    for mine, before in zip(ours[1:], inputs[1:], strict=True):
        others = np.arange(TOKENS) != place
        untouched = np.asarray(before, np.float32)[:, :, others]
        np.testing.assert_array_equal(mine[:, :, others], untouched)


@needs_gpu
def test_a_text_continued_is_what_the_whole_text_gives():
    c = llama.Config(**SIZES | KINDS["llama"] | dict(num_layers=3))
    engine = Engine(DrawnWeights(c))
    assert engine.unfused is None
    prompt = np.arange(5, 25) % c.vocab_size
    chunks = engine.continued([prompt], sampling=Sampling(temperature=0.0), max_tokens=150)
    text = np.concatenate([prompt, *(chunk for (chunk,) in chunks)])
    length = -(-len(text) // MULTIPLE) * MULTIPLE
    tokens, targets, places = np.zeros((3, length), np.int32)
    tokens[: len(text)], targets[: len(text) - 1] = text, text[1:]
    places[: len(text)] = np.arange(len(text))
    segments = (np.arange(length) < len(text)).astype(np.int32)
    _, is_likeliest = engine.losses(tokens, segments=segments, places=places, targets=targets)
    # bfloat16 tells a few of the likeliest apart by luck.
    assert is_likeliest[len(prompt) - 1 : len(text) - 1].mean() > 0.95


@pytest.mark.parametrize(
    ("model", "execution", "num_devices", "words"),
    [
        (llama.Config(**SIZES, **KINDS["llama"]), on("cpu"), 1, "needs an NVIDIA GPU, not cpu"),
        (llama.Config(**SIZES, **KINDS["llama"]), on(), 2, "for one device, not 2"),
        (llama.Config(**SIZES, **KINDS["llama"]), on(dtype=Dtype.FLOAT32), 1, "takes bfloat16"),
        (llama.Config(**SIZES, num_kv_heads=2, head_size=96), on(), 1, "head sizes 32, 64"),
        (gemma.Config(**SIZES, num_kv_heads=2), on(), 1, "for the blocks of Llama"),
    ],
)
def test_where_it_cannot_run_it_says_why(model, execution, num_devices, words):
    objection = fused.objection(model, execution=execution, num_devices=num_devices, num_cores=132)
    assert objection and words in objection


def test_a_gpu_whose_multiprocessors_are_not_known_is_refused():
    c = llama.Config(**SIZES, **KINDS["llama"])
    objection = fused.objection(c, execution=on(), num_devices=1, num_cores=0)
    assert objection == "it takes at most 0 key heads, not 2"
