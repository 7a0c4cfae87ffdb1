"""Flash attention for Hopper, backward (Pallas Mosaic GPU; arXiv:2407.08608, arXiv:2205.14135).

Five products in a program for each tile of keys (`flash_backward_keys.py`), which adds its part of
dq to what other programs add. The order of those additions is not fixed. For a run that must repeat
to the bit, dq is made in a program of its own, by tile of queries (`flash_backward_queries.py`):
two products more. So it is for head sizes of which the sums for five products do not fit in
registers: 192 for queries and keys with 128 for values, and 256, of which dk and dv are made in two
programs too (`flash_backward_large.py`; eight products).

B rows, S queries, T keys, N query heads, K key heads, H head size, V head size of the values.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxscale.kernels import flash_backward_dealt, flash_backward_large, flash_dq_sums
from jaxscale.kernels.flash_backward_keys import MAX_HEAD_SIZE_OF_FIVE, WHOLE, WIDE, of_keys
from jaxscale.kernels.flash_backward_queries import of_queries
from jaxscale.kernels.flash_scores import Scores
from jaxscale.kernels.flash_spans import Pairs


def backward(
    q_BSNH,
    k_BTKH,
    v_BTKV,
    *,
    grad_BSNV,
    lse_BNS,
    seen_BNS,
    pairs: Pairs,
    scale: float,
    in_order: bool,
    cap: float | None = None,
):
    """dq, dk and dv, in the input dtypes.

    lse_BNS: the log-sum-exp of the scores, float32, finite where a query sees nothing. seen_BNS:
    the sum over V of output and grad_BSNV, float32. in_order: sums are made in one order.
    """
    operands = q_BSNH, k_BTKH, v_BTKV, grad_BSNV
    scores = Scores(scale, cap)
    options: dict[str, Any] = dict(pairs=pairs, scores=scores)
    begins = scores.begin(lse_BNS), -seen_BNS
    head_size = q_BSNH.shape[-1]
    is_large = head_size > MAX_HEAD_SIZE_OF_FIVE
    # No cap: of 128 queries a step none was timed.
    is_wide = head_size == 64 and cap is None
    make, part = (flash_backward_dealt.of_keys, WIDE) if is_wide else (of_keys, WHOLE)
    if in_order or is_large:
        if is_large:
            dk_dv = flash_backward_large.of_keys(operands, begins, **options)
        else:
            dk_dv = make(operands, begins, dq=None, **options)
        return of_queries(operands, begins, **options), *dk_dv

    # Zeros that wait for the gradient. XLA would make those of all layers as soon as it may: 15 GiB
    # of Llama 3 8B, 65,536 tokens over two GPUs.
    zero, *begins = lax.optimization_barrier((jnp.float32(0), *begins))

    num_columns = part.num_dq_columns(head_size)
    sums = jnp.broadcast_to(zero, flash_dq_sums.shape_of(q_BSNH.shape, num_columns=num_columns))

    def adding(dq_dk_dv):
        dq, dk, dv = dq_dk_dv
        dk[...], dv[...] = make(operands, begins, dq=dq, **options)

    # Not jax.new_ref: here no effect is left for jax.checkpoint and loops to carry.
    begin = sums, jnp.zeros_like(k_BTKH), jnp.zeros_like(v_BTKV)
    sums, dk_BTKH, dv_BTKV = pl.run_state(adding)(begin)
    dq = (sums * scale).astype(q_BSNH.dtype)
    return flash_dq_sums.in_order(dq), dk_BTKH, dv_BTKV
