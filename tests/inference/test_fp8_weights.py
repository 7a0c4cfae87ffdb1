"""Model folders whose matrices have 8 bits: written, read back, and as others write them."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxscale.data.tokenizer import ByteTokenizer
from jaxscale.inference import export
from jaxscale.models import fp8_weights, model_folder
from jaxscale.models.model_folder import ModelFolder
from jaxscale.step.pretrained import read_params
from tests.inference.hf_folders import write_folder
from tests.inference.test_exchange import Held, wanted

MATRIX = "model.layers.0.mlp.down_proj.weight"


def exported(folder, tmp_path, name):
    """The folder's weights, as 8 bits in another folder."""
    params = read_params(wanted(folder.model, fsdp=8), folder)
    there = tmp_path / name
    weights = Held(folder, params)
    export.export_model(weights, there, dtype="fp8", tokenizer=ByteTokenizer(), file_bytes=20_000)
    return ModelFolder(there)


def test_a_matrix_in_blocks_comes_back_within_half_a_step():
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(200, 300)).astype(np.float32)
    matrix[:128, 128:256] *= 1e-4  # a block of its own
    matrix[128:, 256:] = 0
    values, scales = fp8_weights.quantised(matrix)
    assert values.dtype == fp8_weights.DTYPE and scales.shape == (2, 3)
    assert (np.log2(scales) % 1 == 0).all()
    back = fp8_weights.widened(values, scales, block=(128, 128))
    np.testing.assert_array_equal(back, back.astype(ml_dtypes.bfloat16).astype(np.float32))
    # e4m3 has steps of an eighth, and below 2**-6 of the range one of 2**-9.
    least = scales.repeat(128, 0)[:200].repeat(128, 1)[:, :300] * 2.0**-9
    assert (np.abs(back - matrix) <= np.maximum(np.abs(matrix) / 8, least) / 2).all()


def test_a_folder_of_8_bits_is_what_vllm_and_transformers_ask_for(tmp_path):
    folder = ModelFolder(write_folder(tmp_path / "m", "llama3", dtype="bfloat16"))
    narrow = exported(folder, tmp_path, "narrow")
    config = json.loads((narrow.path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["quantization_config"] == dict(
        quant_method="fp8",
        fmt="e4m3",
        activation_scheme="dynamic",
        weight_block_size=[128, 128],
        modules_to_not_convert=["lm_head"],
    )
    index = json.loads((narrow.path / model_folder.INDEX).read_text())["weight_map"]
    matrices = [
        tensor.name
        for tensor in folder.tensors()
        if len(tensor.shape) == 2 and ".layers." in tensor.name
    ]
    scales = {name for name in index if name.endswith("_scale_inv")}
    assert matrices and scales == {f"{name}_scale_inv" for name in matrices}
    for tensor in folder.tensors():
        wide, back = folder.read(tensor.name).astype(np.float32), narrow.read(tensor.name)
        if tensor.name in matrices:
            assert np.abs(back - wide).max() <= np.abs(wide).max() / 16
        else:
            np.testing.assert_array_equal(back.astype(np.float32), wide)


def test_a_second_time_changes_no_value(tmp_path):
    folder = ModelFolder(write_folder(tmp_path / "m", "qwen3", dtype="bfloat16"))
    once = exported(folder, tmp_path, "once")
    twice = exported(once, tmp_path, "twice")
    for tensor in folder.tensors():
        np.testing.assert_array_equal(once.read(tensor.name), twice.read(tensor.name))


def with_matrix(folder, *, values, **scales):
    """The folder with one more file, which has the matrix in 8 bits instead."""
    (folder / "other.safetensors").unlink(missing_ok=True)
    tensors = {f"{MATRIX}{end}": np.asarray(scale) for end, scale in scales.items()}
    save_file({MATRIX: values, **tensors}, folder / "other.safetensors")
    index = json.loads((folder / model_folder.INDEX).read_text())
    index["weight_map"] |= dict.fromkeys([MATRIX, *tensors], "other.safetensors")
    (folder / model_folder.INDEX).write_text(json.dumps(index))
    return ModelFolder(folder)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "m", "llama3")


@pytest.fixture
def values(folder):
    return ModelFolder(folder).read(MATRIX).astype(fp8_weights.DTYPE)


@pytest.mark.parametrize("shape", [(), (1,), (None,), (None, 1)])
def test_one_scale_for_all_or_for_each_row_is_read(folder, values, shape):
    shape = tuple(size or values.shape[0] for size in shape)
    scale = np.random.default_rng(0).random(shape).astype(np.float32)
    read = with_matrix(folder, values=values, _scale=scale).read(MATRIX)
    rows = np.broadcast_to(scale.reshape(-1, 1), (values.shape[0], 1))
    np.testing.assert_array_equal(read, values.astype(np.float32) * rows)


@pytest.mark.parametrize(
    ("scales", "problem"),
    [
        (dict(), "its values have 8 bits, and their scales are not there"),
        (dict(_scale=np.ones((3, 5), np.float32)), "scales of shape (3, 5) are none of a matrix"),
    ],
)
def test_scales_that_are_not_there_or_not_its_own_are_told(folder, values, scales, problem):
    with pytest.raises(ValueError) as error:
        with_matrix(folder, values=values, **scales).read(MATRIX)
    assert problem in str(error.value) and MATRIX in str(error.value)


@pytest.mark.parametrize("block", [[128], [0, 128], ["a", "b"]])
def test_blocks_of_no_size_are_told(folder, values, block):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(quant_method="fp8", weight_block_size=block)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="weight_block_size="):
        with_matrix(folder, values=values, _scale=np.ones((1, 1), np.float32)).read(MATRIX)
