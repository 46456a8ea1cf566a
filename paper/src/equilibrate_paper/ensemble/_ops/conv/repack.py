"""Triton kernels that lay out images, gradients and weights as the products read them."""

# ruff: noqa: E741, RET505
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false
# O is the number of filters, as in the shape (R, O, C, F, F). Triton resolves branches on
# constants at compile time, if they have an else.

import triton
import triton.language as tl


@triton.jit
def round_mantissa(v, BITS: tl.constexpr):
    """Return a float32 rounded to nearest, with its lowest bits cleared.

    With 13 bits the result is a TF32 number. The tensor cores would truncate instead, which biases
    every product.
    """
    bits = v.to(tl.int32, bitcast=True)
    rounded = (bits + (1 << (BITS - 1))) & -(1 << BITS)
    return tl.where(v == v, rounded.to(tl.float32, bitcast=True), v)


@triton.jit
def pack_kernel(
    x, packed, stride_r, stride_b, size,
    STRIDE_C: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr,
    C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    PAD: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy images to channels-last with a border of zeros: (R, B, H+2·PAD, W+2·PAD, CP).

    `size` is the number of entries of a replica.
    """
    HP: tl.constexpr = H + 2 * PAD
    WP: tl.constexpr = W + 2 * PAD
    r = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = t % CP
    pixel = t // CP
    b = pixel // (HP * WP)
    iy = pixel // WP % HP - PAD
    ix = pixel % WP - PAD
    inside = (t < size) & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W) & (c < C)
    source = x + r * stride_r + b * stride_b + iy * STRIDE_Y + ix * STRIDE_X + c * STRIDE_C
    v = tl.load(source, mask=inside, other=0.0)
    if ROUND:
        v = round_mantissa(v, 13)
    tl.store(packed + r * size + t, v, mask=t < size)


@triton.jit
def spread_block(
    grad, argmax, spread, scale, pixel, exists, inside,
    FIRST: tl.constexpr, BO: tl.constexpr,
    STRIDE_O: tl.constexpr, O: tl.constexpr, NP: tl.constexpr, ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the gradients of BO channels from FIRST, 0 where the ReLU is zero; spread them."""
    o = FIRST + tl.arange(0, BO)
    mask = inside[:, None] & (o < O)[None, :]
    g = tl.load(grad[:, None] + o[None, :] * STRIDE_O, mask=mask, other=0.0)
    i = tl.load(argmax[:, None] + o[None, :], mask=mask, other=4).to(tl.int32)
    g = tl.where(i < 4, g, 0.0)
    v = g * scale
    if ROUND:
        v = round_mantissa(v, 13)
    # tl.join keeps the four in one thread and makes contiguous rows; a third axis would not.
    even = tl.join(tl.where(i == 0, v, 0.0), tl.where(i == 2, v, 0.0))
    odd = tl.join(tl.where(i == 1, v, 0.0), tl.where(i == 3, v, 0.0))
    s = tl.reshape(tl.join(even, odd).to(spread.dtype.element_ty), (BLOCK, 4 * BO))
    n = 4 * FIRST + tl.arange(0, 4 * BO)
    tl.store(spread + (pixel * NP)[:, None] + n[None, :], s, mask=exists[:, None])
    return g


@triton.jit
def spread_kernel(
    grad, argmax, spread, sums, stride_r, stride_b, scale, pixels,
    STRIDE_O: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr,
    O: tl.constexpr, O_MAIN: tl.constexpr, O_TAIL: tl.constexpr,
    H2: tl.constexpr, W2: tl.constexpr, BORDER: tl.constexpr, ROUND: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """spread[r, pixel, (o, p)] = scale · gradient if the maximum is at p, else 0; the border is 0.

    The gradient is 0 where the ReLU is zero. Each program writes a partial sum of the bias gradient
    to `sums`.
    """
    HP: tl.constexpr = H2 + 2 * BORDER
    WP: tl.constexpr = W2 + 2 * BORDER
    NP: tl.constexpr = 4 * (O_MAIN + O_TAIL)
    r = tl.program_id(1).to(tl.int64)
    images = pixels // (HP * WP)
    grad += r * stride_r
    argmax += r * images * (H2 * W2 * O)
    spread += r * pixels * NP
    acc = tl.zeros((BLOCK, O_MAIN), tl.float32)
    if O_TAIL > 0:
        acc_tail = tl.zeros((BLOCK, O_TAIL), tl.float32)
    for step in range(STEPS):
        pixel = (tl.program_id(0) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        exists = pixel < pixels
        unsigned = pixel.to(tl.uint32)
        b = (unsigned // (HP * WP)).to(tl.int32)
        qy = (unsigned // WP % HP).to(tl.int32) - BORDER
        qx = (unsigned % WP).to(tl.int32) - BORDER
        inside = exists & (qy >= 0) & (qy < H2) & (qx >= 0) & (qx < W2)
        source = grad + b * stride_b + qy * STRIDE_Y + qx * STRIDE_X
        position = argmax + (b * (H2 * W2) + qy * W2 + qx) * O
        acc += spread_block(
            source, position, spread, scale, pixel, exists, inside,
            0, O_MAIN, STRIDE_O, O, NP, ROUND, BLOCK,
        )  # fmt: skip
        if O_TAIL > 0:
            acc_tail += spread_block(
                source, position, spread, scale, pixel, exists, inside,
                O_MAIN, O_TAIL, STRIDE_O, O, NP, ROUND, BLOCK,
            )  # fmt: skip
    partial_sum = sums + (r * tl.num_programs(0) + tl.program_id(0)) * O
    o = tl.arange(0, O_MAIN)
    tl.store(partial_sum + o, tl.sum(acc, axis=0), mask=o < O)
    if O_TAIL > 0:
        o = O_MAIN + tl.arange(0, O_TAIL)
        tl.store(partial_sum + o, tl.sum(acc_tail, axis=0), mask=o < O)


@triton.jit
def split_main_tail(t, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """Return (quarter, channel) of column t: four blocks of MAIN channels, then four of TAIL."""
    if TAIL > 0:
        u = t - 4 * MAIN
        return tl.where(u < 0, t // MAIN, u // TAIL), tl.where(u < 0, t % MAIN, MAIN + u % TAIL)
    else:
        return t // MAIN, t % MAIN


@triton.jit
def expand_filters_kernel(
    weight, filters, stride_r,
    O: tl.constexpr, O_MAIN: tl.constexpr, O_TAIL: tl.constexpr,
    C: tl.constexpr, CP: tl.constexpr, F: tl.constexpr, KP: tl.constexpr,
    ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """filters[r, (p, o), (y, x, c)] = weight[r, o, c, y − p_y, x − p_x], 0 outside."""
    N: tl.constexpr = 4 * (O_MAIN + O_TAIL)
    r = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = t // KP
    k = t % KP
    p, o = split_main_tail(n, O_MAIN, O_TAIL)
    tap = k // CP
    c = k % CP
    dy = tap // (F + 1) - p // 2
    dx = tap % (F + 1) - p % 2
    valid = (n < N) & (o < O) & (c < C) & (dy >= 0) & (dy < F) & (dx >= 0) & (dx < F)
    v = tl.load(weight + r * stride_r + ((o * C + c) * F + dy) * F + dx, mask=valid, other=0.0)
    if ROUND:
        v = round_mantissa(v, 13)
    tl.store(filters + r * N * KP + t, v, mask=n < N)


@triton.jit
def expand_transpose_kernel(
    weight, filters, stride_r,
    O: tl.constexpr, OP: tl.constexpr,
    C: tl.constexpr, C_MAIN: tl.constexpr, C_TAIL: tl.constexpr,
    F: tl.constexpr, REACH: tl.constexpr, KP: tl.constexpr, ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """filters'[r, (s, c), (j, o, p)] = weight[r, o, c, dy, dx], dy = s_y + F//2 − 2·j_y − p_y."""
    SPAN: tl.constexpr = 2 * REACH + 1
    N: tl.constexpr = 4 * (C_MAIN + C_TAIL)
    r = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = t // KP
    k = t % KP
    j = k // (4 * OP)
    o = k // 4 % OP
    p = k % 4
    s, c = split_main_tail(n, C_MAIN, C_TAIL)
    dy = s // 2 + F // 2 - 2 * (j // SPAN - REACH) - p // 2
    dx = s % 2 + F // 2 - 2 * (j % SPAN - REACH) - p % 2
    valid = (n < N) & (j < SPAN * SPAN) & (o < O) & (c < C)
    valid &= (dy >= 0) & (dy < F) & (dx >= 0) & (dx < F)
    v = tl.load(weight + r * stride_r + ((o * C + c) * F + dy) * F + dx, mask=valid, other=0.0)
    if ROUND:
        v = round_mantissa(v, 13)
    tl.store(filters + r * N * KP + t, v, mask=n < N)
