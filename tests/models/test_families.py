import dataclasses
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import models
from jaxscale.config import Dtype, Remat
from jaxscale.models import families, gemma, llama
from jaxscale.models.decoder import forward
from jaxscale.ops.documents import documents_of
from jaxscale.ops.execution import Execution
from jaxscale.ops.rope import Scaling

EXECUTION = Execution(dtype=Dtype.FLOAT32)
SMALL = llama.Config(
    vocab_size=100, model_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=48
)
SMALL_GEMMA = gemma.Config(
    vocab_size=100,
    model_dim=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=48,
    head_size=16,
    window=5,
    global_every=3,
    query_scale=24.0,
)
# The options of each family, and the model they make.
VARIANTS: dict[str, llama.Config | gemma.Config] = {
    "llama 3": SMALL,
    "llama 3.1": dataclasses.replace(
        SMALL, rope_scaling=Scaling(factor=4.0, original_seq_len=32), rope_theta=10_000.0
    ),
    "llama 3.2 tied": dataclasses.replace(SMALL, tie_embeddings=True),
    "qwen 2": dataclasses.replace(SMALL, qkv_bias=True, norm_eps=1e-6),
    "qwen 3": dataclasses.replace(SMALL, qk_norm=True, head_size=16, norm_eps=1e-6),
    "mistral": dataclasses.replace(SMALL, window=5),
    "gemma 2": dataclasses.replace(
        SMALL_GEMMA, qk_norm=False, global_every=2, score_cap=5.0, logit_cap=3.0
    ),
    "gemma 3": dataclasses.replace(SMALL_GEMMA, rope_factor=8.0),
}


@jax.jit
def logits_of_row(model, tokens, segments, positions):
    documents = documents_of(segments, positions, max_documents=8)
    x, head, cap, *_ = forward(model, tokens, documents=documents, execution=EXECUTION)
    out = jnp.einsum("BSD,DV->BSV", x, head)[..., : model.c.vocab_size]
    return out if cap is None else cap * jnp.tanh(out / cap)


def logits(model, tokens, segments=None, positions=None):
    tokens = jnp.asarray(tokens, jnp.int32)
    segments = jnp.ones_like(tokens) if segments is None else jnp.asarray(segments, jnp.int32)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return np.asarray(logits_of_row(model, tokens, segments, jnp.asarray(positions, jnp.int32)))


def build(config, scale=8.0):
    """With weights large enough that attention and biases matter."""
    model = config.build(nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(1), 100))
    return jax.tree.map(lambda x: x * scale + 0.1 * jax.random.normal(next(keys), x.shape), model)


FAMILIES = {module.name for module in pkgutil.iter_modules(models.__path__)} - {
    "decoder",
    "families",
    "hugging_face",
    "model_folder",
    "fp8_weights",
}


def test_every_family_is_found_by_what_hugging_face_calls_it():
    assert {module.__name__.rpartition(".")[2] for module in families.FAMILIES} == FAMILIES


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_model_file_offers_what_the_run_needs(name):
    module = importlib.import_module(f"jaxscale.models.{name}")
    fields = {field.name for field in dataclasses.fields(module.Config)}
    assert {"num_layers", "vocab_size", "max_seq_len"} <= fields
    methods = ("validate", "validate_on", "rules", "num_params", "num_layer_params")
    for method in (*methods, "flops_per_token", "build"):
        assert callable(getattr(module.Config, method)), method
    assert callable(module.from_hugging_face) and callable(module.hugging_face_names)
    assert module.__doc__ and module.Config.__doc__


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_packed_row_gives_each_document_what_it_gets_alone(variant):
    model = build(VARIANTS[variant], scale=1.0)
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 100, n) for n in (7, 12, 5)]
    row = np.concatenate([*documents, np.zeros(3, np.int64)])[None]
    segments = np.repeat([1, 2, 3, 0], [7, 12, 5, 3])[None]
    positions = np.concatenate([np.arange(7), np.arange(12), np.arange(5), np.zeros(3, np.int64)])[
        None
    ]
    packed, begin = logits(model, row, segments, positions)[0], 0
    for document in documents:
        alone = logits(model, document[None])[0]
        np.testing.assert_allclose(
            packed[begin : begin + len(document)], alone, rtol=1e-4, atol=1e-4
        )
        begin += len(document)


@pytest.mark.parametrize("variant", VARIANTS)
def test_num_params_counts_what_is_built(variant):
    config = VARIANTS[variant]
    built = sum(x.size for x in jax.tree.leaves(nnx.split(config.build(nnx.Rngs(0)))[1]))
    padding = (
        (config.padded_vocab_size() - config.vocab_size)
        * config.model_dim
        * (1 if config.tie_embeddings else 2)
    )
    assert config.num_params() == built - padding


def test_sizes_and_flops_of_llama_3_8b_are_the_published_ones():
    config = llama.Config(
        vocab_size=128_256,
        model_dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        mlp_dim=14_336,
    )
    assert config.num_params() == 8_030_261_248
    # torchtitan prints 57.9 GFLOP a token at 8192.
    assert round(config.flops_per_token(8192, causal=False) / 1e9, 1) == 57.9
    assert round(config.flops_per_token(8192, causal=True) / 1e9, 1) == 51.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_kv_heads=3), r"num_heads=4 must be a multiple of config\.model\.num_kv_heads=3"),
        (dict(model_dim=30), r"model_dim=30 must be a multiple of config\.model\.num_heads=4"),
        (dict(head_size=7), r"head_size=7 must be even"),
        (dict(window=0), r"window=0"),
        (dict(mlp_dim=0), r"mlp_dim=0"),
        (dict(rope_scaling=Scaling(factor=0.5)), r"rope_scaling\.factor=0\.5"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_key(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change).validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(window=0), r"config\.model\.window=0: set it to 1 or more"),
        (dict(global_every=0), r"config\.model\.global_every=0"),
        (dict(query_scale=0.0), r"config\.model\.query_scale=0\.0: set it above 0"),
        (dict(score_cap=-1.0), r"config\.model\.score_cap=-1\.0"),
        (dict(rope_factor=0.5), r"config\.model\.rope_factor=0\.5"),
    ],
)
def test_options_of_gemma_that_cannot_be_are_refused_by_key(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL_GEMMA, **change).validate()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            dict(tensor=3, fsdp=1),
            r"config\.model\.num_heads=4 cannot be split over mesh axis tensor=3; "
            r"set config\.mesh\.tensor",
        ),
        (
            dict(tensor=1, fsdp=5),
            r"config\.model\.model_dim=32 cannot be split over mesh axis fsdp=5",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused_by_key(sizes, message):
    with pytest.raises(ValueError, match=message):
        SMALL.validate_on(sizes)


@pytest.mark.parametrize("remat", [remat for remat in Remat if remat != Remat.NONE])
def test_gradients_do_not_depend_on_what_is_saved(remat):
    """Leaf by leaf; on a GPU through cuDNN and in bfloat16, where XLA's fusions round otherwise."""
    is_cpu = jax.default_backend() == "cpu"
    dtype, rtol = (Dtype.FLOAT32, 1e-5) if is_cpu else (Dtype.BFLOAT16, 3e-2)
    model = build(dataclasses.replace(SMALL, qk_norm=True), scale=1.0)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 100, (2, 64)), jnp.int32)
    segments = jnp.asarray(np.repeat([[1, 2, 0], [1, 2, 3]], [20, 40, 4], axis=1), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), tokens.shape)

    documents = documents_of(segments, positions, max_documents=8)

    def gradients(remat):
        execution = Execution(dtype=dtype, remat=remat)

        def summed(model):
            x, *_ = forward(model, tokens, documents=documents, execution=execution)
            return jnp.sum(x.astype(jnp.float32)[..., :3])

        return jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(summed))(model))

    for (path, expected), (_, actual) in zip(gradients(Remat.NONE), gradients(remat), strict=True):
        difference = np.linalg.norm(actual - expected)
        assert difference <= rtol * np.linalg.norm(expected), jax.tree_util.keystr(path)
