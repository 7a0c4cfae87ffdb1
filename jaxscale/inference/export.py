"""Trained weights made into a model folder of Hugging Face."""

import contextlib
import json
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxscale.data.tokenizer import Tokenizer
from jaxscale.inference.weights import Weights
from jaxscale.models import families, hugging_face, model_folder


def export_model(
    weights: Weights,
    folder: Path,
    *,
    dtype: str,
    tokenizer: Tokenizer,
    file_bytes: int = model_folder.FILE_BYTES,
) -> None:
    """Writes the folder as `transformers` and vLLM read it, the vocabulary without its padding.

    dtype: of model_folder.DTYPES, or FP8. The host holds the weights in this dtype (for FP8 in
    bfloat16), and one file of them.
    Raises ValueError for a folder that exists, and for a model that no family there has.
    """
    ours, held = config_json(weights, tokenizer=tokenizer), dtype
    if dtype == model_folder.FP8:
        held = "bfloat16"
    tensors = families.of_config(weights.model).hugging_face_names(weights.model)
    model_folder.write(
        folder,
        hugging_face.export(tensors, weights.read(_abstract(weights.model, held))),
        dtype=dtype,
        config_json=ours,
        companions=[path for path in weights.companions if path.name != model_folder.CONFIG],
        file_bytes=file_bytes,
    )


def config_json(weights: Weights, *, tokenizer: Tokenizer) -> dict[str, Any]:
    """That of the folder the model came from, if it is of this model; else the family's own."""
    ours = families.of_config(weights.model).to_hugging_face(weights.model)
    for path in weights.companions:
        if path.name == model_folder.CONFIG:
            theirs = json.loads(path.read_text(encoding="utf-8"))
            with contextlib.suppress(ValueError, KeyError):
                if model_folder.model_of(theirs) == weights.model:
                    return theirs
    return ours | {"eos_token_id": tokenizer.end_of_document, "bos_token_id": None}


def _abstract(model: Any, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Our parameters, on the host."""
    on_host = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    state = nnx.state(jax.eval_shape(lambda: model.build(nnx.Rngs(0))), nnx.Param)
    return {
        ".".join(map(str, path)): jax.ShapeDtypeStruct(
            box.get_value().shape, model_folder.DTYPES[dtype], sharding=on_host
        )
        for path, box in nnx.to_flat_state(state)
    }
