"""How a forward pass is run: dtype, what is saved for the backward pass, the layer scan, the attention kernel.

The names of saved tensors are put on by the blocks (`checkpoint_name`) and by the attention kernels' forward rules. A
kernel whose output *and* statistics are both saved is not run again in the backward pass; saving the output alone
would repeat it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.config import Attention, Config, Dtype, Remat

ATTENTION = ("attention_out", "attention_lse")

# Memory: GiB a layer of Llama-3-8B and 8192 tokens in bfloat16, besides the block's input (0.06).
SAVED: dict[Remat, tuple[str, ...]] = {
    Remat.FULL: (),  # 0: everything is computed twice
    Remat.ATTENTION: ATTENTION,  # 0.06
    Remat.ATTENTION_MLP: (*ATTENTION, "gate_up"),  # 0.50
    Remat.GEMMS: (*ATTENTION, "qkv", "residual", "gate_up"),  # 0.66: no matrix product is repeated
}
# Before train/fit.py has chosen, and in evaluations, which save nothing.
SAVED[Remat.AUTO] = SAVED[Remat.GEMMS]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """None of it changes what is computed, but for rounding."""

    dtype: Dtype = Dtype.BFLOAT16
    # Of the sum of a block's weight gradients over devices, if wider than `dtype`.
    reduce_dtype: Dtype = Dtype.BFLOAT16
    remat: Remat = Remat.NONE
    # Weights gathered for the forward pass are kept for the backward pass.
    keep_gathered: bool = False
    scan_unroll: int = 1
    # There is no loop over the layers: one iteration runs them all.
    is_unrolled: bool = False
    attention: Attention = Attention.AUTO
    # The most documents that a row may hold.
    max_documents: int = 32
    # Of the devices it will run on, which need not be here (a step can be compiled for a card that is elsewhere).
    platform: str = dataclasses.field(default_factory=jax.default_backend)
    compute_capability: str = "9.0"


def execution_of(config: Config, device: Any) -> Execution:
    """The run's choices, on devices like this one."""
    return Execution(
        dtype=config.dtype, reduce_dtype=config.mesh.reduce_dtype, remat=config.remat,
        keep_gathered=not config.mesh.reshard_after_forward, scan_unroll=config.scan_unroll,
        is_unrolled=config.scan_unroll == config.model.num_layers,
        attention=config.attention, max_documents=config.data.max_documents_per_row, platform=device.platform,
        compute_capability=getattr(device, "compute_capability", "9.0"),
    )  # fmt: skip


def checkpoint(function, execution: Execution):
    """`function` under `jax.checkpoint` with the run's policy; unchanged for NONE, which saves everything."""
    if execution.remat == Remat.NONE:
        return function
    names = (*SAVED[execution.remat], *(("gathered",) if execution.keep_gathered else ()))
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    # prevent_cse: inside a scan XLA cannot undo the recomputation, and its barriers cost fusions. Without a loop it does undo
    # it: 8 layers of 8B and 16,384 tokens took 27.3 GiB with `attention` and 26.8 with `gemms`; with barriers `attention`
    # took 15.1 (compiled for 8 H100). `gemms` is for speed and keeps what XLA makes of it.
    return jax.checkpoint(function, policy=policy, prevent_cse=_unrolls_for_memory(execution))


def _unrolls_for_memory(execution: Execution) -> bool:
    return execution.is_unrolled and execution.remat in (
        Remat.FULL,
        Remat.ATTENTION,
        Remat.ATTENTION_MLP,
    )


# Layers that the backward pass may be ahead of its weight gradients. With 1, half of the reduce-scatters have nothing to
# hide behind; with 2, each has 16 ms (Llama 3 8B, compiled for 8 H100).
LAYERS_AHEAD = 2


def run_layers(layer, x, layers, execution: Execution):
    """x after `layer(x, weights) -> (x, None)` of every layer; layers: a tree of weights, stacked along the first axis.

    Where the layers are unrolled, XLA puts most weight gradients off to the end of the backward pass, and what was
    recomputed for them lives until then. With a policy that is there for its memory, the pass therefore waits for the
    weight gradients of the layer LAYERS_AHEAD before: 32 layers of 8B take 28.9 GiB instead of 61.4 with `attention`, 55.6
    instead of 62.2 with `attention_mlp` (compiled for 8 H100, 2 rows of 8192 tokens each; a scan takes 27.7 and 56.0).
    """
    if not _unrolls_for_memory(execution):
        return jax.lax.scan(layer, x, layers, unroll=execution.scan_unroll)[0]
    leaves, treedef = jax.tree.flatten(layers)
    weights = [list(of_layer) for of_layer in zip(*map(_unstack, leaves), strict=True)]
    # Vectors' gradients are sums over all devices, better done together: 2 all-reduces instead of 12.
    matrices = [i for i, leaf in enumerate(leaves) if leaf.ndim > 2]
    for number, mine in enumerate(weights):
        if number + LAYERS_AHEAD < len(weights):
            later = weights[number + LAYERS_AHEAD]
            x, tied = _tie(x, [later[i] for i in matrices])
            for i, matrix in zip(matrices, tied, strict=True):
                later[i] = matrix
        x, _ = layer(x, jax.tree.unflatten(treedef, mine))
    return x


@jax.custom_vjp
def _tie(x, weights):
    """As they are; x's gradient goes on once there are those of the weights."""
    return x, weights


_tie.defvjp(
    lambda x, weights: ((x, weights), None),
    lambda _, gradients: jax.lax.optimization_barrier(gradients),
)


@jax.custom_vjp
def _unstack(leaf):
    """The parts along the first axis; their gradients are stacked in one operation, where slices' would be a sum of padded ones."""
    return tuple(leaf[i] for i in range(leaf.shape[0]))


_unstack.defvjp(lambda leaf: (_unstack(leaf), None), lambda _, gradients: (jnp.stack(gradients),))
