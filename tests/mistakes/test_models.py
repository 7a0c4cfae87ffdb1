"""Model folders of Hugging Face, and workdirs, that are not what a user took them for."""

import json
import shutil
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.mistakes.said import assert_mistake, content, cut

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
QUERY = "model.layers.0.self_attn.q_proj.weight"
ANEW = "download it anew"

# Settings of config.json, None to leave one out -> what the message says.
CONFIGS = {
    "nothing": (None, ("model_type=None is no family", "there are llama")),
    "gpt2": ({"model_type": "gpt2"}, ("model_type='gpt2' is no family", "there are llama")),
    "experts": ({"model_type": "mixtral"}, ("'mixtral' is no family", "there are llama")),
    "a number for a family": ({"model_type": 3}, ("model_type=3 is no family",)),
    "a size missing": ({"hidden_size": None}, ("'hidden_size' is missing", ANEW)),
    "a size in words": ({"hidden_size": "64"}, ("model_dim='64' is of type str", "type int")),
    "a negative size": ({"hidden_size": -64}, ("model_dim=-64", "1 or more")),
    "half a size": ({"hidden_size": 64.5}, ("model_dim=64.5 is of type float", "type int")),
    "no layers": ({"num_hidden_layers": 0}, ("num_layers=0", "1 or more")),
    "too many layers": ({"num_hidden_layers": 10**12}, ("num_layers=1000000000000", "or less")),
    "layers without weights": ({"num_hidden_layers": 3}, ("no tensor 'model.layers.2", ANEW)),
    "heads that divide nothing": ({"num_attention_heads": 3}, ("num_heads=3 must be a multiple",)),
    "no heads": ({"num_attention_heads": 0}, ("num_heads=0", "1 or more")),
    "an odd head": ({"head_dim": 7}, ("head_size=7 must be even",)),
    "other words": ({"vocab_size": 301}, ("has shape (300, 32)", "(301, 32)", "anew")),
    "another width": ({"intermediate_size": 50}, ("has shape (48, 32)", "(50, 32)", "anew")),
    "no epsilon": ({"rms_norm_eps": 0}, ("norm_eps=0.0", "above 0")),
    "a length in words": ({"max_position_embeddings": "long"}, ("'long' is of type str", "int")),
    "another activation": ({"hidden_act": "gelu"}, ("hidden_act='gelu'", "must be 'silu'")),
    "biases": ({"attention_bias": True}, ("attention_bias=True", "must be False")),
    "a tie in words": ({"tie_word_embeddings": "yes"}, ("'yes' is of type str", "bool")),
    "quantised": ({"quantization_config": {"bits": 4}}, ("quantization_config", "name a folder")),
    "another rotation": (
        {"rope_parameters": {"rope_type": "yarn"}},
        ("rope_type='yarn'", "'default' or 'llama3'"),
    ),
    "half a rotation": (
        {"rope_parameters": {"rope_type": "llama3"}},
        ("'factor' is missing", ANEW),
    ),
    "a rotation in words": ({"rope_parameters": "llama3"}, ("is not as `transformers` writes it",)),
    "rotations in a list": ({"rope_parameters": [1]}, ("is not as `transformers` writes it",)),
    "a part in a list": ({"text_config": [1]}, ("is not as `transformers` writes it",)),
}


def edited(change):
    """Changes the tensors of the folder's one file."""

    def edit(folder):
        arrays = load_file(folder / WEIGHTS)
        change(arrays)
        save_file(arrays, folder / WEIGHTS)

    return edit


def indexed(text):
    return lambda folder: (folder / INDEX).write_text(text)


# What is done to the folder -> what the message says.
FOLDERS = {
    "no config.json": (lambda f: (f / "config.json").unlink(), ("has no config.json", "name a")),
    "a broken config.json": (
        lambda f: (f / "config.json").write_text("{"),
        ("config.json cannot be read", ANEW),
    ),
    "a list for a config.json": (
        lambda f: (f / "config.json").write_text("[]"),
        ("holds no JSON object", ANEW),
    ),
    "bytes for a config.json": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe"),
        ("config.json cannot be read", ANEW),
    ),
    "no weights": (
        lambda f: (f / WEIGHTS).unlink(),
        ("has no *.safetensors", "safe_serialization"),
    ),
    "weights of PyTorch": (
        lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"),
        ("has no *.safetensors", "safe_serialization=True"),
    ),
    "an empty file": (lambda f: cut(f / WEIGHTS, 0), (WEIGHTS, "cannot be read", ANEW)),
    "half a header": (lambda f: cut(f / WEIGHTS, 50), (WEIGHTS, "cannot be read", ANEW)),
    "half a file": (lambda f: cut(f / WEIGHTS, 20_000), (WEIGHTS, "cannot be read", ANEW)),
    "a pointer of git LFS": (
        lambda f: (f / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n" * 9),
        (WEIGHTS, "cannot be read", ANEW),
    ),
    "a tensor missing": (edited(lambda a: a.pop(QUERY)), (f"no tensor {QUERY!r}", ANEW)),
    "a tensor cut": (
        edited(lambda a: a.update({QUERY: a[QUERY][1:].copy()})),
        (f"{QUERY} has shape (31, 32)", "(32, 32)", "anew"),
    ),
    "a quantised tensor": (
        edited(lambda a: a.update({QUERY: a[QUERY].astype(np.int8)})),
        (f"{QUERY} is of int8", "name a folder with bfloat16"),
    ),
    "a broken index": (indexed("{"), (INDEX, "cannot be read", ANEW)),
    "an index of nothing": (indexed("{}"), (INDEX, "has no weight_map", ANEW)),
    "a list for an index": (indexed('{"weight_map": [1]}'), ("has no weight_map", ANEW)),
    "a number for a file": (
        indexed(f'{{"weight_map": {{"{QUERY}": 3}}}}'),
        ("has no weight_map", ANEW),
    ),
    "an index of other tensors": (indexed('{"weight_map": {}}'), ("has no tensor", ANEW)),
}


# What is done to a workdir -> what the message says, of --workdir.
WORKDIRS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "nothing there": (shutil.rmtree, ("holds no run", "has no config.json", "name the --workdir")),
    "a broken config.json": (
        lambda f: (f / "config.json").write_text("{"),
        ("holds no run that can be read", "cannot be read as JSON"),
    ),
    "the config.json of another model": (
        lambda f: (f / "config.json").write_text('{"model_type": "llama"}'),
        ("config.model_type is not a setting",),
    ),
    "no checkpoints": (
        lambda f: shutil.rmtree(f / "checkpoints"),
        ("no checkpoint", "train first"),
    ),
    "half a save": (
        lambda f: [path.unlink() for path in f.rglob("checksums.json")],
        ("holds no checkpoint", "train first"),
    ),
}
# Words behind `train --config=config.py --workdir=unwritten` -> what the message says.
STARTS = {
    "--config.init_from=hf:nowhere": ("config.init_from='hf:nowhere'", "has no config.json"),
    "--config.init_from=hf:hf": ("config.init_from='hf:hf' holds another model", "--config.model="),
    "--config.model=hf:org/name": ("config.model='hf:org/name'", "jaxscale downloads none"),
    "--config.checkpoint.local=config.py": (
        "config.checkpoint.local='config.py' cannot be written to",
        "set it to another folder",
    ),
    "--config.checkpoint.local=/proc/x": ("config.checkpoint.local='/proc/x'", "another folder"),
}
TABLES = (CONFIGS, FOLDERS, WORKDIRS, STARTS)


@pytest.fixture
def copy(hf, tmp_path):
    return shutil.copytree(hf, tmp_path / "hf")


def generate(asked, folder):
    return asked(f"generate --hf={folder} --tokenizer=bytes --prompt=x")


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_json_that_is_not_ours_is_told(asked, copy, case):
    changes, fragments = CONFIGS[case]
    settings = json.loads((copy / "config.json").read_text()) | (changes or {})
    kept = {key: value for key, value in settings.items() if changes and value is not None}
    (copy / "config.json").write_text(json.dumps(kept))
    answer = generate(asked, copy)
    assert_mistake(answer, str(copy), *fragments, touched_devices=answer.touched_devices)


@pytest.mark.parametrize("case", FOLDERS)
def test_a_model_folder_that_is_not_whole_is_told(asked, copy, case):
    damage, fragments = FOLDERS[case]
    damage(copy)
    answer = generate(asked, copy)
    assert_mistake(answer, str(copy), *fragments, touched_devices=answer.touched_devices)


@pytest.mark.parametrize("case", WORKDIRS)
def test_a_workdir_that_holds_no_run_is_told(asked, folder, tmp_path, case):
    damage, fragments = WORKDIRS[case]
    workdir = shutil.copytree(folder / "run", tmp_path / "run")
    damage(workdir)
    before = content(workdir)
    answer = asked(f"generate --workdir={workdir} --prompt=x")
    assert_mistake(answer, str(workdir), *fragments, touched_devices=answer.touched_devices)
    assert content(workdir) == before


@pytest.mark.parametrize("settings", STARTS)
def test_a_folder_that_a_run_cannot_start_with_is_told(asked, folder, hf, settings):
    answer = asked(f"train --config=config.py --workdir=unwritten {settings}")
    assert_mistake(answer, *STARTS[settings], touched_devices=answer.touched_devices)
    assert content(folder / "unwritten") == {}
