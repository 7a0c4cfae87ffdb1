"""Weights in 8 bits as Hugging Face keeps them: a float32 scale for each block of 128 x 128.

    model.layers.0.mlp.up_proj.weight            float8_e4m3fn [out, in]
    model.layers.0.mlp.up_proj.weight_scale_inv  float32 [out / 128, in / 128], rounded up

The weight is its values times its scales. DeepSeek-V3's format (arXiv:2412.19437), which vLLM and
`transformers` read. Weights of one scale, or of one for each row, are read too (`weight_scale`).
"""

import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPE, NAME_THERE = np.dtype(ml_dtypes.float8_e4m3fn), "F8_E4M3"
BLOCK = (128, 128)
SCALES = ("_scale_inv", "_scale")
SETTINGS = dict(
    quant_method="fp8",
    fmt="e4m3",
    activation_scheme="dynamic",
    weight_block_size=list(BLOCK),
    modules_to_not_convert=["lm_head"],
)


def in_8_bits(arrays: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors, each matrix of a layer as values in 8 bits and its scales."""
    for name, array in arrays:
        if array.ndim == 2 and ".layers." in name:
            values, scales = quantised(array)
            yield name, values
            yield name + SCALES[0], scales
        else:
            yield name, array


def quantised(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values, scales) of a matrix.

    Scales are powers of two, as in training (`ops/fp8.py`): bfloat16 holds the product.
    """
    shape = [-(-size // block) for size, block in zip(array.shape, BLOCK, strict=True)]
    scales = np.ones(shape, np.float32)
    values = np.empty(array.shape, DTYPE)
    most = float(ml_dtypes.finfo(DTYPE).max)
    for place in itertools.product(*map(range, shape)):
        part = tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, BLOCK, strict=True))
        block = array[part].astype(np.float32)
        if amax := np.abs(block).max():
            scales[place] = 2.0 ** np.ceil(np.log2(amax / most))
        values[part] = (block / scales[place]).astype(DTYPE)
    return values, scales


def widened(values: np.ndarray, scales: np.ndarray, *, block: tuple[int, int]) -> np.ndarray:
    """The matrix, float32. scales: one, one for each row, or one for each block of this size.

    Raises ValueError for scales of another shape.
    """
    rows, columns = values.shape
    of_blocks = (-(-rows // block[0]), -(-columns // block[1]))
    if scales.size == 1:
        scales = scales.reshape(1, 1)
    elif scales.size == rows and scales.shape != of_blocks:
        scales = scales.reshape(rows, 1)
    elif scales.shape == of_blocks:
        scales = scales.repeat(block[0], axis=0)[:rows].repeat(block[1], axis=1)[:, :columns]
    else:
        raise ValueError(
            f"scales of shape {scales.shape} are none of a matrix {values.shape} in blocks {block}"
        )
    return values.astype(np.float32) * scales.astype(np.float32)


def block_of(config_json: Mapping[str, Any]) -> tuple[int, int]:
    """The size of the blocks that a config.json speaks of. Raises ValueError for what is none."""
    settings = config_json.get("quantization_config") or {}
    block = settings.get("weight_block_size") or BLOCK
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise ValueError(f"weight_block_size={block!r}: it must be two sizes")
    return block[0], block[1]


def read(path: Path, name: str) -> np.ndarray:
    """A tensor of 8 bits out of a safetensors file; numpy itself has no such dtype.

    The file has been opened before: where its tensors are has been checked.
    """
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(size))[name]
        begin, end = entry["data_offsets"]
        file.seek(8 + size + begin)
        return np.frombuffer(file.read(end - begin), DTYPE).reshape(entry["shape"])
