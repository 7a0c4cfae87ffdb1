"""Attention over packed documents: chooses a kernel and runs it on each device's rows and heads.

B rows, S sequence, N query heads, K key heads, H head size, V head size of the values, M documents
a row at most.
"""

from types import ModuleType
from typing import Any

import jax

from jaxscale import sharding as shd
from jaxscale import warned
from jaxscale.config import Attention
from jaxscale.kernels import (
    attention_arguments,
    cudnn_attention,
    flash_attention,
    xla_attention,
)
from jaxscale.ops import context
from jaxscale.ops.documents import Documents
from jaxscale.ops.execution import Execution
from jaxscale.ops.kept import Kept

# The preferred one first. Each offers what kernels/__init__.py lists.
KERNELS: dict[Attention, ModuleType] = {
    Attention.FLASH: flash_attention,
    Attention.CUDNN: cudnn_attention,
    Attention.XLA: xla_attention,
}
# As it was seen on two H200: XLA finds no program for the call (std::out_of_range).
CUDNN_ENDS = (
    "with config.deterministic=True, and in a replay (config.integrity.replay_every), XLA ends the "
    "process in cuDNN's backward pass of keys that other devices send (jax 0.11.2)"
    if jax.__version_info__ >= (0, 11, 2)
    else None
)

# Scores of a row and layer, in float32: 8 GiB at 32 heads and 8192 tokens.
MAX_QUADRATIC_SEQ_LEN_ON_GPU = 2048


def choose(
    q_BSNH,
    k_BSKH,
    *,
    execution: Execution,
    cap: float | None = None,
    in_parts: bool = False,
    v_head_size: int | None = None,
) -> ModuleType:
    """The kernel that will run: the one the config names, else the first that supports the shapes.

    v_head_size: of the values, if not that of the keys. in_parts: keys come from other devices
    meanwhile.

    Raises ValueError rather than fall back to quadratic memory on a GPU.
    """

    def reason_against(kernel):
        if CUDNN_ENDS and kernel is cudnn_attention and in_parts and execution.deterministic:
            return CUDNN_ENDS
        return kernel.supported(
            q_BSNH,
            k_BSKH,
            platform=execution.platform,
            compute_capability=execution.compute_capability,
            cap=cap,
            v_head_size=v_head_size,
        )

    if (wanted := execution.attention) != Attention.AUTO:
        if reason := reason_against(KERNELS[wanted]):
            raise ValueError(
                f"config.attention={wanted.value!r} cannot run: {reason}; set "
                f"config.attention='auto'"
            )
        return KERNELS[wanted]
    reasons = {kernel: reason_against(kernel) for kernel in KERNELS.values()}
    chosen = next(kernel for kernel, reason in reasons.items() if reason is None)
    others = "; ".join(reason for reason in reasons.values() if reason)
    if execution.platform != "cpu" and chosen.HAS_QUADRATIC_MEMORY:
        if q_BSNH.shape[1] > MAX_QUADRATIC_SEQ_LEN_ON_GPU:
            raise ValueError(
                f"no memory-saving attention for config.seq_len={q_BSNH.shape[1]}: {others}. Mend "
                f"that, or accept quadratic memory with config.attention='xla'"
            )
        warned.once(f"attention runs as plain XLA operations: {others}")
    return chosen


def attention(
    q_BSNH,
    k_BSKH,
    v_BSKV,
    *,
    documents: Documents | Kept,
    execution: Execution,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
):
    """Causal attention that stays inside each document. Returns [B, S, N, V]; padding gives zeros.

    With `Kept` documents the keys and values are kept too, and looked at in what comes next.

    scale: of the scores; H ** -0.5 unless given. window: a token sees itself and the `window - 1`
    before it. cap: scores become cap * tanh(score / cap).

    Attention has axes of its own, `attn_seq`, `attn_heads` and `attn_kv_heads`: with a rule that
    splits `seq`, and none that splits `attn_seq`, the devices exchange sequence for heads. Heads
    may be split over more devices than key heads are: then each device takes, of those it has, the
    ones that its query heads share.

    Raises ValueError, which names the array or option, for what does not belong together
    (`kernels/attention_arguments.py`).
    """
    attention_arguments.check(q_BSNH, k_BSKH, v_BSKV)
    scale = q_BSNH.shape[-1] ** -0.5 if scale is None else scale
    options: dict[str, Any] = dict(scale=scale, window=window, cap=cap)
    attention_arguments.check_options(**options)
    if isinstance(documents, Kept):
        documents.keep(k_BSKH, v_BSKV)
        if documents.fresh is None:
            return documents.attend(q_BSNH, **options)
        documents = documents.fresh
    seq_axes = shd.mesh_axes("attn_seq")
    attention_arguments.check_segments(
        documents.segments_BS, q_BSNH, is_dealt=bool(seq_axes), is_padding_last=True
    )
    v_head_size = v_BSKV.shape[-1]
    kernel = choose(
        q_BSNH,
        k_BSKH,
        execution=execution,
        cap=cap,
        in_parts=bool(seq_axes),
        v_head_size=v_head_size,
    )
    group = q_BSNH.shape[2] // k_BSKH.shape[2]
    exchanged: dict[str, Any] = dict(
        kernel=kernel,
        exchange=execution.exchange,
        balance=execution.balance,
        axis=seq_axes,
        scale=options["scale"],
        deterministic=execution.deterministic,
    )
    assert not (seq_axes and (window or cap)), "step/layout.py refuses it"
    assert not (seq_axes and v_head_size != k_BSKH.shape[-1]), "keys and values travel as one array"
    kv_axes = shd.mesh_axes("attn_kv_heads")
    # A device has the key heads of all that share its place on kv_axes.
    shared_by = tuple(axis for axis in shd.mesh_axes("attn_heads") if axis not in kv_axes)

    def local(q_BSNH, k_BSKH, v_BSKV, segments_BS, positions_BS, lengths_BM):
        if shared_by:
            heads = q_BSNH.shape[2]
            first = jax.lax.axis_index(shared_by) * heads // group
            k_BSKH, v_BSKV = (
                jax.lax.dynamic_slice_in_dim(x, first, max(1, heads // group), axis=2)
                for x in (k_BSKH, v_BSKV)
            )
        if seq_axes:
            return context.attention(q_BSNH, k_BSKH, v_BSKV, lengths_BM=lengths_BM, **exchanged)
        documents = Documents(segments_BS, positions_BS, lengths_BM)
        return kernel.attention(
            q_BSNH,
            k_BSKH,
            v_BSKV,
            documents=documents,
            deterministic=execution.deterministic,
            **options,
        )

    q_axes, k_axes = "batch attn_seq attn_heads head", "batch attn_seq attn_kv_heads head"
    token_axes = ("batch attn_seq", "batch attn_seq", "batch _")
    mapped = shd.shard_map(
        local,
        in_axes=(q_axes, k_axes, k_axes, *token_axes),
        out_axes=q_axes,
        check_vma=kernel.TRACKS_VMA and not seq_axes,
    )
    with jax.named_scope("attention"):
        out_BSNV = mapped(
            q_BSNH,
            k_BSKH,
            v_BSKV,
            documents.segments_BS,
            documents.positions_BS,
            documents.lengths_BM,
        )
        return shd.constrain(out_BSNV, "batch seq heads head")
