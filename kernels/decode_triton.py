"""The Triton program of one layer for one token: as many programs as fit side by side, in steps.

At each of four meetings all programs wait until all have stored what the next step reads. The
weights do not depend on that: a program asks for the first tile of its next weights before it
waits, so the memory is busy meanwhile. One layer of 1.5 B on an H200 reads 122 MB in 42 us: QKV 6,
attention 5 with its meeting, output 5, gate and up 17, down 10.

D model, F mlp, K key heads, G query heads a key head, N = K * G, M = G + 2, H head size, T tokens
that can be kept, S parts that they are read in, P programs; R rows and C columns of a tile.
"""

import triton
import triton.language as tl


@triton.jit
def _arrive(counter_ptr, P: tl.constexpr):
    """Says that this program has stored its part. Returns what the counter has to reach.

    The counter goes on through all launches: P, a power of 2, is added at every meeting.
    """
    tl.debug_barrier()
    return tl.inline_asm_elementwise(
        """{
        .reg .pred is_first;
        .reg .s32 thread, before, target;
        mov.u32 thread, %tid.x;
        setp.eq.s32 is_first, thread, 0;
        mov.s32 before, 0;
        @is_first atom.add.release.gpu.global.s32 before, [$1], 1;
        neg.s32 target, $2;
        and.b32 target, target, before;
        add.s32 $0, target, $2;
        }""",
        "=r,l,r",
        [counter_ptr, P],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _wait(counter_ptr, target):
    """Until all programs have arrived. By the difference, because the counter may wrap around."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred is_other, is_short;
        .reg .s32 thread, now, left;
        mov.u32 thread, %tid.x;
        setp.ne.s32 is_other, thread, 0;
        @is_other bra DONE;
        AGAIN:
        ld.acquire.gpu.global.s32 now, [$1];
        sub.s32 left, now, $2;
        setp.lt.s32 is_short, left, 0;
        @is_short bra AGAIN;
        DONE:
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [counter_ptr, target],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


@triton.jit
def _tile(weight_ptr, begin, end, step, COLUMNS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Tile `step` [R, C] of the rows from begin to end: along the columns first, then down."""
    PER_ROW: tl.constexpr = (COLUMNS + C - 1) // C
    row = begin + step // PER_ROW * R + tl.arange(0, R)
    column = step % PER_ROW * C + tl.arange(0, C)
    is_inside = (row < end)[:, None] & (column < COLUMNS)[None, :]
    at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    return tl.load(weight_ptr + at, mask=is_inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _product(weight_RC, x_C, R: tl.constexpr, C: tl.constexpr):
    """Its sums over eight columns each, which a thread has at hand: float32 [R, C / 8]."""
    product_RC = weight_RC.to(tl.float32) * x_C[None, :]
    return tl.sum(tl.reshape(product_RC, (R, C // 8, 8)), 2)


@triton.jit
def _vector(x_ptr, step, SIZE: tl.constexpr, C: tl.constexpr):
    """The part of x that belongs to the columns of tile `step`, float32 [C]."""
    column = step % ((SIZE + C - 1) // C) * C + tl.arange(0, C)
    return tl.load(x_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)


@triton.jit
def _inverse_rms(x_ptr, eps, SIZE: tl.constexpr, POWER: tl.constexpr):
    every = tl.arange(0, POWER)
    x = tl.load(x_ptr + every, mask=every < SIZE, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x) / SIZE + eps)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def _add_rows(
    x_ptr,  # [COLUMNS]
    weight_ptr,  # [ROWS, COLUMNS]
    tile,  # the first
    residual_ptr,  # [ROWS]
    y_ptr,  # [ROWS]
    begin,
    end,
    COUNT: tl.constexpr,  # of rows of a program
    COLUMNS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """y = residual + weight @ x, rows begin to end."""
    dtype = y_ptr.dtype.element_ty
    PER_ROW: tl.constexpr = (COLUMNS + C - 1) // C
    sums = tl.zeros((R, C // 8), tl.float32)
    for step in range((COUNT + R - 1) // R * PER_ROW):
        following = _tile(weight_ptr, begin, end, step + 1, COLUMNS, R, C)
        sums += _product(tile, _vector(x_ptr, step, COLUMNS, C), R, C)
        if step % PER_ROW == PER_ROW - 1:
            row = begin + step // PER_ROW * R + tl.arange(0, R)
            y = _rounded(tl.sum(sums, 1), dtype)
            y += tl.load(residual_ptr + row, mask=row < end, other=0.0).to(tl.float32)
            tl.store(y_ptr + row, y.to(dtype), mask=row < end)
            sums = tl.zeros((R, C // 8), tl.float32)
        tile = following


@triton.jit
def _normed(first, second, scale_ptr, eps, dtype: tl.constexpr, HALF: tl.constexpr):
    """The two halves of vectors [X, H], normalised over H."""
    h = tl.arange(0, HALF)
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    inverse_rms = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    first = first * inverse_rms * tl.load(scale_ptr + h)[None, :]
    second = second * inverse_rms * tl.load(scale_ptr + HALF + h)[None, :]
    return _rounded(first, dtype), _rounded(second, dtype)


@triton.jit
def _extent(program, place, K: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr):
    """(key head, part, its first token, its end) of a program; nothing beyond the parts."""
    first = tl.maximum(place - WINDOW + 1, 0) if WINDOW > 0 else 0
    length = (place - first + S * _KEPT - 1) // (S * _KEPT) * _KEPT
    part = program // K
    begin = first + part * length
    end = tl.where(part < S, tl.minimum(begin + length, place), begin)
    return program % K, part, begin, end


# Kept tokens that a program looks at at once.
_KEPT: tl.constexpr = tl.constexpr(64)


@triton.jit
def _kept(k, begin, end, keys_ptr, values_ptr, H: tl.constexpr, T: tl.constexpr):
    """Of the tokens from begin on: the keys' halves, transposed, the values, which of them are."""
    HALF: tl.constexpr = H // 2
    h, every = tl.arange(0, HALF), tl.arange(0, H)
    t = begin + tl.arange(0, _KEPT)
    is_kept = t < end
    keys_at = keys_ptr + (k * T + t)[None, :] * H + h[:, None]
    first = tl.load(keys_at, mask=is_kept[None, :], other=0.0)
    second = tl.load(keys_at + HALF, mask=is_kept[None, :], other=0.0)
    values_at = values_ptr + (k * T + t)[:, None] * H + every[None, :]
    return first, second, tl.load(values_at, mask=is_kept[:, None], other=0.0), is_kept


@triton.jit
def _attend(
    k,
    part,
    begin,
    end,
    block,  # the kept tokens from begin on
    place,
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    keys_ptr,
    values_ptr,
    sums_ptr,
    most_ptr,
    total_ptr,
    eps,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    T: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_HEAD_NORMS: tl.constexpr,
    ALL_G: tl.constexpr,
):
    """Rotates queries and the new key, keeps key and value, and attends to a part of the keys."""
    dtype = keys_ptr.dtype.element_ty
    HALF: tl.constexpr = H // 2
    h, every, g = tl.arange(0, HALF), tl.arange(0, H), tl.arange(0, ALL_G)
    cos, sin = tl.load(cos_ptr + h)[None, :], tl.load(sin_ptr + h)[None, :]
    # Rows: G queries, then the key; the value comes after.
    mine = qkv_ptr + k * (G + 2) * H
    queries_at = g[:, None] * H + h[None, :]
    is_query = (g < G)[:, None]
    first = tl.load(mine + queries_at, mask=is_query, other=0.0).to(tl.float32)
    second = tl.load(mine + queries_at + HALF, mask=is_query, other=0.0).to(tl.float32)
    one = tl.arange(0, 1)[:, None] * H + h[None, :]
    key_first = tl.load(mine + G * H + one).to(tl.float32)
    key_second = tl.load(mine + G * H + HALF + one).to(tl.float32)
    if HAS_HEAD_NORMS:
        first, second = _normed(first, second, q_norm_ptr, eps, dtype, HALF)
        key_first, key_second = _normed(key_first, key_second, k_norm_ptr, eps, dtype, HALF)
    q_first = (first * cos - second * sin).to(dtype)
    q_second = (second * cos + first * sin).to(dtype)
    new_first = (key_first * cos - key_second * sin).to(dtype)
    new_second = (key_second * cos + key_first * sin).to(dtype)
    new_value = tl.load(mine + (G + 1) * H + every)
    if part == 0:
        slot = (k * T + place) * H
        tl.store(keys_ptr + slot + one, new_first)
        tl.store(keys_ptr + slot + HALF + one, new_second)
        tl.store(values_ptr + slot + every, new_value)
    # The new token's own key is at hand, and begins the sums of the first part.
    fresh = tl.sum(q_first.to(tl.float32) * new_first.to(tl.float32), 1)
    fresh = SCALE * (fresh + tl.sum(q_second.to(tl.float32) * new_second.to(tl.float32), 1))
    most = tl.where(part == 0, fresh, -1e30)
    total = tl.where(part == 0, 1.0, 0.0) + tl.zeros((ALL_G,), tl.float32)
    sums = total[:, None] * new_value.to(tl.float32)[None, :]
    keys_first, keys_second, values, is_kept = block
    for now in range(begin, end, _KEPT):
        following = _kept(k, now + _KEPT, end, keys_ptr, values_ptr, H, T)
        scores = SCALE * (tl.dot(q_first, keys_first) + tl.dot(q_second, keys_second))
        scores = tl.where(is_kept[None, :], scores, -1e30)
        new_most = tl.maximum(most, tl.max(scores, 1))
        shrink = tl.exp(most - new_most)
        shares = tl.where(is_kept[None, :], tl.exp(scores - new_most[:, None]), 0.0)
        total = total * shrink + tl.sum(shares, 1)
        sums = sums * shrink[:, None] + tl.dot(shares.to(dtype), values)
        most = new_most
        keys_first, keys_second, values, is_kept = following
    n = part * K * G + k * G + g
    tl.store(most_ptr + n, most, mask=g < G)
    tl.store(total_ptr + n, total, mask=g < G)
    tl.store(sums_ptr + n[:, None] * H + every[None, :], sums, mask=is_query)


@triton.jit
def _attended(
    sums_ptr,
    most_ptr,
    total_ptr,
    step,
    dtype: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
):
    """Attention's outputs at the columns of tile `step`, its parts put together: float32 [C]."""
    column = step % ((N * H + C - 1) // C) * C + tl.arange(0, C)
    is_inside, n = column < N * H, column // H
    most = tl.full((C,), float("-inf"), tl.float32)
    for part in tl.static_range(S):
        most = tl.maximum(most, tl.load(most_ptr + part * N + n, mask=is_inside, other=0.0))
    x, total = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for part in tl.static_range(S):
        here = tl.load(most_ptr + part * N + n, mask=is_inside, other=0.0)
        share = tl.exp(here - most)
        x += share * tl.load(sums_ptr + part * N * H + column, mask=is_inside, other=0.0)
        total += share * tl.load(total_ptr + part * N + n, mask=is_inside, other=1.0)
    return _rounded(x / total, dtype)


@triton.jit
def layer(
    x_ptr,  # [D]
    attention_norm_ptr,  # float32 [D]
    qkv_weight_ptr,  # [K, M, H, D]
    qkv_bias_ptr,  # float32 [K, M, H]
    q_norm_ptr,  # float32 [H]
    k_norm_ptr,  # float32 [H]
    out_weight_ptr,  # [D, N, H]
    mlp_norm_ptr,  # float32 [D]
    gate_weight_ptr,  # [F, D]
    up_weight_ptr,  # [F, D]
    down_weight_ptr,  # [D, F]
    cos_ptr,  # float32 [H / 2]
    sin_ptr,  # float32 [H / 2]
    old_keys_ptr,  # keys
    old_values_ptr,  # values
    old_counter_ptr,  # counter
    place_ptr,  # int32 [1]
    eps,
    y_ptr,  # [D]
    keys_ptr,  # [K, T, H]
    values_ptr,  # [K, T, H]
    counter_ptr,  # int32 [1]
    qkv_ptr,  # [K, M, H]
    sums_ptr,  # float32 [S, N, H]
    most_ptr,  # float32 [S, N]
    total_ptr,  # float32 [S, N]
    middle_ptr,  # [D]
    hidden_ptr,  # [F]
    D: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    T: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    HAS_BIAS: tl.constexpr,
    HAS_HEAD_NORMS: tl.constexpr,
    SCALE: tl.constexpr,
    ALL_D: tl.constexpr,  # the power of 2 at or above D
    ALL_G: tl.constexpr,  # of G, at least 16: tensor cores' rows
    QKV_R: tl.constexpr,
    QKV_C: tl.constexpr,
    OUT_R: tl.constexpr,
    OUT_C: tl.constexpr,
    GATED_R: tl.constexpr,
    GATED_C: tl.constexpr,
    DOWN_R: tl.constexpr,
    DOWN_C: tl.constexpr,
):
    """y = the layer of x; keeps the token's key and value at its place. The rest is scratch."""
    program = tl.program_id(0)
    dtype = y_ptr.dtype.element_ty
    N: tl.constexpr = K * G
    QKV_ROWS: tl.constexpr = K * (G + 2) * H
    # Rows of a program, a multiple of 8.
    QKV_COUNT: tl.constexpr = (QKV_ROWS + 8 * P - 1) // (8 * P) * 8
    D_COUNT: tl.constexpr = (D + 8 * P - 1) // (8 * P) * 8
    F_COUNT: tl.constexpr = (F + 8 * P - 1) // (8 * P) * 8
    D_begin, D_end = program * D_COUNT, tl.minimum(program * D_COUNT + D_COUNT, D)
    F_begin, F_end = program * F_COUNT, tl.minimum(program * F_COUNT + F_COUNT, F)

    # Queries, keys and values: weight @ (x * scale), and the norm's root after it.
    begin, end = program * QKV_COUNT, tl.minimum(program * QKV_COUNT + QKV_COUNT, QKV_ROWS)
    inverse_rms = _inverse_rms(x_ptr, eps, D, ALL_D)
    PER_QKV: tl.constexpr = (D + QKV_C - 1) // QKV_C
    QKV_STEPS: tl.constexpr = (QKV_COUNT + QKV_R - 1) // QKV_R * PER_QKV
    tile = _tile(qkv_weight_ptr, begin, end, 0, D, QKV_R, QKV_C)
    sums = tl.zeros((QKV_R, QKV_C // 8), tl.float32)
    for step in range(QKV_STEPS):
        if QKV_STEPS > 1:
            following = _tile(qkv_weight_ptr, begin, end, step + 1, D, QKV_R, QKV_C)
        x = _vector(x_ptr, step, D, QKV_C) * _vector(attention_norm_ptr, step, D, QKV_C)
        sums += _product(tile, x, QKV_R, QKV_C)
        if step % PER_QKV == PER_QKV - 1:
            row = begin + step // PER_QKV * QKV_R + tl.arange(0, QKV_R)
            y = tl.sum(sums, 1) * inverse_rms
            if HAS_BIAS:
                y = _rounded(y, dtype) + tl.load(qkv_bias_ptr + row, mask=row < end, other=0.0)
            tl.store(qkv_ptr + row, y.to(dtype), mask=row < end)
            sums = tl.zeros((QKV_R, QKV_C // 8), tl.float32)
        if QKV_STEPS > 1:
            tile = following
    target = _arrive(counter_ptr, P)
    tile = _tile(out_weight_ptr, D_begin, D_end, 0, N * H, OUT_R, OUT_C)
    place = tl.minimum(tl.load(place_ptr), T - 1)
    k, part, begin, end = _extent(program, place, K, S, WINDOW)
    block = _kept(k, begin, end, keys_ptr, values_ptr, H, T)
    _wait(counter_ptr, target)

    if part < S:
        _attend(
            k,
            part,
            begin,
            end,
            block,
            place,
            qkv_ptr,
            cos_ptr,
            sin_ptr,
            q_norm_ptr,
            k_norm_ptr,
            keys_ptr,
            values_ptr,
            sums_ptr,
            most_ptr,
            total_ptr,
            eps,
            K,
            G,
            H,
            T,
            SCALE,
            HAS_HEAD_NORMS,
            ALL_G,
        )
    _wait(counter_ptr, _arrive(counter_ptr, P))

    # As `_add_rows`, of x in parts.
    PER_OUT: tl.constexpr = (N * H + OUT_C - 1) // OUT_C
    OUT_STEPS: tl.constexpr = (D_COUNT + OUT_R - 1) // OUT_R * PER_OUT
    sums = tl.zeros((OUT_R, OUT_C // 8), tl.float32)
    for step in range(OUT_STEPS):
        if OUT_STEPS > 1:
            following = _tile(out_weight_ptr, D_begin, D_end, step + 1, N * H, OUT_R, OUT_C)
        x = _attended(sums_ptr, most_ptr, total_ptr, step, dtype, N, H, S, OUT_C)
        sums += _product(tile, x, OUT_R, OUT_C)
        if step % PER_OUT == PER_OUT - 1:
            row = D_begin + step // PER_OUT * OUT_R + tl.arange(0, OUT_R)
            y = _rounded(tl.sum(sums, 1), dtype)
            y += tl.load(x_ptr + row, mask=row < D_end, other=0.0).to(tl.float32)
            tl.store(middle_ptr + row, y.to(dtype), mask=row < D_end)
            sums = tl.zeros((OUT_R, OUT_C // 8), tl.float32)
        if OUT_STEPS > 1:
            tile = following
    target = _arrive(counter_ptr, P)
    gate = _tile(gate_weight_ptr, F_begin, F_end, 0, D, GATED_R, GATED_C)
    up = _tile(up_weight_ptr, F_begin, F_end, 0, D, GATED_R, GATED_C)
    _wait(counter_ptr, target)

    inverse_rms = _inverse_rms(middle_ptr, eps, D, ALL_D)
    PER_GATED: tl.constexpr = (D + GATED_C - 1) // GATED_C
    gate_sums = tl.zeros((GATED_R, GATED_C // 8), tl.float32)
    up_sums = tl.zeros((GATED_R, GATED_C // 8), tl.float32)
    for step in range((F_COUNT + GATED_R - 1) // GATED_R * PER_GATED):
        next_gate = _tile(gate_weight_ptr, F_begin, F_end, step + 1, D, GATED_R, GATED_C)
        next_up = _tile(up_weight_ptr, F_begin, F_end, step + 1, D, GATED_R, GATED_C)
        x = _vector(middle_ptr, step, D, GATED_C) * _vector(mlp_norm_ptr, step, D, GATED_C)
        gate_sums += _product(gate, x, GATED_R, GATED_C)
        up_sums += _product(up, x, GATED_R, GATED_C)
        if step % PER_GATED == PER_GATED - 1:
            row = F_begin + step // PER_GATED * GATED_R + tl.arange(0, GATED_R)
            y = _rounded(tl.sum(gate_sums, 1) * inverse_rms, dtype)
            y *= tl.sigmoid(y) * _rounded(tl.sum(up_sums, 1) * inverse_rms, dtype)
            tl.store(hidden_ptr + row, y.to(dtype), mask=row < F_end)
            gate_sums = tl.zeros((GATED_R, GATED_C // 8), tl.float32)
            up_sums = tl.zeros((GATED_R, GATED_C // 8), tl.float32)
        gate, up = next_gate, next_up
    target = _arrive(counter_ptr, P)
    tile = _tile(down_weight_ptr, D_begin, D_end, 0, F, DOWN_R, DOWN_C)
    _wait(counter_ptr, target)

    _add_rows(
        hidden_ptr,
        down_weight_ptr,
        tile,
        middle_ptr,
        y_ptr,
        D_begin,
        D_end,
        D_COUNT,
        F,
        DOWN_R,
        DOWN_C,
    )
