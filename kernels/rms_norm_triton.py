"""The Triton programs of RMSNorm, with or without the sum that comes before it, each in one pass.

Forward a program has a row. Backward it has each PROGRAMS-th row, and sums the scale's gradient
over them. Statistics and sums are float32.

M rows, D columns; BLOCK, the next power of two.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x_ptr,
    scale_ptr,
    out_ptr,
    inverse_ptr,
    EPS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at, is_there = _places(tl.program_id(0), D, BLOCK)
    x = tl.load(x_ptr + at, mask=is_there, other=0.0).to(tl.float32)
    _store_normed(x, scale_ptr, out_ptr, inverse_ptr, EPS, D, BLOCK)


@triton.jit
def add_rms_norm(
    x_ptr,
    added_ptr,
    scale_ptr,
    sum_ptr,
    out_ptr,
    inverse_ptr,
    EPS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at, is_there = _places(tl.program_id(0), D, BLOCK)
    x = tl.load(x_ptr + at, mask=is_there, other=0.0).to(tl.float32)
    x += tl.load(added_ptr + at, mask=is_there, other=0.0).to(tl.float32)
    # What the norm is of has the dtype of the residual stream.
    x = x.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + at, x, mask=is_there)
    _store_normed(x.to(tl.float32), scale_ptr, out_ptr, inverse_ptr, EPS, D, BLOCK)


@triton.jit
def _places(row, D: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    return row.to(tl.int64) * D + column, column < D


@triton.jit
def _store_normed(
    x, scale_ptr, out_ptr, inverse_ptr, EPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    at, is_there = _places(row, D, BLOCK)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / D + EPS)
    tl.store(inverse_ptr + row, inverse)
    scale = tl.load(scale_ptr + tl.arange(0, BLOCK), mask=is_there, other=0.0).to(tl.float32)
    out = x * inverse * scale
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_there)


@triton.jit
def rms_norm_backward(
    x_ptr,
    scale_ptr,
    inverse_ptr,
    of_x_ptr,
    grad_ptr,
    dx_ptr,
    dscale_ptr,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """dx = of_x + r g s - x r**3 mean(x g s), with r, 1 / rms(x)."""
    program, column = tl.program_id(0), tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    dscale = tl.zeros((BLOCK,), tl.float32)
    for turn in range((M + PROGRAMS - 1) // PROGRAMS):
        row = turn * PROGRAMS + program
        at, is_there = _places(row, D, BLOCK)
        is_there &= row < M
        x = tl.load(x_ptr + at, mask=is_there, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=is_there, other=0.0).to(tl.float32)
        of_x = tl.load(of_x_ptr + at, mask=is_there, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + row, mask=row < M, other=0.0)
        normed, of_normed = x * inverse, grad * scale
        dscale += grad * normed
        mean = tl.sum(of_normed * normed, axis=0) / D
        dx = of_x + (of_normed - normed * mean) * inverse
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=is_there)
    tl.store(dscale_ptr + program * D + column, dscale, mask=column < D)
