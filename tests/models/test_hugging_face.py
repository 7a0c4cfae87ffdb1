"""The table of tensors is whole, and a copy there and back changes no bit."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxscale.models import hugging_face, llama
from jaxscale.ops.rope import Scaling
from jaxscale.step.pretrained import read_params

SMALL = llama.Config(
    vocab_size=100, model_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=48
)
VARIANTS = {
    "plain": SMALL,
    "tied": dataclasses.replace(SMALL, tie_embeddings=True),
    "biases": dataclasses.replace(SMALL, qkv_bias=True),
    "norms of heads": dataclasses.replace(SMALL, qk_norm=True, head_size=16),
    "one key head": dataclasses.replace(SMALL, num_kv_heads=1),
}


def shapes_of(config):
    abstract = nnx.split(jax.eval_shape(lambda: config.build(nnx.Rngs(0))))[1]
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)
    }


def random_tensors(config):
    rng = np.random.default_rng(0)
    return {
        tensor.name: rng.normal(size=tensor.shape).astype(np.float32)
        for tensor in llama.hugging_face_names(config)
    }


def load(config, tensors, *, table=None):
    table = llama.hugging_face_names(config) if table is None else table
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        path: jax.ShapeDtypeStruct(shape, np.float32, sharding=here)
        for path, shape in shapes_of(config).items()
    }
    folder: Any = SimpleNamespace(path="there", tensors=lambda: table, read=tensors.__getitem__)
    return {path: np.asarray(array) for path, array in read_params(wanted, folder).items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_loaded_and_exported_is_bitwise_the_same(variant):
    config = VARIANTS[variant]
    theirs = random_tensors(config)
    ours = load(config, theirs)
    back = dict(hugging_face.export(llama.hugging_face_names(config), ours))
    assert back.keys() == theirs.keys()
    for name, array in back.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, theirs[name])
    again = load(config, back)
    for path, array in again.items():
        np.testing.assert_array_equal(array, ours[path])


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_value_of_ours_is_of_one_tensor_but_for_padding_which_is_zero(variant):
    config = VARIANTS[variant]
    assert config.padded_vocab_size() > config.vocab_size
    theirs = random_tensors(config)
    ours = load(config, theirs)
    assert {path: x.shape for path, x in ours.items()} == shapes_of(config)
    assert not ours["embedding"][config.vocab_size :].any()
    if not config.tie_embeddings:
        assert not ours["head"][:, config.vocab_size :].any()
    # None is zero by chance, so as many are set as there are: no two tensors overlap.
    num_values = sum(x.size for x in theirs.values())
    assert sum(np.count_nonzero(x) for x in ours.values()) == num_values == config.num_params()


def test_a_tied_head_has_no_tensor_of_its_own():
    assert "lm_head.weight" in random_tensors(VARIANTS["plain"])
    assert "lm_head.weight" not in random_tensors(VARIANTS["tied"])


def test_a_layer_is_where_it_was():
    theirs = random_tensors(SMALL)
    ours = load(SMALL, theirs)
    np.testing.assert_array_equal(
        ours["layers.gate"][1], theirs["model.layers.1.mlp.gate_proj.weight"].T
    )
    # The third query head is the first of the second group.
    query = theirs["model.layers.0.self_attn.q_proj.weight"].reshape(4, 8, 32)[2]
    np.testing.assert_array_equal(ours["layers.qkv"][0, :, 1, 0], query.T)
    key = theirs["model.layers.0.self_attn.k_proj.weight"].reshape(2, 8, 32)[1]
    np.testing.assert_array_equal(ours["layers.qkv"][0, :, 1, 2], key.T)


def test_a_tensor_of_another_shape_is_refused():
    theirs = random_tensors(SMALL) | {"model.norm.weight": np.zeros(31, np.float32)}
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(31,\); .* \(32,\)"):
        load(SMALL, theirs)


def test_a_parameter_that_no_tensor_fills_is_refused():
    table = llama.hugging_face_names(SMALL)[2:]
    theirs = random_tensors(SMALL)
    with pytest.raises(ValueError, match="no tensor is our embedding, norm"):
        load(SMALL, theirs, table=table)


# As the config.json of Llama 3.1 8B has it: transformers 4 wrote it.
LLAMA_3_1 = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}


def test_a_config_json_of_transformers_4_is_read():
    assert llama.from_hugging_face(LLAMA_3_1) == llama.Config(
        vocab_size=128_256,
        model_dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        mlp_dim=14_336,
        rope_scaling=Scaling(factor=8.0, low=1.0, high=4.0, original_seq_len=8192),
        max_seq_len=131_072,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(model_type="gpt2"), "model_type='gpt2': it must be one of llama, mistral, qwen2"),
        (dict(hidden_act="gelu"), "hidden_act='gelu': it must be 'silu'"),
        (dict(attention_bias=True), "attention_bias=True: it must be False"),
        (dict(use_sliding_window=True), "use_sliding_window=True: it must be False"),
        (dict(rope_scaling={"type": "yarn"}), "rope_type='yarn': it must be 'default' or 'llama3'"),
    ],
)
def test_a_setting_that_ours_does_not_have_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        llama.from_hugging_face(LLAMA_3_1 | change)
