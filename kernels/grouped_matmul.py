"""Products of groups of rows, each with a matrix of its own: dropless experts, on Hopper.

Rows stand sorted by group, groups are of any size, and nothing is padded to a capacity. The tables
are made in `grouped_visits.py`, the programs are in `grouped_programs.py` and
`grouped_gradient.py`.

T rows (tokens), E groups (experts), K rows and N columns of a matrix.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.kernels import hopper
from jaxscale.kernels.grouped_gradient import weight_gradient
from jaxscale.kernels.grouped_programs import BLOCK, multiply
from jaxscale.kernels.grouped_visits import ALIGNED

NAME = "the grouped product"


def supported(x_TK, w_EKN, *, platform: str, compute_capability: str = "9.0") -> str | None:
    """None if `grouped_matmul` can run these shapes on this platform ("gpu"), else the reason."""
    if reason := hopper.objection(NAME, platform=platform, compute_capability=compute_capability):
        return reason
    return _objection(x_TK, w_EKN)


def _objection(x_TK, w_EKN) -> str | None:
    """What is wrong with arrays that fit each other, if anything."""
    if x_TK.dtype != jnp.bfloat16:
        return f"{NAME} takes x of bfloat16, not {x_TK.dtype}"
    if w_EKN.dtype not in (jnp.bfloat16, jnp.float32):
        return f"{NAME} takes w of bfloat16 or float32, not {w_EKN.dtype}"
    if not x_TK.shape[0] or x_TK.shape[0] % ALIGNED:
        return f"{NAME} takes x of a multiple of {ALIGNED} rows, not {x_TK.shape[0]}"
    if odd := [size for size in w_EKN.shape[1:] if not size or size % BLOCK]:
        return f"{NAME} takes w of multiples of {BLOCK}, not {odd[0]}"
    return None


def reference(x_TK, w_EKN, *, group_sizes_E):
    """The same by XLA, which on GPUs multiplies all rows with all matrices."""
    check(x_TK, w_EKN, group_sizes_E=group_sizes_E)
    w_EKN = w_EKN.astype(x_TK.dtype)
    sizes_E = group_sizes_E.astype(jnp.int32)
    y_TN = lax.ragged_dot(x_TK, w_EKN, sizes_E, preferred_element_type=jnp.float32)
    return y_TN.astype(x_TK.dtype)


def reference_weight_gradient(x_TK, grad_TN, *, group_sizes_E, out_dtype):
    """As `weight_gradient`, by XLA."""
    rows = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    sizes_E = group_sizes_E.astype(jnp.int32)
    return lax.ragged_dot_general(
        x_TK, grad_TN, sizes_E, rows, preferred_element_type=jnp.float32
    ).astype(out_dtype)


def grouped_matmul(x_TK, w_EKN, *, group_sizes_E):
    """y_TN: the rows of group e times w[e], in x's dtype; rows behind the last group give zeros.

    group_sizes_E: integers, 0 for an empty group; of all together T at most. The sums are
    float32. w may be float32: it is rounded to x's dtype here, and its gradient is float32 then.
    Raises ValueError, which names the array, for shapes that do not fit each other, and for what
    `supported` would refuse.
    """
    check(x_TK, w_EKN, group_sizes_E=group_sizes_E)
    if reason := _objection(x_TK, w_EKN):
        raise ValueError(reason)
    return _grouped_matmul(x_TK, w_EKN, group_sizes_E.astype(jnp.int32))


@jax.custom_vjp
def _grouped_matmul(x_TK, w_EKN, group_sizes_E):
    return _forward(x_TK, w_EKN, group_sizes_E)[0]


def _forward(x_TK, w_EKN, group_sizes_E):
    rounded_EKN = w_EKN.astype(x_TK.dtype)
    y_TN = multiply(x_TK, rounded_EKN, group_sizes_E=group_sizes_E, is_transposed=False)
    # An array without values tells the dtype of the gradient.
    return y_TN, (x_TK, rounded_EKN, group_sizes_E, jnp.zeros((0,), w_EKN.dtype))


def _backward(residuals, grad_TN):
    x_TK, w_EKN, group_sizes_E, like_w = residuals
    grad_TN = grad_TN.astype(x_TK.dtype)
    dx_TK = multiply(grad_TN, w_EKN, group_sizes_E=group_sizes_E, is_transposed=True)
    dw_EKN = weight_gradient(x_TK, grad_TN, group_sizes_E=group_sizes_E, out_dtype=like_w.dtype)
    return dx_TK, dw_EKN, None


_grouped_matmul.defvjp(_forward, _backward)


def check(x_TK, w_EKN, *, group_sizes_E) -> None:
    """Raises ValueError for shapes that do not fit each other."""
    arrays = dict(x=(x_TK, "TK"), w=(w_EKN, "EKN"), group_sizes=(group_sizes_E, "E"))
    for name, (array, dims) in arrays.items():
        if array.ndim != len(dims):
            raise ValueError(f"{name} has the shape {array.shape}; it must be [{', '.join(dims)}]")
    if not jnp.issubdtype(group_sizes_E.dtype, jnp.integer):
        raise ValueError(f"group_sizes must be integers, not {group_sizes_E.dtype}")
    if x_TK.shape[1] != w_EKN.shape[1]:
        raise ValueError(
            f"x has {x_TK.shape[1]} columns and each matrix of w {w_EKN.shape[1]} rows; they must "
            f"be as many"
        )
    if len(group_sizes_E) != len(w_EKN):
        raise ValueError(
            f"group_sizes has {len(group_sizes_E)} groups and w {len(w_EKN)} matrices; they must "
            f"be as many"
        )
