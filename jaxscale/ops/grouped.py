"""Products of rows with the matrix of their group: what dropless experts are made of.

T rows (tokens), R runs of them, E groups (experts), K rows and N columns of a matrix.
"""

import functools
import logging

import jax

from jaxscale import sharding as shd
from jaxscale.kernels import grouped_matmul
from jaxscale.ops.execution import Execution

log = logging.getLogger(__name__)


def grouped_product(
    x_TK,
    w_EKN,
    *,
    group_sizes_RE,
    execution: Execution,
    tokens: str = "batch",
    inputs: str = "_",
    outputs: str = "_",
):
    """y_TN: each row of x times w[e] of its group e, in x's dtype; rows of no group give zeros.

    Each device has a run of rows of its own, sorted by group: R is the number of devices that split
    the rows (1 outside of `sharding.use`), and group_sizes_RE says how long each group of each run
    is; integers, of a run no more than its rows. No capacity, no padding; sums are float32. The
    gradient of w has w's dtype, float32 or x's.

    tokens, inputs, outputs: the logical axes of T, K and N. Of the mesh axes that split inputs y is
    the sum. E is whole on each device. Raises ValueError for shapes that do not fit each other.
    """
    summed_over = shd.mesh_axes(inputs)

    def local(x_TK, w_EKN, group_sizes_RE):
        if len(group_sizes_RE) != 1:
            raise ValueError(
                f"group_sizes has {len(group_sizes_RE)} runs on each device that splits "
                f"{tokens!r}; it must have one"
            )
        y_TN = _on_device(x_TK, w_EKN, group_sizes_RE[0], execution=execution)
        return jax.lax.psum(y_TN, summed_over) if summed_over else y_TN

    mapped = shd.shard_map(
        local,
        in_axes=(f"{tokens} {inputs}", f"_ {inputs} {outputs}", f"{tokens} _"),
        out_axes=f"{tokens} {outputs}",
    )
    return mapped(x_TK, w_EKN, group_sizes_RE)


def _on_device(x_TK, w_EKN, group_sizes_E, *, execution: Execution):
    reason = grouped_matmul.supported(
        x_TK,
        w_EKN,
        platform=execution.platform,
        compute_capability=execution.compute_capability,
    )
    if reason is None:
        x_TK, w_EKN, group_sizes_E = _varying_alike(x_TK, w_EKN, group_sizes_E)
        return grouped_matmul.grouped_matmul(x_TK, w_EKN, group_sizes_E=group_sizes_E)
    if execution.platform != "cpu":
        _say_once(f"all rows are multiplied with all {len(w_EKN)} matrices: {reason}")
    return grouped_matmul.reference(x_TK, w_EKN, group_sizes_E=group_sizes_E)


def _varying_alike(*arrays):
    """Over the mesh axes that any of them varies over, so that gradients are summed over them."""
    varying = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(array, tuple(union - mine), to="varying") if union - mine else array
        for array, mine in zip(arrays, varying, strict=True)
    ]


@functools.cache
def _say_once(message: str) -> None:
    log.warning("%s", message)
