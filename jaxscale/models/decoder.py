"""What decoder-only families share: the trunk, the attention block, and the rules of their sizes.

B rows, S sequence, V vocabulary, D model, F mlp, K key heads, G query heads a key head, N = K * G,
M = G + 2, H head size.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxscale import sharding as shd
from jaxscale.config import check_fields, number
from jaxscale.ops import rope
from jaxscale.ops.attention import attention
from jaxscale.ops.documents import Documents
from jaxscale.ops.embedding import embed
from jaxscale.ops.execution import Execution
from jaxscale.ops.gated import swiglu
from jaxscale.ops.halves import RESIDUAL
from jaxscale.ops.kept import Kept
from jaxscale.ops.layers import FINITE, is_finite, run_layers, stack_layers
from jaxscale.ops.linear import linear
from jaxscale.ops.norm import normed_stream, rms_norm

# Vocabularies are padded to a multiple of this, in every layout alike: any usual tensor axis
# divides it.
VOCAB_MULTIPLE = 128

WHOLE = "batch seq act_embed"


# Hashed as part of the module's structure; nobody changes it once a model is built.
@dataclasses.dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Config:
    """Sizes that all families have. `head_size=None` is `model_dim / num_heads`."""

    vocab_size: int = number(least=1)
    model_dim: int = number(least=1)
    num_layers: int = number(least=1)
    num_heads: int = number(least=1)
    num_kv_heads: int = number(least=1)
    mlp_dim: int = number(least=1)
    head_size: int | None = number(least=2, default=None)
    tie_embeddings: bool = False
    norm_eps: float = number(above=0, below=1, default=1e-5)
    # The longest sequence the model is meant for; None: no limit.
    max_seq_len: int | None = number(least=1, default=None)
    init_scale: float = number(above=0, default=0.02)

    def head_dim(self) -> int:
        return self.head_size or self.model_dim // self.num_heads

    def neutral_scale(self) -> float:
        """The stored scale of a norm that changes nothing: 0 where scales are stored less 1."""
        return 1.0

    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def validate(self) -> None:
        """Raises ValueError for sizes that cannot be."""
        check_fields(self, "config.model")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config.model.num_heads={self.num_heads} must be a multiple of "
                f"config.model.num_kv_heads={self.num_kv_heads}"
            )
        if self.head_size is None and self.model_dim % self.num_heads:
            raise ValueError(
                f"config.model.model_dim={self.model_dim} must be a multiple of "
                f"config.model.num_heads={self.num_heads}, or set config.model.head_size"
            )
        if self.head_dim() % 2:
            raise ValueError(
                f"config.model.head_size={self.head_dim()} must be even: RoPE rotates pairs"
            )

    def validate_on(self, sizes: dict[str, int]) -> None:
        """Raises ValueError if the mesh's axes do not divide the sizes that they split."""
        tensor = sizes["tensor"]
        for key, axis in (("num_heads", "tensor"), ("mlp_dim", "tensor"), ("model_dim", "fsdp")):
            if getattr(self, key) % sizes[axis]:
                raise ValueError(
                    f"config.model.{key}={getattr(self, key)} cannot be split over mesh axis "
                    f"{axis}={sizes[axis]}; set config.mesh.{axis} to a divisor of "
                    f"{getattr(self, key)}"
                )
        fsdp, context = sizes["fsdp"], sizes["context"]
        if self.model_dim % (fsdp * context):
            raise ValueError(
                f"config.model.model_dim={self.model_dim} cannot be split over fsdp={fsdp} * "
                f"context={context}; set config.mesh.fsdp or config.mesh.context so that their "
                f"product is a divisor of {self.model_dim}"
            )
        if self.num_kv_heads % tensor and tensor % self.num_kv_heads:
            raise ValueError(
                f"config.model.num_kv_heads={self.num_kv_heads} cannot be split over mesh axis "
                f"tensor={tensor}; set config.mesh.tensor to a divisor or a multiple of "
                f"{self.num_kv_heads}"
            )
        for key, parts in (("tensor", tensor), ("stage", tensor * sizes["stage"])):
            if self.padded_vocab_size() % parts:
                raise ValueError(
                    f"config.mesh.{key}={sizes[key]} cannot split the padded vocabulary, "
                    f"{self.padded_vocab_size()}, in {parts} parts; set it to a power of 2"
                )

    def rules(self, sizes: dict[str, int]) -> dict[str, Any]:
        """Key heads are split over `tensor` if it divides them, else whole on every device.

        While attention has whole rows they are split over `context` too, if both divide them.
        """
        tensor, context = sizes["tensor"], sizes["context"]
        kv_heads = "tensor" if self.num_kv_heads % tensor == 0 else None
        over_both = context > 1 and self.num_kv_heads % (tensor * context) == 0
        return dict(
            kv_heads=kv_heads, attn_kv_heads=("tensor", "context") if over_both else kv_heads
        )

    def num_params(self) -> int:
        """Of the model as described, without the vocabulary's padding."""
        tables = self.vocab_size * self.model_dim * (1 if self.tie_embeddings else 2)
        return self.num_layers * self.num_layer_params() + tables + self.model_dim

    def num_layer_params(self) -> int:
        """Two norms, attention and feed-forward; a family adds what it has besides."""
        heads = 2 * (self.num_heads + self.num_kv_heads)
        matrices = self.model_dim * heads * self.head_dim() + 3 * self.model_dim * self.mlp_dim
        return matrices + 2 * self.model_dim

    def flops_per_token(self, seq_len: int, *, causal: bool) -> float:
        """Of training: 6 a weight that multiplies, 12 N H a layer and key seen.

        `causal` counts half of the keys. Recomputation, document boundaries and windows are not
        counted (torchtitan and Megatron count alike).
        """
        weights = self.num_params()
        weights -= 0 if self.tie_embeddings else self.vocab_size * self.model_dim
        keys = seq_len / 2 if causal else seq_len
        return 6.0 * weights + 12.0 * self.num_layers * self.num_heads * self.head_dim() * keys


class Model(nnx.Module):
    """Embedding, one set of stacked blocks, final norm and output table."""

    def __init__(self, c: Config, rngs: nnx.Rngs, *, block: Callable[[Any, nnx.Rngs], "Block"]):
        self.c = c
        vocab = c.padded_vocab_size()
        shape, scale = (vocab, c.model_dim), c.init_scale
        self.embedding = shd.param(rngs, shape, axes="vocab embed", scale=scale)
        keys = jax.random.split(rngs.params(), c.num_layers)
        self.layers = stack_layers(lambda key: block(c, nnx.Rngs(key)), keys)
        self.norm = shd.param(rngs, (c.model_dim,), axes="norm", fill=c.neutral_scale())
        if not c.tie_embeddings:
            self.head = shd.param(rngs, shape[::-1], axes="embed vocab", scale=scale)

    def embed(self, tokens_BS, execution: Execution):
        """[B, S, D] in `execution.dtype`."""
        x_BSD = embed(
            tokens_BS,
            self.embedding[...],
            dtype=jnp.dtype(execution.dtype),
            in_order=execution.deterministic,
        )
        return shd.constrain(x_BSD, RESIDUAL)

    def output(self, x_BSD):
        """The normalised hidden states, the output table [D, V], and the logits' cap: none."""
        x_BSD = normed(x_BSD, self.norm, c=self.c)
        head_DV = self.embedding[...].T if self.c.tie_embeddings else self.head[...]
        return x_BSD, head_DV, None


class Output(NamedTuple):
    """What a model puts out: last hidden states, the table that makes logits of them, their cap.

    aux_loss: the sum of its layers' own losses. extra: new values of its variables that are carried
    and not trained, by path ("layers.amax"). finite: with execution.watches_finite, int32 [layers +
    2], 1 where the embedding's output, each layer's and x_BSD are finite, else 0.
    """

    x_BSD: Any
    head_DV: Any
    cap: float | None
    aux_loss: Any
    extra: dict[str, Any]
    finite: Any = ()


def forward(model, tokens_BS, *, documents: Documents, execution: Execution) -> Output:
    """`model.output` after all of its stacks."""
    embedded_BSD = x_BSD = model.embed(tokens_BS, execution)
    aux_loss, extra, finite = 0.0, {}, []
    for stack in model.stacks():
        x_BSD, aux = run_layers(stack, x_BSD, documents=documents, execution=execution)
        aux_loss += aux["loss"].sum(dtype=jnp.float32) if "loss" in aux else 0.0
        for name, value in aux.get("extra", {}).items():
            extra[_path_of(getattr(stack.weights, name), model)] = value
        finite += [aux[FINITE]] if FINITE in aux else []
    x_BSD, head_DV, cap = model.output(x_BSD)
    output = Output(x_BSD, head_DV, cap, aux_loss, extra)
    if not execution.watches_finite:
        return output
    ends = is_finite(embedded_BSD)[None], is_finite(x_BSD)[None]
    return output._replace(finite=jnp.concatenate([ends[0], *finite, ends[1]]))


def logits(x_BD, head_DV, *, cap: float | None, vocab_size: int):
    """float32 [B, V] of some hidden states of `Output`, without the vocabulary's padding."""
    head_DV = shd.gather(head_DV, dtype=x_BD.dtype, axes="embed vocab")
    logits_BV = shd.einsum("BD,DV->BV", x_BD, head_DV, out="batch vocab").astype(jnp.float32)
    logits_BV = logits_BV if cap is None else cap * jnp.tanh(logits_BV / cap)
    return shd.constrain(logits_BV, "batch _")[:, :vocab_size]


def _path_of(variable: nnx.Variable, model) -> str:
    paths = (path for path, node in nnx.iter_graph(model) if node is variable)
    return ".".join(map(str, next(paths)))


class Block(nnx.Module):
    """The parameters of a pre-norm layer, and the two halves of what it computes."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.c = c
        dim, kv_heads, group, head = _sizes(c)
        # Layers deeper in the stack write less into the residual stream (GPT-2, section 2.3).
        scale, out_scale = c.init_scale, c.init_scale / (2 * c.num_layers) ** 0.5
        neutral = c.neutral_scale()
        self.attention_norm = shd.param(rngs, (dim,), axes="norm", fill=neutral)
        # One weight: G query heads, then the key and the value of each group, so that a tensor
        # axis splits heads and never the fused part.
        shape: tuple[int, ...] = (dim, kv_heads, group + 2, head)
        self.qkv = shd.param(rngs, shape, axes="embed kv_heads _ head", scale=scale)
        shape = (dim, c.num_heads, head)
        self.out = shd.param(rngs, shape, axes="embed heads head", scale=out_scale)
        self.mlp_norm = shd.param(rngs, (dim,), axes="norm", fill=neutral)
        self.gate = shd.param(rngs, (dim, c.mlp_dim), axes="embed mlp", scale=scale)
        self.up = shd.param(rngs, (dim, c.mlp_dim), axes="embed mlp", scale=scale)
        self.down = shd.param(rngs, (dim, c.mlp_dim), axes="embed mlp", scale=out_scale)

    def add_qkv_bias(self, rngs: nnx.Rngs) -> None:
        """Qwen 2: a bias of each query, key and value."""
        _, kv_heads, group, head = _sizes(self.c)
        shape = (kv_heads, group + 2, head)
        self.qkv_bias = shd.param(rngs, shape, axes="kv_heads _ head", fill=0.0)

    def add_qk_norm(self, rngs: nnx.Rngs) -> None:
        """Qwen 3, Gemma 3: a norm of each query and key head."""
        shape, neutral = (self.c.head_dim(),), self.c.neutral_scale()
        self.q_norm = shd.param(rngs, shape, axes="head", fill=neutral)
        self.k_norm = shd.param(rngs, shape, axes="head", fill=neutral)

    def attend(
        self, normed_BSD, *, cos_sin, documents: Documents | Kept, execution: Execution, **options
    ):
        """What attention adds to the residual stream, of its norm; options: of ops.attention."""
        x_BSD = shd.constrain(normed_BSD, WHOLE)
        q_BSNH, k_BSKH, v_BSKH = self._project(x_BSD, execution)
        if hasattr(self, "q_norm"):
            q_BSNH = normed(q_BSNH, self.q_norm, c=self.c)
            k_BSKH = normed(k_BSKH, self.k_norm, c=self.c)
        q_BSNH, k_BSKH = rope.rotate(q_BSNH, *cos_sin), rope.rotate(k_BSKH, *cos_sin)
        q_BSNH, k_BSKH, v_BSKH = (checkpoint_name(x, "qkv") for x in (q_BSNH, k_BSKH, v_BSKH))
        out_BSNH = attention(
            q_BSNH, k_BSKH, v_BSKH, documents=documents, execution=execution, **options
        )
        return linear(
            "BSNH,DNH->BSD",
            out_BSNH,
            weight=self.out,
            name="out",
            out=RESIDUAL,
            execution=execution,
        )

    def _project(self, x_BSD, execution: Execution):
        """Queries [B, S, N, H], keys and values [B, S, K, H]."""
        c, group = self.c, self.c.num_heads // self.c.num_kv_heads
        bias = self.qkv_bias[...] if hasattr(self, "qkv_bias") else None
        if shd.mesh_axes("kv_heads") == shd.mesh_axes("heads"):
            qkv_BSKMH = linear(
                "BSD,DKMH->BSKMH",
                x_BSD,
                weight=self.qkv,
                name="qkv",
                out="batch seq kv_heads _ head",
                execution=execution,
            )
            qkv_BSKMH = qkv_BSKMH if bias is None else _plus(qkv_BSKMH, bias)
            # Its transpose is one concatenation; that of slices is a sum of padded arrays.
            q_BSKGH, k_BSK1H, v_BSK1H = jax.lax.split(qkv_BSKMH, (group, 1, 1), axis=3)
            q_shape = (*x_BSD.shape[:2], q_BSKGH.shape[2] * group, c.head_dim())
            q_BSNH = shd.reshape(q_BSKGH, q_shape, "batch seq heads head")
        else:
            q_BSNH, k_BSK1H, v_BSK1H = self._project_beyond_key_heads(x_BSD, bias, execution)
        return q_BSNH, k_BSK1H[:, :, :, 0], v_BSK1H[:, :, :, 0]

    def _project_beyond_key_heads(self, x_BSD, bias, execution: Execution):
        """With more devices than key heads: queries are split, keys and values are everywhere."""
        c, group, weight = self.c, self.c.num_heads // self.c.num_kv_heads, self.qkv[...]
        axes = "embed heads head"
        q_DNH = shd.reshape(weight[:, :, :group], (c.model_dim, c.num_heads, c.head_dim()), axes)
        q_BSNH = linear(
            "BSD,DNH->BSNH",
            x_BSD,
            weight=q_DNH,
            name="qkv",
            axes=axes,
            out="batch seq heads head",
            execution=execution,
        )
        kv_BSKMH = linear(
            "BSD,DKMH->BSKMH",
            x_BSD,
            weight=weight[:, :, group:],
            name="qkv",
            axes="embed kv_heads _ head",
            out="batch seq kv_heads _ head",
            execution=execution,
        )
        if bias is not None:
            q_bias = shd.reshape(bias[:, :group], q_DNH.shape[1:], "heads head")
            q_BSNH, kv_BSKMH = _plus(q_BSNH, q_bias), _plus(kv_BSKMH, bias[:, group:])
        return q_BSNH, *jax.lax.split(kv_BSKMH, (1, 1), axis=3)

    def normed(self, x_BSD, norm, *, execution: Execution, added_BSD=None):
        """(x, its norm) of the residual stream, or of what it becomes with `added_BSD`."""
        scale = _scale(norm, c=self.c)
        options: dict[str, Any] = dict(eps=self.c.norm_eps, axes=RESIDUAL, execution=execution)
        return normed_stream(x_BSD, scale, added_BSD=added_BSD, **options)

    def feed_forward(self, normed_BSD, *, execution: Execution, activation=swiglu):
        """What the feed-forward half adds to the residual stream, of its norm."""
        x_BSD = shd.constrain(normed_BSD, WHOLE)
        gate_BSF, up_BSF = (
            checkpoint_name(
                linear(
                    "BSD,DF->BSF",
                    x_BSD,
                    weight=weight,
                    name=name,
                    out="batch seq mlp",
                    execution=execution,
                ),
                "gate_up",
            )
            for name, weight in (("gate", self.gate), ("up", self.up))
        )
        h_BSF = activation(gate_BSF, up_BSF, is_lean=execution.is_lean)
        return linear(
            "BSF,DF->BSD",
            h_BSF,
            weight=self.down,
            name="down",
            out=RESIDUAL,
            execution=execution,
        )


def normed(x, scale, *, c: Config):
    """x / rms(x) times the scale, a Param, as the family stores it."""
    return rms_norm(x, _scale(scale, c=c), eps=c.norm_eps)


def _scale(scale, *, c: Config):
    return scale[...] + (1.0 - c.neutral_scale())


def _sizes(c: Config) -> tuple[int, int, int, int]:
    return c.model_dim, c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim()


def _plus(x, bias):
    """x + bias in x's dtype; the bias's gradient is summed in its own, which may be wider."""
    return (x.astype(bias.dtype) + bias).astype(x.dtype)
