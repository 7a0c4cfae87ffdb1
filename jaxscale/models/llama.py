"""Llama 3, and by its options Qwen 2, Qwen 3 and Mistral.

Sources: Llama 3 (arXiv:2407.21783), Qwen 2 and 3 (arXiv:2407.10671, 2505.09388), Mistral
(arXiv:2310.06825).

B rows, S sequence, D model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxscale.config import number
from jaxscale.models import decoder, hugging_face
from jaxscale.ops import ring, rope
from jaxscale.ops.execution import Execution
from jaxscale.ops.layers import Stack


@dataclasses.dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Config(decoder.Config):
    """Sizes and options; the defaults are those of Llama 3."""

    rope_theta: float = number(least=1, most=1e30, default=500_000.0)
    rope_scaling: rope.Scaling | None = None
    # Qwen 2: biases on Q, K and V. Qwen 3: RMS norm of each query and key head.
    qkv_bias: bool = False
    qk_norm: bool = False
    # Mistral: a token sees itself and the `window - 1` before it.
    window: int | None = number(least=1, default=None)

    def validate(self) -> None:
        """Raises ValueError for sizes and options that cannot be."""
        decoder.Config.validate(self)
        if self.rope_scaling is not None:
            self.rope_scaling.validate()

    def num_layer_params(self) -> int:
        heads, head = self.num_heads + 2 * self.num_kv_heads, self.head_dim()
        extra = heads * head * self.qkv_bias + 2 * head * self.qk_norm
        return decoder.Config.num_layer_params(self) + extra

    def build(self, rngs: nnx.Rngs) -> "Model":
        return Model(self, rngs)


class Model(decoder.Model):
    c: Config

    def __init__(self, c: Config, rngs: nnx.Rngs):
        super().__init__(c, rngs, block=Block)

    def stacks(self) -> tuple[Stack, ...]:
        """One stack of equal layers."""
        known: dict[str, Any] = dict(reads_by_linear=True, sums_in_ring=True)
        return (Stack(self.layers, (block,), share=self._share, **known),)

    def _share(self, documents):
        c = self.c
        cos_sin = rope.angles(
            documents.positions_BS, c.head_dim(), theta=c.rope_theta, scaling=c.rope_scaling
        )
        return cos_sin, documents


class Block(decoder.Block):
    c: Config

    def __init__(self, c: Config, rngs: nnx.Rngs):
        super().__init__(c, rngs)
        if c.qkv_bias:
            self.add_qkv_bias(rngs)
        if c.qk_norm:
            self.add_qk_norm(rngs)


def block(x_BSD, weights: Block, shared, execution: Execution):
    """One layer: (x, no aux). shared: cos and sin of the positions, and the documents."""

    def attend(normed_BSD, shared):
        cos_sin, documents = shared
        return weights.attend(
            normed_BSD,
            cos_sin=cos_sin,
            documents=documents,
            execution=execution,
            window=weights.c.window,
        )

    def feed_forward(normed_BSD, _):
        return weights.feed_forward(normed_BSD, execution=execution)

    x_BSD, normed_BSD = weights.normed(x_BSD, weights.attention_norm, execution=execution)
    added_BSD = ring.summed(attend, normed_BSD, shared, execution=execution)
    x_BSD, normed_BSD = weights.normed(
        x_BSD, weights.mlp_norm, added_BSD=added_BSD, execution=execution
    )
    return x_BSD + ring.summed(feed_forward, normed_BSD, shared, execution=execution), {}


# As Hugging Face has it.

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def from_hugging_face(hf: Mapping[str, Any]) -> Config:
    """The model that a config.json describes.

    Raises ValueError for another family, and for a setting that ours does not have.
    """
    family = hf["model_type"]
    if family not in FAMILIES:
        raise ValueError(f"model_type={family!r}: it must be one of {', '.join(FAMILIES)}")
    hugging_face.require(
        hf, hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False
    )
    theta, scaling = _rope_of(hf)
    return Config(
        **hugging_face.sizes(hf),
        tie_embeddings=hf.get("tie_word_embeddings", False),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        window=hf.get("sliding_window") if family == "mistral" else None,
    )


def _rope_of(hf: Mapping[str, Any]) -> tuple[float, rope.Scaling | None]:
    """theta and Llama 3.1's scaling; transformers 5 writes both into `rope_parameters`."""
    settings = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = settings.get("rope_theta", hf.get("rope_theta", 10_000.0))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope_type={kind!r}: it must be 'default' or 'llama3'")
    return theta, rope.Scaling(
        factor=settings["factor"],
        low=settings["low_freq_factor"],
        high=settings["high_freq_factor"],
        original_seq_len=settings["original_max_position_embeddings"],
    )


def to_hugging_face(c: Config) -> dict[str, Any]:
    """The config.json of the model, as transformers 4 and 5 and vLLM read it.

    Raises ValueError for options that no one of the families has together.
    """
    family = _family_of(c)
    hf = dict(
        hugging_face.config_json(c, hidden_act="silu"),
        architectures=[ARCHITECTURES[family]],
        model_type=family,
        rope_theta=c.rope_theta,
        rope_scaling=None,
    )
    if c.rope_scaling is not None:
        hf["rope_scaling"] = dict(
            rope_type="llama3",
            factor=c.rope_scaling.factor,
            low_freq_factor=c.rope_scaling.low,
            high_freq_factor=c.rope_scaling.high,
            original_max_position_embeddings=c.rope_scaling.original_seq_len,
        )
    if family == "mistral":
        hf["sliding_window"] = c.window
    if family in ("llama", "qwen3"):
        hf["attention_bias"] = False
    if family in ("qwen2", "qwen3"):
        hf["use_sliding_window"] = False
    return hf


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def _family_of(c: Config) -> str:
    options = {
        "qwen2": c.qkv_bias,
        "qwen3": c.qk_norm,
        "mistral": c.window is not None,
    }
    families = [family for family, is_on in options.items() if is_on] or ["llama"]
    if len(families) > 1:
        raise ValueError(
            f"config.model has the options of {' and '.join(families)} together "
            "(qkv_bias, qk_norm, window); Hugging Face has no such family"
        )
    if families == ["qwen2"] and c.head_dim() * c.num_heads != c.model_dim:
        raise ValueError(
            f"config.model.head_size={c.head_size}: Qwen 2 as Hugging Face has it needs "
            f"model_dim / num_heads = {c.model_dim // c.num_heads}"
        )
    return families[0]


def hugging_face_names(c: Config) -> tuple[hugging_face.Tensor, ...]:
    """Every tensor of the model; a tied head has none of its own."""
    norms = {
        "input_layernorm.weight": "attention_norm",
        "post_attention_layernorm.weight": "mlp_norm",
    }
    tensors = list(hugging_face.decoder_names(c, norms=norms))
    if c.qk_norm:
        tensors += hugging_face.qk_norm_names(c)
    if c.qkv_bias:
        tensors += [
            hugging_face.layer_tensor(
                layer,
                f"self_attn.{name}_proj.bias",
                path="qkv_bias",
                shape=(size,),
                part=(slice(None), of_group),
            )
            for layer in range(c.num_layers)
            for name, (size, of_group) in hugging_face.heads_of(c).items()
        ]
    return tuple(tensors)
