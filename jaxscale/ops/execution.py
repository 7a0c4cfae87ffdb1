"""How a forward pass is run: dtype, what is saved for the backward pass, the layer scan, the attention kernel.

The names of saved tensors are put on by the blocks (`checkpoint_name`) and by the attention kernels' forward rules. A
kernel whose output *and* statistics are both saved is not run again in the backward pass; saving the output alone
would repeat it.
"""

import dataclasses
from typing import Any

import jax

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
    # takes 15.1 (compiled for 8 H100). `gemms` is for speed and keeps what XLA makes of it.
    is_undone = execution.is_unrolled and execution.remat not in (Remat.GEMMS, Remat.AUTO)
    return jax.checkpoint(function, policy=policy, prevent_cse=is_undone)
