"""One layer for one token, on one NVIDIA GPU, in one launch that reads each weight once.

The program is in `decode_triton.py`. Arrays are in the run's dtype but for norms, biases and
angles, which are float32; products add in float32. Matrices have their inputs last, so that what a
program reads lies together. All programs run side by side and wait for each other: nothing else may
hold the GPU for good meanwhile, and JAX's one stream of a device is what sees to that.

D model, F mlp, K key heads, G query heads a key head, N = K * G, M = G + 2, H head size, T tokens
that can be kept.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.kernels import triton_calls

# Kept tokens are read in parts side by side: of so many, in at most as many parts.
PART, MOST_PARTS = 128, 16
WARPS = 16
# Of a tile: 32 threads read 256 elements of a row at once.
MOST_COLUMNS = 2048
# Elements of a tile while the next one is read, 32 registers a thread; where it is the only one,
# twice as many.
TILE = 32_768


class Weights(NamedTuple):
    """Of a layer."""

    attention_norm_D: Any
    qkv_KMHD: Any
    out_DNH: Any
    mlp_norm_D: Any
    gate_FD: Any
    up_FD: Any
    down_DF: Any
    qkv_bias_KMH: Any = None
    q_norm_H: Any = None
    k_norm_H: Any = None


def supported(
    *,
    platform: str,
    compute_capability: str,
    num_cores: int,
    head_size: int,
    num_kv_heads: int,
) -> str | None:
    """None if the program runs here, else the reason. num_cores: multiprocessors of the GPU."""
    reason = triton_calls.objection_to_device(
        platform=platform, compute_capability=compute_capability, least=9.0
    )
    if reason:
        return reason
    if head_size not in (32, 64, 128, 256):
        return f"it has head sizes 32, 64, 128 and 256, not {head_size}"
    if num_kv_heads > _num_programs(num_cores):
        return f"it takes at most {_num_programs(num_cores)} key heads, not {num_kv_heads}"
    return triton_calls.missing()


def layer(
    x_D,
    weights: Weights,
    *,
    keys_KTH,
    values_KTH,
    place,
    cos_sin,
    counter,
    num_cores: int,
    eps: float,
    window: int | None = None,
):
    """(the layer of x [D], keys and values with the token's own at its place, counter).

    place: int32 [1]. cos_sin: of it, each [H / 2]. counter: int32 [1], zero before the first layer.
    """
    import jax_triton

    from jaxscale.kernels import decode_triton

    dim, mlp_dim = weights.down_DF.shape
    num_kv_heads, num_tokens, head_size = keys_KTH.shape
    group = weights.qkv_KMHD.shape[1] - 2
    num_heads, programs = num_kv_heads * group, _num_programs(num_cores)
    parts = min(MOST_PARTS, programs // num_kv_heads, _power(-(-num_tokens // PART)))
    bias, head_norms = weights.qkv_bias_KMH, (weights.q_norm_H, weights.k_norm_H)
    kept = jax.ShapeDtypeStruct(keys_KTH.shape, keys_KTH.dtype)
    statistics = jax.ShapeDtypeStruct((parts, num_heads), jnp.float32)
    results = jax_triton.triton_call(
        x_D,
        weights.attention_norm_D,
        weights.qkv_KMHD,
        weights.attention_norm_D if bias is None else bias,
        *(cos_sin if head_norms[0] is None else head_norms),
        weights.out_DNH,
        weights.mlp_norm_D,
        weights.gate_FD,
        weights.up_FD,
        weights.down_DF,
        *cos_sin,
        keys_KTH,
        values_KTH,
        counter,
        place,
        eps,
        kernel=decode_triton.layer,
        out_shape=(
            jax.ShapeDtypeStruct(x_D.shape, x_D.dtype),
            kept,
            kept,
            jax.ShapeDtypeStruct(counter.shape, counter.dtype),
            jax.ShapeDtypeStruct(weights.qkv_KMHD.shape[:-1], x_D.dtype),
            jax.ShapeDtypeStruct((parts, num_heads, head_size), jnp.float32),
            statistics,
            statistics,
            jax.ShapeDtypeStruct(x_D.shape, x_D.dtype),
            jax.ShapeDtypeStruct((mlp_dim,), x_D.dtype),
        ),
        input_output_aliases={13: 1, 14: 2, 15: 3},
        grid=(programs,),
        name="decode_layer",
        num_warps=WARPS,
        D=dim,
        F=mlp_dim,
        K=num_kv_heads,
        G=group,
        H=head_size,
        T=num_tokens,
        S=parts,
        P=programs,
        WINDOW=window or 0,
        HAS_BIAS=bias is not None,
        HAS_HEAD_NORMS=head_norms[0] is not None,
        SCALE=head_size**-0.5,
        ALL_D=_power(dim),
        ALL_G=max(16, _power(group)),
        **_tiles(
            programs,
            qkv=(num_kv_heads * (group + 2) * head_size, dim),
            out=(dim, num_heads * head_size),
            down=(dim, mlp_dim),
        ),
        GATED_R=64,
        GATED_C=256,
    )
    return results[:4]


def _tiles(programs: int, **shapes: tuple[int, int]) -> dict[str, int]:
    """Rows and columns of the tiles in which a program reads its rows of each matrix."""
    tiles = {}
    for name, (rows, size) in shapes.items():
        mine = _power(-(-rows // (8 * programs)) * 8)
        columns = min(MOST_COLUMNS, _power(size))
        most = 2 * TILE if mine * size <= 2 * TILE and size <= columns else TILE
        tiles |= {f"{name.upper()}_R": min(mine, most // columns), f"{name.upper()}_C": columns}
    return tiles


def _num_programs(num_cores: int) -> int:
    """A power of 2 (0 of 0): the programs count themselves in a counter that wraps around."""
    return (1 << num_cores.bit_length()) >> 1


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()
