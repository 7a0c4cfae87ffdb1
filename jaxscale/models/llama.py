"""Llama 3, and by its options Qwen 2, Qwen 3 and Mistral: pre-norm decoder blocks with grouped-query attention.

Sources: Llama 3 (arXiv:2407.21783), Qwen 2 and 3 (arXiv:2407.10671, 2505.09388), Mistral (arXiv:2310.06825).
B batch, S sequence, V vocabulary, D model, F mlp, K key heads, G query heads a key head, N = K * G, H head size,
L layers, M documents a row at most.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxscale import sharding as shd
from jaxscale.ops import rope
from jaxscale.ops.attention import attention, document_lengths
from jaxscale.ops.embedding import embed
from jaxscale.ops.execution import Execution, checkpoint, run_layers
from jaxscale.ops.norm import rms_norm
from jaxscale.ops.swiglu import swiglu


# Hashed as part of the module's structure; nobody changes it once a model is built.
@dataclasses.dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Config:
    """Sizes and options; the defaults are those of Llama 3. `head_size=None` is `model_dim / num_heads`."""

    vocab_size: int
    model_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mlp_dim: int
    head_size: int | None = None
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: rope.Scaling | None = None
    # Qwen 2: biases on Q, K and V. Qwen 3: RMS norm of each query and key head.
    qkv_bias: bool = False
    qk_norm: bool = False
    # Mistral: a token sees itself and the `window - 1` before it.
    window: int | None = None
    # The longest sequence the model is meant for; None: no limit.
    max_seq_len: int | None = None
    init_scale: float = 0.02

    def head_dim(self) -> int:
        return self.head_size or self.model_dim // self.num_heads

    def padded_vocab_size(self) -> int:
        return shd.padded(self.vocab_size)

    def validate(self) -> None:
        for key in (
            "vocab_size",
            "model_dim",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "mlp_dim",
        ):
            if getattr(self, key) < 1:
                raise ValueError(f"config.model.{key}={getattr(self, key)}: set it to 1 or more")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"config.model.num_heads={self.num_heads} must be a multiple of config.model.num_kv_heads={self.num_kv_heads}")  # fmt: skip
        if self.head_size is None and self.model_dim % self.num_heads:
            raise ValueError(f"config.model.model_dim={self.model_dim} must be a multiple of config.model.num_heads={self.num_heads}, or set config.model.head_size")  # fmt: skip
        if self.head_dim() % 2:
            raise ValueError(
                f"config.model.head_size={self.head_dim()} must be even: RoPE rotates pairs"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"config.model.window={self.window}: set it to 1 or more, or to None for no window"
            )
        if self.rope_scaling is not None:
            self.rope_scaling.validate()

    def validate_on(self, sizes: dict[str, int]) -> None:
        """Raises ValueError if the mesh's axes do not divide the sizes that they split."""
        tensor, fsdp = sizes["tensor"], sizes["fsdp"]
        for key, axis, size in (
            ("num_heads", "tensor", tensor),
            ("mlp_dim", "tensor", tensor),
            ("model_dim", "fsdp", fsdp),
        ):
            if getattr(self, key) % size:
                raise ValueError(
                    f"config.model.{key}={getattr(self, key)} cannot be split over mesh axis {axis}={size}; set "
                    f"config.mesh.{axis} to a divisor of {getattr(self, key)}"
                )
        if self.num_kv_heads % tensor and tensor % self.num_kv_heads:
            raise ValueError(
                f"config.model.num_kv_heads={self.num_kv_heads} cannot be split over mesh axis tensor={tensor}; set "
                f"config.mesh.tensor to a divisor or a multiple of {self.num_kv_heads}"
            )
        if self.padded_vocab_size() % tensor:
            raise ValueError(
                f"config.mesh.tensor={tensor} must divide the padded vocabulary, {self.padded_vocab_size()}"
            )

    def num_params(self) -> int:
        """Of the model as described, without the vocabulary's padding."""
        tables = self.vocab_size * self.model_dim * (1 if self.tie_embeddings else 2)
        return self.num_layers * self.num_layer_params() + tables + self.model_dim

    def num_layer_params(self) -> int:
        heads, head = self.num_heads + 2 * self.num_kv_heads, self.head_dim()
        matrices = (
            self.model_dim * (heads + self.num_heads) * head + 3 * self.model_dim * self.mlp_dim
        )
        return (
            matrices + 2 * self.model_dim + heads * head * self.qkv_bias + 2 * head * self.qk_norm
        )

    def flops_per_token(self, seq_len: int, *, causal: bool) -> float:
        """Of training: 6 a weight that multiplies, 12 N H a layer and key seen; `causal` counts half of the keys.

        Recomputation, document boundaries and the window are not counted (torchtitan and Megatron count alike).
        """
        weights = self.num_params() - (
            0 if self.tie_embeddings else self.vocab_size * self.model_dim
        )
        keys = seq_len / 2 if causal else seq_len
        return 6.0 * weights + 12.0 * self.num_layers * self.num_heads * self.head_dim() * keys

    def build(self, rngs: nnx.Rngs) -> "Model":
        return Model(self, rngs)


class Model(nnx.Module):
    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.c = c
        vocab = c.padded_vocab_size()
        self.embedding = shd.param(rngs, (vocab, c.model_dim), "vocab embed", scale=c.init_scale)
        keys = jax.random.split(rngs.params(), c.num_layers)
        self.layers = jax.vmap(lambda key: Block(c, nnx.Rngs(key)))(keys)
        self.norm = shd.param(rngs, (c.model_dim,), "norm", fill=1.0)
        if not c.tie_embeddings:
            self.output = shd.param(rngs, (c.model_dim, vocab), "embed vocab", scale=c.init_scale)

    def head(self) -> jax.Array:
        """The output table, float32 [D, V] ("embed vocab"); columns from `vocab_size` on are padding."""
        return self.embedding[...].T if self.c.tie_embeddings else self.output[...]

    def __call__(self, tokens_BS, segments_BS, positions_BS, execution: Execution):
        """The normalised last hidden states, [B, S, D] in `execution.dtype`."""
        dtype = jnp.dtype(execution.dtype)
        layer = checkpoint(_block(self.c, segments_BS, positions_BS, execution), execution)
        with jax.named_scope("embedding"):
            x_BSD = embed(tokens_BS, self.embedding[...], dtype=dtype)
        x_BSD = shd.constrain(x_BSD, "batch residual_seq act_embed")
        x_BSD = run_layers(layer, x_BSD, self.layers, execution)
        x_BSD = rms_norm(x_BSD, self.norm[...], eps=self.c.norm_eps)
        return shd.constrain(x_BSD, "batch seq act_embed")


def _block(c: Config, segments_BS, positions_BS, execution: Execution):
    """The scan's body. What all layers share is computed here, once."""
    cos_sin = rope.angles(positions_BS, c.head_dim(), theta=c.rope_theta, scaling=c.rope_scaling)
    lengths_BM = document_lengths(segments_BS, execution.max_documents)

    def body(x_BSD, block: Block):
        dtype, reduce_dtype = jnp.dtype(execution.dtype), jnp.dtype(execution.reduce_dtype)
        block = shd.gather(block, dtype=dtype, reduce_dtype=reduce_dtype, name="gathered")
        x_BSD = x_BSD + block.attend(x_BSD, cos_sin, segments_BS, lengths_BM, execution)
        x_BSD = checkpoint_name(x_BSD, "residual")
        return x_BSD + block.feed_forward(x_BSD), None

    return body


class Block(nnx.Module):
    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.c = c
        kv_heads, group, head = c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim()
        # Layers deeper in the stack write less into the residual stream (GPT-2, section 2.3).
        out_scale = c.init_scale / (2 * c.num_layers) ** 0.5
        self.attention_norm = shd.param(rngs, (c.model_dim,), "norm", fill=1.0)
        # One weight: G query heads, then the key and the value of each group. A tensor axis splits the groups.
        self.qkv = shd.param(
            rngs,
            (c.model_dim, kv_heads, group + 2, head),
            "embed kv_heads _ head",
            scale=c.init_scale,
        )
        self.out = shd.param(
            rngs, (c.model_dim, c.num_heads, head), "embed heads head", scale=out_scale
        )
        self.mlp_norm = shd.param(rngs, (c.model_dim,), "norm", fill=1.0)
        self.gate = shd.param(rngs, (c.model_dim, c.mlp_dim), "embed mlp", scale=c.init_scale)
        self.up = shd.param(rngs, (c.model_dim, c.mlp_dim), "embed mlp", scale=c.init_scale)
        self.down = shd.param(rngs, (c.model_dim, c.mlp_dim), "embed mlp", scale=out_scale)
        if c.qkv_bias:
            self.qkv_bias = shd.param(
                rngs, (kv_heads, group + 2, head), "kv_heads _ head", fill=0.0
            )
        if c.qk_norm:
            self.q_norm = shd.param(rngs, (head,), "head", fill=1.0)
            self.k_norm = shd.param(rngs, (head,), "head", fill=1.0)

    def attend(self, x_BSD, cos_sin, segments_BS, lengths_BM, execution: Execution):
        x_BSD = rms_norm(x_BSD, self.attention_norm[...], eps=self.c.norm_eps)
        q_BSNH, k_BSKH, v_BSKH = self._project(shd.constrain(x_BSD, "batch seq act_embed"))
        if self.c.qk_norm:
            q_BSNH = rms_norm(q_BSNH, self.q_norm[...], eps=self.c.norm_eps)
            k_BSKH = rms_norm(k_BSKH, self.k_norm[...], eps=self.c.norm_eps)
        q_BSNH, k_BSKH = rope.rotate(q_BSNH, *cos_sin), rope.rotate(k_BSKH, *cos_sin)
        q_BSNH, k_BSKH, v_BSKH = (checkpoint_name(x, "qkv") for x in (q_BSNH, k_BSKH, v_BSKH))
        out_BSNH = attention(
            q_BSNH,
            k_BSKH,
            v_BSKH,
            segments_BS,
            lengths_BM,
            window=self.c.window,
            execution=execution,
        )
        return shd.einsum(
            "BSNH,DNH->BSD",
            out_BSNH,
            self.out[...],
            out="batch residual_seq act_embed",
            dtype=x_BSD.dtype,
        )

    def _project(self, x_BSD):
        """Queries [B, S, N, H], keys and values [B, S, K, H]."""
        group = self.c.num_heads // self.c.num_kv_heads
        q_shape = (*x_BSD.shape[:2], self.c.num_heads, self.c.head_dim())
        weight, bias = self.qkv[...], self.qkv_bias[...] if self.c.qkv_bias else None
        if shd.mesh_axes("kv_heads") == shd.mesh_axes("heads"):
            qkv_BSKMH = shd.einsum(
                "BSD,DKMH->BSKMH", x_BSD, weight, out="batch seq kv_heads _ head", dtype=x_BSD.dtype
            )
            qkv_BSKMH = qkv_BSKMH if bias is None else _plus(qkv_BSKMH, bias)
            q_BSKGH, k_BSK1H, v_BSK1H = jax.lax.split(qkv_BSKMH, (group, 1, 1), axis=3)
            q_BSNH = shd.reshape(q_BSKGH, q_shape, out="batch seq heads head")
        else:
            # More devices than key heads: the queries are split, keys and values computed on every device.
            q_DNH = weight[:, :, :group].reshape(-1, *q_shape[2:])
            q_DNH = shd.constrain(q_DNH, "_ heads head")
            q_BSNH = shd.einsum(
                "BSD,DNH->BSNH", x_BSD, q_DNH, out="batch seq heads head", dtype=x_BSD.dtype
            )
            kv_DKMH = weight[:, :, group:]
            kv_BSKMH = shd.einsum(
                "BSD,DKMH->BSKMH",
                x_BSD,
                kv_DKMH,
                out="batch seq kv_heads _ head",
                dtype=x_BSD.dtype,
            )
            if bias is not None:
                q_BSNH = _plus(
                    q_BSNH, shd.constrain(bias[:, :group].reshape(q_shape[2:]), "heads head")
                )
                kv_BSKMH = _plus(kv_BSKMH, bias[:, group:])
            k_BSK1H, v_BSK1H = jax.lax.split(kv_BSKMH, (1, 1), axis=3)
        return q_BSNH, k_BSK1H[:, :, :, 0], v_BSK1H[:, :, :, 0]

    def feed_forward(self, x_BSD):
        x_BSD = rms_norm(x_BSD, self.mlp_norm[...], eps=self.c.norm_eps)
        x_BSD = shd.constrain(x_BSD, "batch seq act_embed")
        gate_BSF, up_BSF = (
            checkpoint_name(
                shd.einsum(
                    "BSD,DF->BSF", x_BSD, weight[...], out="batch seq mlp", dtype=x_BSD.dtype
                ),
                "gate_up",
            )
            for weight in (self.gate, self.up)
        )
        h_BSF = swiglu(gate_BSF, up_BSF)
        return shd.einsum(
            "BSF,DF->BSD",
            h_BSF,
            self.down[...],
            out="batch residual_seq act_embed",
            dtype=x_BSD.dtype,
        )


def _plus(x, bias):
    """x + bias in x's dtype; the bias's gradient is summed in its own, which may be wider (`reduce_dtype`)."""
    return (x.astype(bias.dtype) + bias).astype(x.dtype)
