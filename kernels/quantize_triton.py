"""The Triton programs that round matrices to 8 bits, as they are and turned over, in one read.

A program has 128 rows and 128 columns, in four tensors: rows 0, 4, 8, ..., rows 1, 5, 9, ... and so
on. Four rows of a column are then in one thread, which makes one word of their four bytes, and the
matrix is turned over in shared memory by words. By bytes it would take four times the accesses.

M rows, K columns, E matrices; C columns of a tile, Q = 32 rows of one of the four tensors.
"""

import triton
import triton.language as tl

_TILE: tl.constexpr = tl.constexpr(128)
_QUARTER: tl.constexpr = tl.constexpr(32)
# In the bits of a float32. Both formats end at 1.75 of a power of two (448 is 1.75 * 2**8, 57344 is
# 1.75 * 2**15): a largest value whose mantissa is above 0x600000 needs the next power.
_ABOVE_MOST: tl.constexpr = tl.constexpr(0x7FFFFF - 0x600000)
_EXPONENT: tl.constexpr = tl.constexpr(0x7F800000)
_NAN: tl.constexpr = tl.constexpr(0x7FC00000)


@triton.jit
def _num_tiles(M: tl.constexpr, K: tl.constexpr):
    return (M + _TILE - 1) // _TILE * ((K + _TILE - 1) // _TILE)


@triton.jit
def _place(program, M: tl.constexpr, K: tl.constexpr, TOGETHER: tl.constexpr):
    """The first row and column of a program: down TOGETHER tiles, then the next column of tiles.

    What neighbours write turned over then lies side by side.
    """
    ROWS: tl.constexpr = (M + _TILE - 1) // _TILE
    COLUMNS: tl.constexpr = (K + _TILE - 1) // _TILE
    group = program // (TOGETHER * COLUMNS)
    rows = tl.minimum(ROWS - group * TOGETHER, TOGETHER)
    inside = program % (TOGETHER * COLUMNS)
    return (group * TOGETHER + inside % rows) * _TILE, inside // rows * _TILE


@triton.jit
def _quarter(x_ptr, row, column, i: tl.constexpr, M: tl.constexpr, K: tl.constexpr):
    """Rows i, i + 4, ... of the tile: float32 [Q, C]."""
    rows = row + i + 4 * tl.arange(0, _QUARTER)
    columns = column + tl.arange(0, _TILE)
    at = x_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    if M // _TILE * _TILE == M and K // _TILE * _TILE == K:
        x = tl.load(at, eviction_policy="evict_first")
    else:
        is_inside = (rows < M)[:, None] & (columns < K)[None, :]
        x = tl.load(at, mask=is_inside, other=0.0, eviction_policy="evict_first")
    return x.to(tl.float32)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _scale(amax, MOST_EXPONENT: tl.constexpr):
    """(the scale, 1 / scale) of what has this largest magnitude, as `quantize.scale_of` has it.

    By its bits, 11 instructions: there is one of 16 for each 64 values of a thread.
    """
    bits = amax.to(tl.int32, bitcast=True)
    scale = ((bits + _ABOVE_MOST) & _EXPONENT) - ((MOST_EXPONENT - 1) << 23)
    scale = tl.minimum(tl.maximum(scale, (127 - 120) << 23), (127 + 120) << 23)
    inverse = (254 << 23) - scale
    scale = tl.where(bits == 0, (127 - MOST_EXPONENT) << 23, scale)
    is_bad = bits >= _EXPONENT
    scale, inverse = tl.where(is_bad, _NAN, scale), tl.where(is_bad, _NAN, inverse)
    return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def _store(x, values_ptr, row, column, i: tl.constexpr, M: tl.constexpr, K: tl.constexpr):
    """Rows i, i + 4, ... of the tile, rounded."""
    rows = row + i + 4 * tl.arange(0, _QUARTER)
    columns = column + tl.arange(0, _TILE)
    at = values_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    values = x.to(values_ptr.dtype.element_ty)
    if M // _TILE * _TILE == M and K // _TILE * _TILE == K:
        tl.store(at, values)
    else:
        tl.store(at, values, mask=(rows < M)[:, None] & (columns < K)[None, :])


@triton.jit
def _word(x0, x1, x2, x3, IS_E4M3: tl.constexpr):
    """Four rounded values as the bytes of a word, the first lowest.

    In three instructions; written with shifts it is twelve, and the integer units become the limit.
    """
    if IS_E4M3:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [x0, x1, x2, x3],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
        cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f",
        [x0, x1, x2, x3],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _store_turned(
    x0, x1, x2, x3, inverse, values_ptr, row, column, M: tl.constexpr, K: tl.constexpr
):
    """The tile times `inverse`, rounded and turned over, four rows of it in a word."""
    IS_E4M3: tl.constexpr = values_ptr.dtype.element_ty == tl.float8e4nv
    words = _word(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse, IS_E4M3)
    columns = column + tl.arange(0, _TILE)
    places = row // 4 + tl.arange(0, _QUARTER)
    words_ptr = values_ptr.to(tl.pointer_type(tl.uint32))
    at = words_ptr + columns.to(tl.int64)[:, None] * (M // 4) + places[None, :]
    if M // _TILE * _TILE == M and K // _TILE * _TILE == K:
        tl.store(at, tl.trans(words))
    else:
        is_inside = (columns < K)[:, None] & (places < M // 4)[None, :]
        tl.store(at, tl.trans(words), mask=is_inside)


@triton.jit
def _store_scaled(
    x, values_ptr, scale_ptr, row, column, i: tl.constexpr, M, K, MOST_EXPONENT: tl.constexpr
):
    """Rows i, i + 4, ... of the tile, each with a scale of its own."""
    scale, inverse = _scale(tl.reduce(tl.abs(x), 1, _larger), MOST_EXPONENT)
    _store(x * inverse[:, None], values_ptr, row, column, i, M, K)
    rows = row + i + 4 * tl.arange(0, _QUARTER)
    tl.store(scale_ptr + column // _TILE * M + rows, scale)


@triton.jit
def quantize_blocks(
    x_ptr,  # [M, K]
    first_ptr,  # 8 bits: [M, K], or without IS_STRAIGHT [K, M]
    first_scale_ptr,  # float32: [K / 128, M], or [M / 128, K]
    second_ptr,  # 8 bits [K, M]; None but with IS_STRAIGHT and IS_TURNED
    second_scale_ptr,  # float32 [M / 128, K]
    M: tl.constexpr,
    K: tl.constexpr,
    MOST_EXPONENT: tl.constexpr,
    TOGETHER: tl.constexpr,
    IS_STRAIGHT: tl.constexpr,
    IS_TURNED: tl.constexpr,
):
    """x with a scale for each 128 of a row, and turned over with one for each 128 of a column."""
    row, column = _place(tl.program_id(0), M, K, TOGETHER)
    x0, x1 = _quarter(x_ptr, row, column, 0, M, K), _quarter(x_ptr, row, column, 1, M, K)
    x2, x3 = _quarter(x_ptr, row, column, 2, M, K), _quarter(x_ptr, row, column, 3, M, K)
    if IS_STRAIGHT:
        _store_scaled(x0, first_ptr, first_scale_ptr, row, column, 0, M, K, MOST_EXPONENT)
        _store_scaled(x1, first_ptr, first_scale_ptr, row, column, 1, M, K, MOST_EXPONENT)
        _store_scaled(x2, first_ptr, first_scale_ptr, row, column, 2, M, K, MOST_EXPONENT)
        _store_scaled(x3, first_ptr, first_scale_ptr, row, column, 3, M, K, MOST_EXPONENT)
    if IS_TURNED:
        turned_ptr = second_ptr if IS_STRAIGHT else first_ptr
        turned_scale_ptr = second_scale_ptr if IS_STRAIGHT else first_scale_ptr
        most = _larger(_larger(tl.abs(x0), tl.abs(x1)), _larger(tl.abs(x2), tl.abs(x3)))
        scale, inverse = _scale(tl.reduce(most, 0, _larger), MOST_EXPONENT)
        _store_turned(x0, x1, x2, x3, inverse[None, :], turned_ptr, row, column, M, K)
        tl.store(turned_scale_ptr + row // _TILE * K + column + tl.arange(0, _TILE), scale)


@triton.jit
def quantize_cast(
    x_ptr,  # [E, M, K]
    inverse_ptr,  # float32 [E]: 1 / scale
    turned_ptr,  # 8 bits [E, K, M]
    straight_ptr,  # 8 bits [E, M, K]; None without IS_STRAIGHT
    M: tl.constexpr,
    K: tl.constexpr,
    TOGETHER: tl.constexpr,
    IS_STRAIGHT: tl.constexpr,
):
    """Each matrix divided by one scale, turned over and as it is."""
    matrix = tl.program_id(0) // _num_tiles(M, K)
    row, column = _place(tl.program_id(0) % _num_tiles(M, K), M, K, TOGETHER)
    inverse, offset = tl.load(inverse_ptr + matrix), matrix.to(tl.int64) * M * K
    x_ptr, turned_ptr = x_ptr + offset, turned_ptr + offset
    x0, x1 = _quarter(x_ptr, row, column, 0, M, K), _quarter(x_ptr, row, column, 1, M, K)
    x2, x3 = _quarter(x_ptr, row, column, 2, M, K), _quarter(x_ptr, row, column, 3, M, K)
    if IS_STRAIGHT:
        straight_ptr = straight_ptr + offset
        _store(x0 * inverse, straight_ptr, row, column, 0, M, K)
        _store(x1 * inverse, straight_ptr, row, column, 1, M, K)
        _store(x2 * inverse, straight_ptr, row, column, 2, M, K)
        _store(x3 * inverse, straight_ptr, row, column, 3, M, K)
    _store_turned(x0, x1, x2, x3, inverse, turned_ptr, row, column, M, K)


@triton.jit
def quantize_rows(
    x_ptr,  # [M, K]
    values_ptr,  # 8 bits [M, K]
    scale_ptr,  # float32 [M]
    M: tl.constexpr,
    K: tl.constexpr,
    MOST_EXPONENT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """x with a scale for each row. ROWS: of a program; WIDTH: the power of 2 from K on."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    is_inside = (rows < M)[:, None] & (columns < K)[None, :]
    at = rows.to(tl.int64)[:, None] * K + columns[None, :]
    x = tl.load(x_ptr + at, mask=is_inside, other=0.0, eviction_policy="evict_first")
    x = x.to(tl.float32)
    scale, inverse = _scale(tl.reduce(tl.abs(x), 1, _larger), MOST_EXPONENT)
    values = (x * inverse[:, None]).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + at, values, mask=is_inside)
    tl.store(scale_ptr + rows, scale, mask=rows < M)
