"""The Triton program of an update of AdamW with moments of 8 bits: each byte is read once.

A program has a tile in which every block is whole, so the largest values are at hand when they are
wanted. The parameter moves before that; then the old codes and the new m and v are all that is
kept. Sums and products are not contracted (`adamw8bit.update`): XLA rounds them one by one.

B values of a block, C columns of a tile; E model dimension, of a device's part; INNER values behind
one of it. AXIS 0: tiles [B, C], blocks down the columns. AXIS 1, where INNER is 1: tiles [C, B].
"""

import triton
import triton.language as tl

# As in `adamw8bit.py`, where they are told of.
_MOST_M: tl.constexpr = tl.constexpr(127.0)
_MOST_V: tl.constexpr = tl.constexpr(255.0)
_LEAST_V: tl.constexpr = tl.constexpr(2.0)
_OF_CODES: tl.constexpr = tl.constexpr(0x9E3779B1)
_OF_PLACE: tl.constexpr = tl.constexpr(0x85EBCA77)
_TINY: tl.constexpr = tl.constexpr(2.0**-126)
# Added to a whole number it stands in the lowest bits of the sum's mantissa.
_WHOLE: tl.constexpr = tl.constexpr(1.5 * 2**23)


@triton.jit
def _noise(mu, nu, place):
    """uint32. place: times its factor, with the update's number in it."""
    codes = mu * 256 + nu
    x = codes.to(tl.uint32, bitcast=True) * _OF_CODES + place
    x = (x ^ x >> 16) * 0x7FEB352D
    x = (x ^ x >> 15) * 0x846CA68B
    return x ^ x >> 16


@triton.jit
def _share(bits):
    """(n + 0.5) / 2**16, exactly, of n = bits >> 7."""
    return (bits | 0x3F800000).to(tl.float32, bitcast=True) - (1 - 2.0**-17)


@triton.jit
def _root(x):
    """XLA's bits but of x under 2**-126, which counts as 0; three instructions less."""
    return tl.inline_asm_elementwise(
        "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _quotient(x, y):
    """XLA's bits for y from 2**-126 to 2**126; five instructions less."""
    return tl.inline_asm_elementwise(
        "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _odd(low):
    return low + low + 1


@triton.jit
def _code_m(m, inverse, noise, STILL: tl.constexpr):
    square = tl.abs(m) * inverse
    code = _root(square)
    low = tl.floor(code)
    share = _share((noise & 0xFFFF) << 7)
    if STILL <= _MOST_M:
        share = tl.where(code < STILL, share, 0.5)
    is_up = share * _odd(low) < tl.fma(-low, low, square)
    code = tl.minimum(tl.where(is_up, low + 1, low), _MOST_M)
    sign = m.to(tl.uint32, bitcast=True) & 0x80000000
    code = (code.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return (code + _WHOLE).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _code_v(v, inverse, noise, STILL: tl.constexpr):
    fourth = v * inverse * inverse
    code = _root(_root(fourth))
    low = tl.floor(code)
    square, odd = low * low, _odd(low)
    share = _share((noise >> 16) << 7)
    if STILL <= _MOST_V:
        share = tl.where(code < STILL, share, 0.5)
    is_up = share * (odd * tl.fma(square, 2.0, odd)) < fourth - square * square
    code = tl.minimum(tl.where(is_up, low + 1, low), _MOST_V)
    code = tl.where(v >= _TINY, tl.maximum(code, _LEAST_V), 0.0)
    return (code + _WHOLE).to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def update(
    p_ptr,  # float32 [OUTER, E, INNER]
    g_ptr,
    mu_ptr,  # int8
    mu_scale_ptr,  # float32 [OUTER, E / B, INNER]
    nu_ptr,  # uint8
    nu_scale_ptr,
    numbers_ptr,  # float32: as `adamw8bit.Numbers`
    words_ptr,  # uint32: is_good; the update's number and the first value's place
    new_p_ptr,  # all these are those above
    new_mu_ptr,
    new_mu_scale_ptr,
    new_nu_ptr,
    new_nu_scale_ptr,
    OUTER: tl.constexpr,
    E: tl.constexpr,
    INNER: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    AXIS: tl.constexpr,
    PLACES: tl.constexpr,  # values behind one of the whole parameter's model dimension
    B1: tl.constexpr,
    B2: tl.constexpr,
    EPS: tl.constexpr,
    DECAY: tl.constexpr,
    STILL_M: tl.constexpr,
    STILL_V: tl.constexpr,
):
    """The parameter and its moments after an update, in place; untouched where it is not good."""
    if tl.load(words_ptr) == 0:
        return
    clip, of_m, of_v, rate = (
        tl.load(numbers_ptr),
        tl.load(numbers_ptr + 1),
        tl.load(numbers_ptr + 2),
        tl.load(numbers_ptr + 3),
    )
    salt = tl.load(words_ptr + 1)
    program = tl.program_id(0)
    b, c = tl.arange(0, B), tl.arange(0, C)
    BLOCKS: tl.constexpr = E // B
    if AXIS == 0:
        COLUMNS: tl.constexpr = (INNER + C - 1) // C
        block, column = program // COLUMNS, program % COLUMNS * C
        columns = tl.max_contiguous(tl.multiple_of(column + c, 4), 4)
        start = block.to(tl.int64) * B * INNER
        at = b[:, None] * INNER + columns[None, :]
        place = (block % BLOCKS * B + b).to(tl.uint32)[:, None] * PLACES
        place += columns.to(tl.uint32)[None, :]
        scale_at = block.to(tl.int64) * INNER + column + c
        is_inside = column + c < INNER
    else:
        rows = program * C + c
        start = program.to(tl.int64) * C * B
        at = c[:, None] * B + tl.max_contiguous(tl.multiple_of(b, 4), 4)[None, :]
        place = ((rows % BLOCKS * B)[:, None] + b[None, :]).to(tl.uint32) * PLACES
        scale_at = rows
        is_inside = rows < OUTER * BLOCKS
    IS_WHOLE: tl.constexpr = (INNER if AXIS == 0 else OUTER * BLOCKS) % C == 0
    is_here = tl.expand_dims(is_inside, AXIS) & (at >= 0)
    if IS_WHOLE:
        g = tl.load(g_ptr + start + at)
        mu, nu = tl.load(mu_ptr + start + at), tl.load(nu_ptr + start + at)
        mu_scale, nu_scale = tl.load(mu_scale_ptr + scale_at), tl.load(nu_scale_ptr + scale_at)
        p = tl.load(p_ptr + start + at)
    else:
        g = tl.load(g_ptr + start + at, mask=is_here, other=0.0)
        mu = tl.load(mu_ptr + start + at, mask=is_here, other=0)
        nu = tl.load(nu_ptr + start + at, mask=is_here, other=0)
        mu_scale = tl.load(mu_scale_ptr + scale_at, mask=is_inside, other=0.0)
        nu_scale = tl.load(nu_scale_ptr + scale_at, mask=is_inside, other=0.0)
        p = tl.load(p_ptr + start + at, mask=is_here, other=0.0)

    g = g * clip
    mu, nu = mu.to(tl.int32), nu.to(tl.int32)
    m, root = mu.to(tl.float32), nu.to(tl.float32)
    m = m * tl.abs(m) * tl.expand_dims(mu_scale, AXIS)
    root = root * root * tl.expand_dims(nu_scale, AXIS)
    m = B1 * m + (1 - B1) * g
    v = B2 * (root * root) + (1 - B2) * (g * g)
    step = _quotient(m * of_m, _root(v * of_v) + EPS)
    if DECAY > 0:
        step = step + DECAY * p
    p = p + rate * step

    mu_scale = tl.max(tl.abs(m), AXIS) * (1 / (_MOST_M * _MOST_M))
    nu_scale = _root(tl.max(v, AXIS)) * (1 / (_MOST_V * _MOST_V))
    of_mu = tl.where(mu_scale >= _TINY, 1 / mu_scale, 0.0)
    of_nu = tl.where(nu_scale >= _TINY, 1 / nu_scale, 0.0)
    noise = _noise(mu, nu, place * _OF_PLACE + salt)
    mu = _code_m(m, tl.expand_dims(of_mu, AXIS), noise, STILL_M)
    nu = _code_v(v, tl.expand_dims(of_nu, AXIS), noise, STILL_V)
    if IS_WHOLE:
        tl.store(new_p_ptr + start + at, p)
        tl.store(new_mu_ptr + start + at, mu)
        tl.store(new_nu_ptr + start + at, nu)
        tl.store(new_mu_scale_ptr + scale_at, mu_scale)
        tl.store(new_nu_scale_ptr + scale_at, nu_scale)
    else:
        tl.store(new_p_ptr + start + at, p, mask=is_here)
        tl.store(new_mu_ptr + start + at, mu, mask=is_here)
        tl.store(new_nu_ptr + start + at, nu, mask=is_here)
        tl.store(new_mu_scale_ptr + scale_at, mu_scale, mask=is_inside)
        tl.store(new_nu_scale_ptr + scale_at, nu_scale, mask=is_inside)
