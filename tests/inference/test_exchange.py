"""Models of Hugging Face become runs and come back, bit by bit."""

import json
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxscale import sharding as shd
from jaxscale.config import MeshConfig
from jaxscale.data.tokenizer import ByteTokenizer
from jaxscale.inference import export
from jaxscale.inference.weights import FolderWeights
from jaxscale.models import families, model_folder
from jaxscale.models.model_folder import ModelFolder
from jaxscale.step import layout
from jaxscale.step.pretrained import read_params
from tests.inference.hf_folders import MODELS, NAMES, record_of, write_folder


def wanted(model, **mesh):
    """Our parameters on a mesh of eight devices, by path."""
    config = MeshConfig(**mesh)
    sizes = config.sizes(jax.device_count())
    rules = layout.rules_of(config, model_rules=model.rules(sizes))
    params = nnx.state(jax.eval_shape(lambda: model.build(nnx.Rngs(0))), nnx.Param)
    shardings = shd.shardings(params, mesh=shd.make_mesh(sizes), rules=rules)
    paths = (".".join(map(str, path)) for path, _ in nnx.to_flat_state(params))
    return {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for path, leaf, sharding in zip(
            paths, jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True
        )
    }


class Held(FolderWeights):
    """Parameters that were read already, on eight devices, as the weights of a run."""

    def __init__(self, folder, params):
        super().__init__(folder)
        self._params = params

    def read(self, abstract):
        return {
            path: np.asarray(self._params[path]).astype(leaf.dtype)
            for path, leaf in abstract.items()
        }


def tensors_in(folder):
    return {
        name: array
        for path in sorted(folder.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_read_into_any_mesh_and_comes_back_bit_by_bit(name, tmp_path):
    there = write_folder(tmp_path / "there", name)
    folder = ModelFolder(there)
    assert len(list(there.glob("*.safetensors"))) > 1
    meshes = dict(fsdp=4, tensor=2), dict(fsdp=1, data=8)
    read = [read_params(wanted(folder.model, **mesh), folder) for mesh in meshes]
    for path, array in read[0].items():
        np.testing.assert_array_equal(array, read[1][path])
    back, weights = tmp_path / "back", Held(folder, read[0])
    export.export_model(
        weights, back, dtype="float32", tokenizer=ByteTokenizer(), file_bytes=20_000
    )
    before, after = tensors_in(there), tensors_in(back)
    assert before.keys() == after.keys()
    for tensor, array in before.items():
        np.testing.assert_array_equal(array, after[tensor])
    assert ModelFolder(back).model == folder.model


@pytest.mark.parametrize("name", NAMES)
def test_our_config_json_says_what_theirs_says(name):
    theirs = record_of(name)["config"]
    model = model_folder.model_of(theirs)
    ours = families.of_config(model).to_hugging_face(model)
    assert model_folder.model_of(ours) == model
    assert ours["model_type"] == theirs["model_type"]
    assert ours["architectures"][0].endswith("ForCausalLM")
    for key in set(ours) & set(theirs) - {"rope_scaling", "attention_bias"}:
        assert ours[key] == theirs[key] or theirs[key] is None, key


def test_an_index_names_the_file_of_every_tensor(tmp_path):
    folder = write_folder(tmp_path / "m", "llama3", file_bytes=10_000)
    index = json.loads((folder / model_folder.INDEX).read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    for tensor, file in index["weight_map"].items():
        assert tensor in load_file(folder / file)
    sizes = sum(array.nbytes for array in tensors_in(folder).values())
    assert index["metadata"]["total_size"] == sizes


def test_bfloat16_goes_there_and_back_without_a_changed_bit(tmp_path):
    folder = ModelFolder(write_folder(tmp_path / "m", "qwen3", dtype="bfloat16"))
    params = read_params(wanted(folder.model, fsdp=8), folder)
    assert params["layers.gate"].dtype == np.float32
    back, weights = tmp_path / "back", Held(folder, params)
    export.export_model(weights, back, dtype="bfloat16", tokenizer=ByteTokenizer())
    for tensor, array in tensors_in(back).items():
        np.testing.assert_array_equal(array, folder.read(tensor))


def test_the_part_of_gemma_3_that_reads_text_is_taken_out_of_a_model_that_reads_images(tmp_path):
    text = write_folder(tmp_path / "text", "gemma3")
    whole = tmp_path / "whole"
    whole.mkdir()
    config = json.loads((text / "config.json").read_text())
    (whole / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": config, "vision_config": {}})
    )
    for path in text.glob("*"):
        if path.suffix == ".safetensors":
            from safetensors.numpy import save_file

            save_file(
                {f"language_model.{k}": v for k, v in load_file(path).items()}, whole / path.name
            )
    a, b = ModelFolder(text), ModelFolder(whole)
    assert a.model == b.model
    for tensor in a.tensors():
        np.testing.assert_array_equal(a.read(tensor.name), b.read(tensor.name))


def test_a_config_json_of_gemma_3_as_google_ships_it_is_read():
    model: Any = model_folder.model_of(
        {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        }
    )
    assert (model.num_heads, model.num_kv_heads, model.head_size) == (8, 4, 256)
    assert (model.global_every, model.rope_factor, model.vocab_size) == (6, 8.0, 262_208)
    assert (model.rope_theta, model.local_rope_theta) == (1e6, 1e4)


def test_a_config_json_of_gemma_2_as_google_ships_it_is_read():
    model: Any = model_folder.model_of(
        {
            "model_type": "gemma2",
            "vocab_size": 256_000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 8192,
        }
    )
    assert (model.global_every, model.score_cap, model.logit_cap) == (2, 50.0, 30.0)
    assert model.rope_theta == model.local_rope_theta == 1e4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_what_is_exported_and_gives_the_recorded_logits(name, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = ModelFolder(write_folder(tmp_path / "there", name))
    params = read_params(wanted(folder.model, fsdp=8), folder)
    weights = Held(folder, params)
    weights.companions = []  # config.json is ours then
    export.export_model(weights, tmp_path / "back", dtype="float32", tokenizer=ByteTokenizer())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model(torch.tensor(record_of(name)["tokens"])).logits.numpy()
    with np.load(MODELS / "golden" / f"{name}.npz") as arrays:
        expected = arrays["logits"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "holds no JSON object"),
        (lambda f: (f / "config.json").write_text("{}"), "model_type=None is no family"),
        (
            lambda f: (f / "config.json").write_text('{"model_type": "llama"}'),
            "'num_attention_heads' is missing",
        ),
        (lambda f: (f / model_folder.INDEX).write_text("{}"), "has no weight_map"),
        (
            lambda f: (f / model_folder.INDEX).write_text('{"weight_map": {}}'),
            "has no tensor 'model.embed_tokens.weight'",
        ),
        (
            lambda f: next(f.glob("*1-of*.safetensors")).write_bytes(b"\0" * 20),
            "cannot be read as safetensors",
        ),
        (lambda f: next(f.glob("*1-of*.safetensors")).unlink(), "cannot be read as safetensors"),
    ],
)
def test_a_damaged_folder_is_told_by_its_file(break_it, message, tmp_path):
    there = write_folder(tmp_path / "there", "llama3")
    break_it(there)
    with pytest.raises(ValueError, match=message) as error:
        folder = ModelFolder(there)
        read_params(wanted(folder.model, fsdp=8), folder)
    assert str(there) in str(error.value)


def test_a_folder_that_exists_is_not_written_over(tmp_path):
    with pytest.raises(ValueError, match="exists; name a new folder"):
        write_folder(tmp_path, "llama3")
