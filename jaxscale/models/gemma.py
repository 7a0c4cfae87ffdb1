"""Gemma 3, and by its options Gemma 2: local and global attention by turns, norms after as well.

Sources: Gemma 2 and 3 (arXiv:2408.00118, 2503.19786). Norm scales are stored less 1.

B rows, S sequence, D model.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxscale import sharding as shd
from jaxscale.config import number
from jaxscale.models import decoder, hugging_face
from jaxscale.ops import ring, rope
from jaxscale.ops.execution import Execution
from jaxscale.ops.gated import geglu
from jaxscale.ops.layers import Stack


@dataclasses.dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Config(decoder.Config):
    """Sizes and options; the defaults are those of Gemma 3."""

    tie_embeddings: bool = True
    norm_eps: float = number(above=0, below=1, default=1e-6)
    # In a local layer a token sees itself and the `window - 1` before it.
    window: int = number(least=1, default=1024)
    # One layer in so many is global, the last of each turn.
    global_every: int = number(least=1, default=6)
    # Of global layers; their positions are `rope_factor` times closer together.
    rope_theta: float = number(least=1, most=1e30, default=1_000_000.0)
    rope_factor: float = number(least=1, default=1.0)
    local_rope_theta: float = number(least=1, most=1e30, default=10_000.0)
    # Scores are divided by its root; None: the head size.
    query_scale: float | None = number(above=0, default=None)
    qk_norm: bool = True
    # Gemma 2: scores and logits become cap * tanh(x / cap).
    score_cap: float | None = number(above=0, default=None)
    logit_cap: float | None = number(above=0, default=None)

    def neutral_scale(self) -> float:
        return 0.0

    def num_layer_params(self) -> int:
        extra = 2 * self.model_dim + 2 * self.head_dim() * self.qk_norm
        return decoder.Config.num_layer_params(self) + extra

    def build(self, rngs: nnx.Rngs) -> "Model":
        return Model(self, rngs)


class Model(decoder.Model):
    c: Config

    def __init__(self, c: Config, rngs: nnx.Rngs):
        super().__init__(c, rngs, block=Block)

    def embed(self, tokens_BS, execution: Execution):
        x_BSD = super().embed(tokens_BS, execution)
        return x_BSD * jnp.asarray(self.c.model_dim**0.5, x_BSD.dtype)

    def stacks(self) -> tuple[Stack, ...]:
        """One stack, whose layers are local but for each `global_every`th."""
        local, whole = (functools.partial(block, is_local=is_local) for is_local in (True, False))
        turn = (local,) * (self.c.global_every - 1) + (whole,)
        known: dict[str, Any] = dict(reads_by_linear=True, sums_in_ring=True)
        return (Stack(self.layers, turn, share=self._share, **known),)

    def _share(self, documents):
        angles = functools.partial(rope.angles, documents.positions_BS, self.c.head_dim())
        stretch = rope.Stretch(factor=self.c.rope_factor)
        return {
            "local": angles(theta=self.c.local_rope_theta),
            "global": angles(theta=self.c.rope_theta, scaling=stretch),
            "documents": documents,
        }

    def output(self, x_BSD):
        return *super().output(x_BSD)[:2], self.c.logit_cap


class Block(decoder.Block):
    c: Config

    def __init__(self, c: Config, rngs: nnx.Rngs):
        super().__init__(c, rngs)
        self.post_attention_norm = shd.param(
            rngs, (c.model_dim,), axes="norm", fill=c.neutral_scale()
        )
        self.post_mlp_norm = shd.param(rngs, (c.model_dim,), axes="norm", fill=c.neutral_scale())
        if c.qk_norm:
            self.add_qk_norm(rngs)


def block(x_BSD, weights: Block, shared, execution: Execution, *, is_local: bool):
    """One layer: (x, no aux)."""
    c = weights.c

    def attend(normed_BSD, shared):
        return weights.attend(
            normed_BSD,
            cos_sin=shared["local" if is_local else "global"],
            documents=shared["documents"],
            execution=execution,
            scale=(c.query_scale or c.head_dim()) ** -0.5,
            window=c.window if is_local else None,
            cap=c.score_cap,
        )

    def feed_forward(normed_BSD, _):
        return weights.feed_forward(normed_BSD, execution=execution, activation=geglu)

    x_BSD, normed_BSD = weights.normed(x_BSD, weights.attention_norm, execution=execution)
    added_BSD = ring.summed(attend, normed_BSD, shared, execution=execution)
    added_BSD = decoder.normed(added_BSD, weights.post_attention_norm, c=c)
    x_BSD, normed_BSD = weights.normed(
        x_BSD, weights.mlp_norm, added_BSD=added_BSD, execution=execution
    )
    added_BSD = ring.summed(feed_forward, normed_BSD, shared, execution=execution)
    return x_BSD + decoder.normed(added_BSD, weights.post_mlp_norm, c=c), {}


# As Hugging Face has it.

FAMILIES = ("gemma2", "gemma3_text")


# What a config.json of Gemma 3 may leave out, as the larger models do.
GEMMA_3 = dict(
    vocab_size=262_208,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-6,
    max_position_embeddings=131_072,
)
# Layers in a turn, where layer_types does not say it: the last is global.
TURNS = {"gemma2": 2, "gemma3_text": 6}


def from_hugging_face(hf: Mapping[str, Any]) -> Config:
    """The model that a config.json describes; of Gemma 3 the part that reads text.

    Raises ValueError for another family, and for a setting that ours does not have.
    """
    family = hf["model_type"]
    if family not in FAMILIES:
        raise ValueError(f"model_type={family!r}: it must be one of {', '.join(FAMILIES)}")
    hugging_face.require(hf, hidden_activation="gelu_pytorch_tanh", attention_bias=False)
    hf = (GEMMA_3 if family == "gemma3_text" else {}) | dict(hf)
    whole, local_theta = _rope_of(hf)
    return Config(
        **hugging_face.sizes(hf),
        tie_embeddings=hf.get("tie_word_embeddings", True),
        window=hf["sliding_window"],
        global_every=_global_every(hf),
        rope_theta=whole["rope_theta"],
        rope_factor=whole.get("factor", 1.0),
        local_rope_theta=local_theta,
        query_scale=hf["query_pre_attn_scalar"],
        qk_norm=family == "gemma3_text",
        score_cap=hf.get("attn_logit_softcapping"),
        logit_cap=hf.get("final_logit_softcapping"),
    )


def _rope_of(hf: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
    """The rotation of global layers, and theta of local ones; transformers 5 and 4 differ."""
    if ropes := hf.get("rope_parameters"):
        whole, local = (ropes.get(f"{kind}_attention", ropes) for kind in ("full", "sliding"))
        local_theta = local["rope_theta"]
    else:
        is_gemma_3 = hf["model_type"] == "gemma3_text"
        theta = hf.get("rope_theta", 1_000_000.0 if is_gemma_3 else 10_000.0)
        whole = dict(hf.get("rope_scaling") or {}, rope_theta=theta)
        local_theta = hf.get("rope_local_base_freq", 10_000.0 if is_gemma_3 else theta)
    if (kind := whole.get("rope_type", "default")) not in ("default", "linear"):
        raise ValueError(f"rope_type={kind!r}: it must be 'default' or 'linear'")
    return whole, local_theta


def _global_every(hf: Mapping[str, Any]) -> int:
    """Every how many layers attention is global. Raises ValueError if there is no such rhythm."""
    kinds = hf.get("layer_types")
    if kinds is None:
        return hf.get("sliding_window_pattern", TURNS[hf["model_type"]])
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    wanted = [
        "sliding_attention" if number % every else "full_attention"
        for number in range(1, len(kinds) + 1)
    ]
    if kinds != wanted:
        raise ValueError(f"layer_types={kinds!r}: every {every}th must be 'full_attention'")
    return every


def to_hugging_face(c: Config) -> dict[str, Any]:
    """The config.json of the model, as transformers 4 and 5 and vLLM read it.

    Raises ValueError for options that neither family has.
    """
    family = "gemma3_text" if c.qk_norm else "gemma2"
    if family == "gemma2" and (c.rope_factor != 1 or c.local_rope_theta != c.rope_theta):
        raise ValueError(
            f"config.model.rope_factor={c.rope_factor} and local_rope_theta={c.local_rope_theta}: "
            f"Gemma 2 as Hugging Face has it needs 1 and rope_theta={c.rope_theta}"
        )
    stretch = dict(rope_type="linear", factor=c.rope_factor) if c.rope_factor != 1 else None
    hf = dict(
        hugging_face.config_json(c, hidden_activation="gelu_pytorch_tanh"),
        architectures=["Gemma3ForCausalLM" if c.qk_norm else "Gemma2ForCausalLM"],
        model_type=family,
        attention_bias=False,
        rope_theta=c.rope_theta,
        sliding_window=c.window,
        layer_types=[
            "sliding_attention" if number % c.global_every else "full_attention"
            for number in range(1, c.num_layers + 1)
        ],
        query_pre_attn_scalar=_whole(c.query_scale or c.head_dim()),
        attn_logit_softcapping=c.score_cap,
        final_logit_softcapping=c.logit_cap,
    )
    if family == "gemma3_text":
        hf |= dict(
            rope_scaling=stretch,
            rope_local_base_freq=c.local_rope_theta,
            sliding_window_pattern=c.global_every,
        )
    return hf


def _whole(query_scale: float) -> int:
    if query_scale != int(query_scale):
        raise ValueError(
            f"config.model.query_scale={query_scale}: Hugging Face has it as a whole number"
        )
    return int(query_scale)


def hugging_face_names(c: Config) -> tuple[hugging_face.Tensor, ...]:
    """Every tensor of the model; a tied head has none of its own."""
    norms = {
        "input_layernorm.weight": "attention_norm",
        "post_attention_layernorm.weight": "post_attention_norm",
        "pre_feedforward_layernorm.weight": "mlp_norm",
        "post_feedforward_layernorm.weight": "post_mlp_norm",
    }
    tensors = hugging_face.decoder_names(c, norms=norms)
    return (*tensors, *hugging_face.qk_norm_names(c)) if c.qk_norm else tensors
