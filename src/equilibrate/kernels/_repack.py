"""Triton kernels that lay images, gradients and weights out as the products read them."""

# ruff: noqa: E741, RET505
# pyright: reportMissingImports=false
# O is the number of filters, as in the shape (R, O, C, F, F). Branches on constants are decided
# while Triton compiles, and have their else.

import triton
import triton.language as tl


@triton.jit
def round_mantissa(v, BITS: tl.constexpr):
    """Clear the lowest bits of a float32, rounding to nearest.

    13 bits make it a TF32 number. The tensor cores would cut them off and so bias every product.
    """
    bits = v.to(tl.int32, bitcast=True)
    rounded = (bits + (1 << (BITS - 1))) & -(1 << BITS)
    return tl.where(v == v, rounded.to(tl.float32, bitcast=True), v)


@triton.jit
def pack_kernel(
    x, index, packed, stride_r, stride_b, pixels,
    STRIDE_C: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr,
    C: tl.constexpr, CP: tl.constexpr, CB: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    PAD: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy images to channels-last with a border of zeros: (R, B, H+2·PAD, W+2·PAD, CP).

    With an `index`, image (r, b) is image index[r, b] of x, and stride_r is not used.
    """
    HP: tl.constexpr = H + 2 * PAD
    WP: tl.constexpr = W + 2 * PAD
    r = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, CB)
    b = pixel // (HP * WP)
    iy = pixel // WP % HP - PAD
    ix = pixel % WP - PAD
    inside = (pixel < pixels) & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
    if index is None:
        image = r * stride_r + b * stride_b
    else:
        image = tl.load(index + r * (pixels // (HP * WP)) + b, mask=inside, other=0) * stride_b
    source = x + image + iy * STRIDE_Y + ix * STRIDE_X
    v = tl.load(
        source[:, None] + c[None, :] * STRIDE_C, mask=inside[:, None] & (c < C)[None, :], other=0.0
    )
    if ROUND:
        v = round_mantissa(v, 13)
    target = packed + r * pixels * CP + pixel[:, None] * CP + c[None, :]
    tl.store(target, v, mask=(pixel < pixels)[:, None] & (c < CP)[None, :])


@triton.jit
def tag_kernel(
    grad, argmax, tagged, sums, stride_r, stride_b, pixels,
    STRIDE_O: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr,
    O: tl.constexpr, OP: tl.constexpr, OB: tl.constexpr, H2: tl.constexpr, W2: tl.constexpr,
    BORDER: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put each gradient and its maximum's position into one word, channels last, bordered by 0.

    The position takes the lowest two bits, which TF32 does not see; else the rest is rounded to 22.
    A dead ReLU's gradient is 0. `sums` gets each program's share of the bias gradient.
    """
    r = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = tl.arange(0, OB)
    HP: tl.constexpr = H2 + 2 * BORDER
    WP: tl.constexpr = W2 + 2 * BORDER
    b = pixel // (HP * WP)
    qy = pixel // WP % HP - BORDER
    qx = pixel % WP - BORDER
    inside = (pixel < pixels) & (qy >= 0) & (qy < H2) & (qx >= 0) & (qx < W2)
    mask = inside[:, None] & (o < O)[None, :]
    source = grad + r * stride_r + b * stride_b + qy * STRIDE_Y + qx * STRIDE_X
    g = tl.load(source[:, None] + o[None, :] * STRIDE_O, mask=mask, other=0.0)
    images = pixels // (HP * WP)
    index = argmax + ((r * images + b) * (H2 * W2) + qy * W2 + qx) * O
    i = tl.load(index[:, None] + o[None, :], mask=mask, other=4).to(tl.int32)
    g = tl.where(i < 4, g, 0.0)
    share = sums + (r * tl.num_programs(0) + tl.program_id(0)) * O
    tl.store(share + o, tl.sum(g, axis=0), mask=o < O)
    v = round_mantissa(g, 13 if ROUND else 2)
    v = ((v.to(tl.int32, bitcast=True) & -4) | (i & 3)).to(tl.float32, bitcast=True)
    target = tagged + r * pixels * OP + pixel[:, None] * OP + o[None, :]
    tl.store(target, v, mask=(pixel < pixels)[:, None] & (o < OP)[None, :])


@triton.jit
def expand_filters_kernel(
    weight, filters, stride_r,
    O: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, F: tl.constexpr,
    N: tl.constexpr, KP: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """filters[r, 4·o + p, (y, x, c)] = weight[r, o, c, y − p_y, x − p_x], 0 outside."""
    r = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = t // KP
    k = t % KP
    o = n // 4
    tap = k // CP
    c = k % CP
    dy = tap // (F + 1) - n % 4 // 2
    dx = tap % (F + 1) - n % 2
    valid = (n < N) & (o < O) & (c < C) & (dy >= 0) & (dy < F) & (dx >= 0) & (dx < F)
    v = tl.load(weight + r * stride_r + ((o * C + c) * F + dy) * F + dx, mask=valid, other=0.0)
    if ROUND:
        v = round_mantissa(v, 13)
    tl.store(filters + r * N * KP + t, v, mask=n < N)


@triton.jit
def split_main_tail(t, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """(quarter, channel) of column t: four blocks of MAIN channels, then four of TAIL."""
    if TAIL > 0:
        u = t - 4 * MAIN
        return tl.where(u < 0, t // MAIN, u // TAIL), tl.where(u < 0, t % MAIN, MAIN + u % TAIL)
    else:
        return t // MAIN, t % MAIN


@triton.jit
def expand_transpose_kernel(
    weight, filters, stride_r,
    O: tl.constexpr, O_MAIN: tl.constexpr, O_TAIL: tl.constexpr,
    C: tl.constexpr, C_MAIN: tl.constexpr, C_TAIL: tl.constexpr,
    F: tl.constexpr, REACH: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """filters'[r, (s, c), (j, p, o)] = weight[r, o, c, dy, dx], dy = s_y + F//2 − 2·j_y − p_y."""
    SPAN: tl.constexpr = 2 * REACH + 1
    OP: tl.constexpr = O_MAIN + O_TAIL
    N: tl.constexpr = 4 * (C_MAIN + C_TAIL)
    K: tl.constexpr = SPAN * SPAN * 4 * OP
    r = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = t // K
    k = t % K
    j = k // (4 * OP)
    k = k % (4 * OP)
    p, o = split_main_tail(k, O_MAIN, O_TAIL)
    s, c = split_main_tail(n, C_MAIN, C_TAIL)
    dy = s // 2 + F // 2 - 2 * (j // SPAN - REACH) - p // 2
    dx = s % 2 + F // 2 - 2 * (j % SPAN - REACH) - p % 2
    valid = (n < N) & (o < O) & (c < C) & (dy >= 0) & (dy < F) & (dx >= 0) & (dx < F)
    v = tl.load(weight + r * stride_r + ((o * C + c) * F + dy) * F + dx, mask=valid, other=0.0)
    if ROUND:
        v = round_mantissa(v, 13)
    tl.store(filters + r * N * K + t, v, mask=n < N)
