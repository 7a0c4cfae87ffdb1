"""Hugging Face's tensors and ours: which is which, and copies from one to the other.

A family's file has `from_hugging_face(config.json) -> Config`, its inverse `to_hugging_face`, and
its table, `hugging_face_names`, which begins with what all have (`decoder_names`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.models import decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of Hugging Face, and where its values are in our parameters.

    name, shape: theirs; a matrix is [out, in].
    path: of our parameter, as in a checkpoint ("layers.qkv").
    part: the index of the values in our array; what no tensor covers is padding.
    is_transposed: ours has the input first, [in, out]; `out` may be several axes.
    """

    name: str
    shape: tuple[int, ...]
    path: str
    part: tuple[int | slice, ...] = ()
    is_transposed: bool = False


def as_ours(tensor: Tensor, values: np.ndarray) -> np.ndarray:
    """A view of the tensor's values with the axes in our order.

    Raises ValueError for values of another shape than the table's.
    """
    if values.shape != tensor.shape:
        raise ValueError(
            f"{tensor.name} has shape {values.shape}; its config.json makes it {tensor.shape}: "
            "download both anew"
        )
    return values.T if tensor.is_transposed else values


def export(
    tensors: Sequence[Tensor], params: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Their tensors by name, in our dtype; one of our parameters at a time is on the host."""
    for path, parts in _by_path(tensors):
        ours = np.asarray(params[path])
        for tensor in parts:
            values = ours[tensor.part]
            if tensor.is_transposed:
                yield tensor.name, values.reshape(tensor.shape[::-1]).T
            else:
                yield tensor.name, values.reshape(tensor.shape)


def _by_path(tensors: Sequence[Tensor]) -> Iterator[tuple[str, Iterator[Tensor]]]:
    def path(tensor: Tensor) -> str:
        return tensor.path

    return itertools.groupby(sorted(tensors, key=path), path)


# What the families share.

ALL = slice(None)
# What a config.json says of a model that has no limit of its own: it has to name one.
UNLIMITED_SEQ_LEN = 131_072


def require(hf: Mapping[str, Any], **allowed: Any) -> None:
    """Raises ValueError for a setting of a config.json that ours does not have."""
    for key, value in allowed.items():
        if hf.get(key, value) != value:
            raise ValueError(f"{key}={hf[key]!r}: it must be {value!r}")


def sizes(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `decoder.Config` that a config.json gives."""
    num_heads = hf["num_attention_heads"]
    return dict(
        vocab_size=hf["vocab_size"],
        model_dim=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=hf.get("num_key_value_heads") or num_heads,
        mlp_dim=hf["intermediate_size"],
        head_size=hf.get("head_dim"),
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        max_seq_len=hf.get("max_position_embeddings"),
    )


def config_json(c: decoder.Config, **more: Any) -> dict[str, Any]:
    """What every family's config.json says; more: the family's own."""
    return dict(
        vocab_size=c.vocab_size,
        hidden_size=c.model_dim,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim(),
        intermediate_size=c.mlp_dim,
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tie_embeddings,
        max_position_embeddings=c.max_seq_len or UNLIMITED_SEQ_LEN,
        attention_dropout=0.0,
        use_cache=True,
        **more,
    )


def decoder_names(c: decoder.Config, *, norms: Mapping[str, str]) -> tuple[Tensor, ...]:
    """Tables, attention and feed-forward; a tied head has no tensor of its own.

    norms: our vectors of a layer by their names there, which differ between families.
    """
    words, table = slice(c.vocab_size), (c.vocab_size, c.model_dim)
    tensors = [
        Tensor(name="model.embed_tokens.weight", shape=table, path="embedding", part=(words,)),
        Tensor(name="model.norm.weight", shape=(c.model_dim,), path="norm"),
    ]
    if not c.tie_embeddings:
        tensors.append(
            Tensor(
                name="lm_head.weight",
                shape=table,
                path="head",
                part=(ALL, words),
                is_transposed=True,
            )
        )
    for layer in range(c.num_layers):
        tensors += _layer_names(c, layer, norms=norms)
    return tuple(tensors)


def layer_tensor(layer: int, name: str, *, path: str, shape: tuple[int, ...], **options) -> Tensor:
    """A tensor of one layer; options: `part` within the layer, `is_transposed`."""
    part = (layer, *options.pop("part", ()))
    name, path = f"model.layers.{layer}.{name}", f"layers.{path}"
    return Tensor(name=name, path=path, shape=shape, part=part, **options)


def heads_of(c: decoder.Config) -> dict[str, tuple[int, slice | int]]:
    """q, k and v: their sizes there, and which of our [..., K, G + 2, H] they are."""
    head, group = c.head_dim(), c.num_heads // c.num_kv_heads
    return {
        "q": (c.num_heads * head, slice(group)),
        "k": (c.num_kv_heads * head, group),
        "v": (c.num_kv_heads * head, group + 1),
    }


def _layer_names(c: decoder.Config, layer: int, *, norms: Mapping[str, str]) -> list[Tensor]:
    tensor, model, mlp = functools.partial(layer_tensor, layer), c.model_dim, c.mlp_dim
    projections = [
        tensor(
            f"self_attn.{name}_proj.weight",
            path="qkv",
            shape=(size, model),
            part=(ALL, ALL, of_group),
            is_transposed=True,
        )
        for name, (size, of_group) in heads_of(c).items()
    ]
    width = c.num_heads * c.head_dim()
    return [
        *projections,
        tensor("self_attn.o_proj.weight", path="out", shape=(model, width)),
        tensor("mlp.gate_proj.weight", path="gate", shape=(mlp, model), is_transposed=True),
        tensor("mlp.up_proj.weight", path="up", shape=(mlp, model), is_transposed=True),
        tensor("mlp.down_proj.weight", path="down", shape=(model, mlp)),
        *(tensor(name, path=path, shape=(model,)) for name, path in norms.items()),
    ]


def qk_norm_names(c: decoder.Config) -> list[Tensor]:
    """The norms of query and key heads, of all layers."""
    return [
        layer_tensor(
            layer, f"self_attn.{name}_norm.weight", path=f"{name}_norm", shape=(c.head_dim(),)
        )
        for layer in range(c.num_layers)
        for name in "qk"
    ]
