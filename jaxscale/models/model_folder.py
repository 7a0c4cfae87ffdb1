"""A model as Hugging Face keeps it: a folder of safetensors files, config.json and a tokenizer.

Tensors are read and written one at a time, so that the host never holds a whole model.
"""

import contextlib
import functools
import itertools
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxscale.files import telling
from jaxscale.models import decoder, families, fp8_weights, hugging_face

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
# What stands beside the weights and says how text becomes tokens and how to go on with it.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
# The size at which Hugging Face starts another file, bytes.
FILE_BYTES = 5_000_000_000
# A model that also reads images keeps the part that reads text below one of these.
PREFIXES = (
    ("model.", "model."),
    ("model.", "language_model.model."),
    ("model.", "model.language_model."),
    ("lm_head.", "language_model.lm_head."),
)
DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
# Matrices of layers in 8 bits with scales, all else in bfloat16.
FP8 = "fp8"
NO_QUANTISED = (
    f"jaxscale reads no quantised weights but fp8; name a folder with {', '.join(DTYPES)}, or fp8"
)


class ModelFolder:
    """A folder to read: `config_json`, the `model`'s Config, `tensors` and what is in them.

    Raises ValueError for a folder that is none, or whose model jaxscale does not have.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        if not (self.path / CONFIG).is_file():
            raise ValueError(
                f"{str(self.path)!r} has no {CONFIG}; name a folder that holds one beside "
                "*.safetensors, as `transformers` saves a model (jaxscale downloads none)"
            )
        whole = _read_json(self.path / CONFIG)
        # That of a model which also reads images has the language model's in it.
        self.config_json: dict[str, Any] = whole.get("text_config", whole)
        with _telling_of(self.path / CONFIG):
            self.model = model_of(self.config_json)
            self.model.validate()

    def tensors(self) -> tuple[hugging_face.Tensor, ...]:
        """The table of the model's tensors, in the order of their files: each is read once."""
        table = families.of_config(self.model).hugging_face_names(self.model)
        return tuple(sorted(table, key=lambda tensor: self._file_of(tensor.name).name))

    def read(self, name: str) -> np.ndarray:
        """One tensor, [out, in], in the dtype of its file, or float32 if that is of 8 bits.

        Raises ValueError.
        """
        path, there = self._file_of(name), self._name_there(name)
        try:
            if _open(path).get_slice(there).get_dtype() == fp8_weights.NAME_THERE:
                block = fp8_weights.block_of(self.config_json)
                values = fp8_weights.read(path, there)
                return fp8_weights.widened(values, self._scales_of(name), block=block)
            array = _open(path).get_tensor(there)
        except (SafetensorError, OSError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: {name}: {error}; download it anew") from None
        if array.dtype not in (*DTYPES.values(), np.float64):
            raise ValueError(f"{path}: {name} is of {array.dtype}: {NO_QUANTISED}")
        return array

    def _scales_of(self, name: str) -> np.ndarray:
        there = self._name_there(name)
        for end in fp8_weights.SCALES:
            if there + end in self._places:
                return _open(self.path / self._places[there + end]).get_tensor(there + end)
        raise ValueError("its values have 8 bits, and their scales are not there")

    def companions(self) -> list[Path]:
        """config.json, and the files of the tokenizer that are there."""
        return companions_in(self.path)

    def _name_there(self, name: str) -> str:
        for ours, theirs in PREFIXES:
            candidate = theirs + name.removeprefix(ours)
            if name.startswith(ours) and candidate in self._places:
                return candidate
        if name in self._places:
            return name
        raise ValueError(
            f"{self.path} has no tensor {name!r}, which its {CONFIG} asks for; download it anew"
        )

    def _file_of(self, name: str) -> Path:
        return self.path / self._places[self._name_there(name)]

    @functools.cached_property
    def _places(self) -> dict[str, str]:
        """The file of every tensor there is."""
        if (self.path / INDEX).is_file():
            index = _read_json(self.path / INDEX).get("weight_map")
            if not (isinstance(index, dict) and all(isinstance(f, str) for f in index.values())):
                raise ValueError(f"{self.path / INDEX} has no weight_map; download it anew")
            return index
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ValueError(
                f"{self.path} has no *.safetensors; jaxscale reads no other files of weights: "
                "save the model anew with safe_serialization=True"
            )
        return {name: path.name for path in files for name in _open(path).keys()}


@contextlib.contextmanager
def _telling_of(path: Path) -> Iterator[None]:
    """What is wrong with the settings of a config.json, with its name."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing; download it anew") from None
    except (TypeError, AttributeError) as error:  # such as a list where an object should be
        raise ValueError(f"{path} is not as `transformers` writes it: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


@functools.lru_cache(maxsize=1)
def _open(path: Path):
    """One file at a time is open: tensors are read in the order of their files."""
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as safetensors: {error}; download it anew"
        ) from None


def companions_in(folder: Path) -> list[Path]:
    """config.json, and the files of the tokenizer that are there."""
    return [path for name in (CONFIG, *COMPANIONS) if (path := folder / name).is_file()]


def model_of(hf: Mapping[str, Any]) -> decoder.Config:
    """The model that a config.json describes. Raises ValueError for one we do not have."""
    settings = hf.get("quantization_config")
    if settings and settings.get("quant_method") != FP8:
        raise ValueError(f"quantization_config: {NO_QUANTISED}")
    return families.of_config_json(hf).from_hugging_face(hf)


def write(
    folder: Path,
    arrays: Iterable[tuple[str, np.ndarray]],
    *,
    dtype: str,
    config_json: Mapping[str, Any],
    companions: Iterable[Path] = (),
    file_bytes: int = FILE_BYTES,
) -> None:
    """Makes the folder, whole or not at all.

    arrays: every tensor of the model, with its name there; those of one file are held. dtype: of
    DTYPES, or FP8. Raises ValueError if the folder is there already, or cannot be made.
    """
    if folder.exists():
        raise ValueError(f"{str(folder)!r} exists; name a new folder, or remove this one")
    parts = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(parts, ignore_errors=True)
    with telling(f"{str(folder)!r} cannot be written", "name another folder"):
        parts.mkdir(parents=True)
    config_json = {k: v for k, v in config_json.items() if k != "quantization_config"}
    if dtype == FP8:
        arrays, dtype = fp8_weights.in_8_bits(arrays), "bfloat16"
        config_json["quantization_config"] = fp8_weights.SETTINGS
    files = list(_write_files(parts, arrays, dtype=DTYPES[dtype], file_bytes=file_bytes))
    _name_files(parts, files)
    _write_json(parts / CONFIG, dict(config_json, dtype=dtype, torch_dtype=dtype))
    for path in companions:
        shutil.copyfile(path, parts / path.name)
    parts.rename(folder)


def _write_files(parts: Path, arrays, *, dtype, file_bytes: int) -> Iterator[dict[str, int]]:
    """Writes the files 1, 2, ..., and gives the names and bytes of the tensors of each."""
    held: dict[str, np.ndarray] = {}
    arrays = iter(arrays)
    for number in itertools.count(1):
        size = 0
        for name, array in arrays:
            is_done = array.dtype == fp8_weights.DTYPE or name.endswith(fp8_weights.SCALES)
            held[name] = np.ascontiguousarray(array if is_done else array.astype(dtype, copy=False))
            size += held[name].nbytes
            if size >= file_bytes:
                break
        if not held:
            return
        # `transformers` asks for the format.
        save_file(held, parts / str(number), metadata={"format": "pt"})
        yield {name: array.nbytes for name, array in held.items()}
        held.clear()


def _name_files(parts: Path, files: list[dict[str, int]]) -> None:
    """As Hugging Face names them, with an index if there are several."""
    if len(files) == 1:
        (parts / "1").rename(parts / WEIGHTS)
        return
    places = {}
    for number, sizes in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        (parts / str(number)).rename(parts / name)
        places |= dict.fromkeys(sizes, name)
    total = sum(sum(sizes.values()) for sizes in files)
    _write_json(parts / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; download it anew") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object; download it anew")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def parse(value: str) -> Path:
    """The folder that `hf:DIR` names. Raises ValueError, without the value, for another form."""
    kind, _, path = value.partition(":")
    if kind != "hf" or not path:
        raise ValueError("write hf:DIR, a folder with config.json and *.safetensors")
    return Path(path).expanduser()
