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
from jaxscale.models import llama
from jaxscale.ops.execution import Execution
from jaxscale.ops.rope import Scaling

EXECUTION = Execution(dtype=Dtype.FLOAT32)
SMALL = llama.Config(
    vocab_size=100, model_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=48
)
# Each option of the family, and the model it makes.
VARIANTS = {
    "llama 3": SMALL,
    "llama 3.1": dataclasses.replace(
        SMALL, rope_scaling=Scaling(factor=4.0, original_seq_len=32), rope_theta=10_000.0
    ),
    "llama 3.2 tied": dataclasses.replace(SMALL, tie_embeddings=True),
    "qwen 2": dataclasses.replace(SMALL, qkv_bias=True, norm_eps=1e-6),
    "qwen 3": dataclasses.replace(SMALL, qk_norm=True, head_size=16, norm_eps=1e-6),
    "mistral": dataclasses.replace(SMALL, window=5),
}


def logits(model, tokens, segments=None, positions=None):
    tokens = jnp.asarray(tokens, jnp.int32)
    segments = jnp.ones_like(tokens) if segments is None else jnp.asarray(segments, jnp.int32)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    x = model(tokens, segments, jnp.asarray(positions, jnp.int32), EXECUTION)
    return np.asarray(jnp.einsum("BSD,DV->BSV", x, model.head())[..., : model.c.vocab_size])


def build(config, scale=8.0):
    """With weights large enough that attention and biases matter."""
    model = config.build(nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(1), 100))
    return jax.tree.map(lambda x: x * scale + 0.1 * jax.random.normal(next(keys), x.shape), model)


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(models.__path__)])
def test_a_model_file_offers_what_the_run_needs(name):
    module = importlib.import_module(f"jaxscale.models.{name}")
    fields = {field.name for field in dataclasses.fields(module.Config)}
    assert {"num_layers", "vocab_size", "max_seq_len"} <= fields
    for method in (
        "validate",
        "validate_on",
        "num_params",
        "num_layer_params",
        "flops_per_token",
        "build",
    ):
        assert callable(getattr(module.Config, method)), method
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
    ("sizes", "message"),
    [
        (
            dict(tensor=3, fsdp=1),
            r"config\.model\.num_heads=4 cannot be split over mesh axis tensor=3; set config\.mesh\.tensor",
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
    """Leaf by leaf; on a GPU through cuDNN and in bfloat16, whose rounding moves with XLA's fusions."""
    is_cpu = jax.default_backend() == "cpu"
    dtype, rtol = (Dtype.FLOAT32, 1e-5) if is_cpu else (Dtype.BFLOAT16, 3e-2)
    model = build(dataclasses.replace(SMALL, qk_norm=True), scale=1.0)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 100, (2, 64)), jnp.int32)
    segments = jnp.asarray(np.repeat([[1, 2, 0], [1, 2, 3]], [20, 40, 4], axis=1), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), tokens.shape)

    def gradients(remat):
        execution = Execution(dtype=dtype, remat=remat)
        run = jax.jit(
            jax.grad(
                lambda m: jnp.sum(
                    m(tokens, segments, positions, execution).astype(jnp.float32)[..., :3]
                )
            )
        )
        return jax.tree_util.tree_leaves_with_path(run(model))

    for (path, expected), (_, actual) in zip(gradients(Remat.NONE), gradients(remat), strict=True):
        difference = np.linalg.norm(actual - expected)
        assert difference <= rtol * np.linalg.norm(expected), jax.tree_util.keystr(path)


# Against another system: the same weights in Hugging Face's implementation.


def hugging_face_model(transformers, variant):
    c = VARIANTS[variant]
    common = dict(
        vocab_size=c.vocab_size, hidden_size=c.model_dim, num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads, intermediate_size=c.mlp_dim, rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tie_embeddings, max_position_embeddings=4096, attn_implementation="eager",
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_scaling:
        rope = {
            "rope_type": "llama3", "rope_theta": c.rope_theta, "factor": c.rope_scaling.factor,
            "low_freq_factor": c.rope_scaling.low, "high_freq_factor": c.rope_scaling.high,
            "original_max_position_embeddings": c.rope_scaling.original_seq_len,
        }  # fmt: skip
    common["rope_parameters"] = rope
    if variant.startswith("llama"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))
    if variant == "qwen 2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**common))
    if variant == "qwen 3":
        return transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**common, head_dim=c.head_size)
        )
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**common, sliding_window=c.window)
    )


def hugging_face_weights(model, c) -> dict[str, np.ndarray]:
    """Our stacked parameters under the names that Hugging Face uses; its matrices are [out, in]."""
    p = {path: np.asarray(x) for path, x in _paths(nnx.split(model)[1])}
    group, vocab = c.num_heads // c.num_kv_heads, c.vocab_size
    out = {"model.embed_tokens.weight": p["embedding"][:vocab], "model.norm.weight": p["norm"]}
    out["lm_head.weight"] = (p["embedding"] if c.tie_embeddings else p["output"].T)[:vocab]
    for i in range(c.num_layers):
        prefix = f"model.layers.{i}."
        qkv = p["layers/qkv"][i]
        parts = {"q": qkv[:, :, :group], "k": qkv[:, :, group], "v": qkv[:, :, group + 1]}
        for name, weight in parts.items():
            out[f"{prefix}self_attn.{name}_proj.weight"] = weight.reshape(c.model_dim, -1).T
        if c.qkv_bias:
            bias = p["layers/qkv_bias"][i]
            for name, b in {
                "q": bias[:, :group],
                "k": bias[:, group],
                "v": bias[:, group + 1],
            }.items():
                out[f"{prefix}self_attn.{name}_proj.bias"] = b.reshape(-1)
        if c.qk_norm:
            for name in "qk":
                out[f"{prefix}self_attn.{name}_norm.weight"] = p[f"layers/{name}_norm"][i]
        out[f"{prefix}self_attn.o_proj.weight"] = p["layers/out"][i].reshape(c.model_dim, -1)
        out[f"{prefix}mlp.gate_proj.weight"] = p["layers/gate"][i].T
        out[f"{prefix}mlp.up_proj.weight"] = p["layers/up"][i].T
        out[f"{prefix}mlp.down_proj.weight"] = p["layers/down"][i]
        out[f"{prefix}input_layernorm.weight"] = p["layers/attention_norm"][i]
        out[f"{prefix}post_attention_layernorm.weight"] = p["layers/mlp_norm"][i]
    return out


def _paths(tree):
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"), x


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_hugging_face_transformers(variant):
    transformers = pytest.importorskip(
        "transformers", reason="transformers and torch are not installed"
    )
    import torch

    c = VARIANTS[variant]
    model = build(c)
    theirs = hugging_face_model(transformers, variant).eval().float()
    weights = {
        name: torch.tensor(np.ascontiguousarray(x))
        for name, x in hugging_face_weights(model, c).items()
    }
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and all("rotary" in name for name in missing)
    tokens = np.random.default_rng(0).integers(0, c.vocab_size, (2, 40))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    with jax.default_matmul_precision("highest"):
        actual = logits(model, tokens)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
