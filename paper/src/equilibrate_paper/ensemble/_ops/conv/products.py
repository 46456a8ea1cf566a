"""Triton kernels of the three matrix products of `conv_relu_pool`.

A pooled pixel depends on an (F+1)² patch of the input, and its four candidates are four shifted F²
filters in that patch. So the convolution is one product, patch (K = (F+1)²·C) times filters
(N = 4·O), and the maximum over the four is computed in registers: each patch is read only once.
At F = 5 the filter matrix is 25/36 full. The additional products are cheap, since the kernel is
limited by memory.

    forward          Y[m, (p, o)] = Σ_k patch[m, k] filters[(p, o), k]; then max over p, bias, ReLU
    weight gradient  D[k, (o, p)] = Σ_m patch[m, k] S[m, (o, p)];       then sum over p
    input gradient   X[m, (s, c)] = Σ_j S[m + j, (o, p)] filters'[(s, c), (j, o, p)]

Here m runs over pooled pixels, p over the four pool positions, s over the four pixels of a 2×2
block of the input, j over the neighbouring pooled pixels, and S[m, (o, p)] is the gradient of
pooled pixel m if its maximum is at p, else 0.
Block shapes are powers of two. A count such as O = 20 is covered by a main block of 16 and a tail
of 4 (names ending in `_TAIL`; 0 for none), not by 32.
"""

# ruff: noqa: E741, SIM108
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false
# O is the number of filters, as in the shape (R, O, C, F, F). Triton resolves branches on
# constants at compile time.

import triton
import triton.language as tl


@triton.jit
def window_offset(k, SEGMENT: tl.constexpr, ROW: tl.constexpr, VECTOR: tl.constexpr):
    """Return the offset of entry k of a window with rows of SEGMENT entries in an image of ROW.

    Both are multiples of 8: they consist of an even number of pixels, or of pixels with at least 64
    entries. VECTOR, 8 or 4, is the number of entries that may be read at once.
    """
    offset = k + k // SEGMENT * (ROW - SEGMENT)
    return tl.max_contiguous(tl.multiple_of(offset, VECTOR), VECTOR)


@triton.jit
def patch_start(row, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr):
    """Return the index of the first pixel of the patch of pooled pixel `row` in packed images."""
    HP: tl.constexpr = H + F // 2 * 2
    WP: tl.constexpr = W + F // 2 * 2
    H2: tl.constexpr = H // 2
    W2: tl.constexpr = W // 2
    return (row // (H2 * W2) * HP + row // W2 % H2 * 2) * WP + row % W2 * 2


@triton.jit
def pooled_pixel(row, H2: tl.constexpr, W2: tl.constexpr, BORDER: tl.constexpr):
    """Return the index of pooled pixel `row` in pooled images with a border."""
    HP: tl.constexpr = H2 + 2 * BORDER
    WP: tl.constexpr = W2 + 2 * BORDER
    return (row // (H2 * W2) * HP + row // W2 % H2 + BORDER) * WP + row % W2 + BORDER


@triton.jit
def image_number(index, b):
    """Return the index of the packed image that is image b of the batch."""
    if index is None:
        image = b.to(tl.int64)
    else:
        image = tl.load(index + b)
    return image


@triton.jit
def windows_by_filters(
    window, filters,
    K: tl.constexpr, KP: tl.constexpr, SEGMENT: tl.constexpr, ROW: tl.constexpr,
    N_MAIN: tl.constexpr, N_TAIL: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    VECTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the products of BM windows, starting at `window`, and N_MAIN + N_TAIL filters."""
    n = tl.arange(0, N_MAIN)
    acc = tl.zeros((BM, N_MAIN), tl.float32)
    if N_TAIL > 0:
        n_tail = N_MAIN + tl.arange(0, N_TAIL)
        acc_tail = tl.zeros((BM, N_TAIL), tl.float32)
    else:
        acc_tail = acc
    for k0 in range(0, KP, BK):
        k = k0 + tl.arange(0, BK)
        source = window[:, None] + window_offset(k, SEGMENT, ROW, VECTOR)[None, :]
        if KP > K:
            a = tl.load(source, mask=(k < K)[None, :], other=0.0)
        else:
            a = tl.load(source)
        w = tl.load(filters + n[None, :] * KP + k[:, None])
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
        if N_TAIL > 0:
            w_tail = tl.load(filters + n_tail[None, :] * KP + k[:, None])
            acc_tail = tl.dot(a, w_tail, acc_tail, input_precision=PRECISION)
    return acc, acc_tail


@triton.jit
def pool(acc, bias, o, O: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr):
    """Return the maximum over the four positions after bias and ReLU, and its position.

    The position is that of the first of equal maxima, or 4 where the ReLU is zero. Columns are
    (p, o), which keeps the four positions in one thread.
    """
    v = tl.reshape(acc, (BM, 4, BO))
    best = tl.max(v, axis=1)
    p = tl.arange(0, 4)[None, :, None]
    position = tl.min(tl.where(v == best[:, None, :], p, 3), axis=1)
    best += tl.load(bias + o, mask=o < O, other=0.0)[None, :]
    dead = best <= 0  # not `~(best > 0)`: a NaN must stay a NaN
    return tl.where(dead, 0.0, best), tl.where(dead, 4, position).to(tl.uint8)


@triton.jit
def forward_kernel(
    packed, index, filters, bias, y, argmax, stride_packed, stride_index, stride_bias, M,
    O: tl.constexpr, O_MAIN: tl.constexpr, O_TAIL: tl.constexpr, CP: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, KP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[r, m, o] and argmax[r, m, o] for BM pooled pixels of one replica."""
    HP: tl.constexpr = H + F // 2 * 2
    WP: tl.constexpr = W + F // 2 * 2
    IMAGE: tl.constexpr = (H // 2) * (W // 2)
    r = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    row = tl.minimum(m, M - 1).to(tl.uint32)
    if index is not None:
        index += r * stride_index
    image = image_number(index, row // IMAGE)
    packed += r * stride_packed
    patch = packed + image * (HP * WP * CP) + patch_start(row % IMAGE, H, W, F) * CP
    filters += r * (4 * (O_MAIN + O_TAIL) * KP)
    acc, acc_tail = windows_by_filters(
        patch, filters, (F + 1) * (F + 1) * CP, KP, (F + 1) * CP, WP * CP,
        4 * O_MAIN, 4 * O_TAIL, BM, BK, VECTOR, PRECISION,
    )  # fmt: skip
    target = (r * M + m)[:, None] * O
    o = tl.arange(0, O_MAIN)
    value, position = pool(acc, bias + r * stride_bias, o, O, BM, O_MAIN)
    inside = (m < M)[:, None] & (o < O)[None, :]
    tl.store(y + target + o[None, :], value, mask=inside)
    tl.store(argmax + target + o[None, :], position, mask=inside)
    if O_TAIL > 0:
        o = O_MAIN + tl.arange(0, O_TAIL)
        value, position = pool(acc_tail, bias + r * stride_bias, o, O, BM, O_TAIL)
        inside = (m < M)[:, None] & (o < O)[None, :]
        tl.store(y + target + o[None, :], value, mask=inside)
        tl.store(argmax + target + o[None, :], position, mask=inside)


@triton.jit
def locate(
    m, M, index, CP: tl.constexpr, NP: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, F: tl.constexpr,
    BORDER: tl.constexpr, BM: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return the offsets of patches and gradients of BM pooled pixels from m, and which are valid.

    ALIGNED means that M is a multiple of BM, and that a block consists of whole rows of one image,
    or of whole consecutive images. Then the offsets are those of the first pixel plus constants,
    and a loop needs no divisions.
    """
    H2: tl.constexpr = H // 2
    W2: tl.constexpr = W // 2
    SIZE: tl.constexpr = (H + F // 2 * 2) * (W + F // 2 * 2) * CP
    row = tl.arange(0, BM)
    if ALIGNED:
        first = tl.minimum(m, M - BM).to(tl.uint32)
        row = row.to(tl.uint32)
        image = image_number(index, first // (H2 * W2))
        patch = (patch_start(row, H, W, F) + patch_start(first % (H2 * W2), H, W, F)) * CP
        pixel = pooled_pixel(row, H2, W2, BORDER) * NP + pooled_pixel(first, H2, W2, BORDER) * NP
        pixel -= (BORDER * (W2 + 2 * BORDER) + BORDER) * NP
        inside = tl.full((BM,), m, tl.int32) < M
    else:
        inside = m + row < M
        row = tl.minimum(m + row, M - 1).to(tl.uint32)
        image = image_number(index, row // (H2 * W2))
        patch = patch_start(row % (H2 * W2), H, W, F) * CP
        pixel = pooled_pixel(row, H2, W2, BORDER) * NP
    return patch + image * SIZE, pixel, inside


@triton.jit
def weight_gradient_kernel(
    packed, index, spread, partial, stride_packed, stride_index, M,
    O_MAIN: tl.constexpr, O_TAIL: tl.constexpr, CP: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, BORDER: tl.constexpr,
    STEPS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, ALIGNED: tl.constexpr,
    VECTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial sum of D[k, (o, p)] over STEPS·BM pooled pixels; partial sums have a fixed order."""
    H2: tl.constexpr = H // 2
    W2: tl.constexpr = W // 2
    K: tl.constexpr = (F + 1) * (F + 1) * CP
    N_MAIN: tl.constexpr = 4 * O_MAIN
    N_TAIL: tl.constexpr = 4 * O_TAIL
    NP: tl.constexpr = N_MAIN + N_TAIL
    split = tl.program_id(1)
    r = tl.program_id(2).to(tl.int64)
    packed += r * stride_packed
    if index is not None:
        index += r * stride_index
    spread += r * (M // (H2 * W2)) * ((H2 + 2 * BORDER) * (W2 + 2 * BORDER) * NP)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    offset = window_offset(k, (F + 1) * CP, (W + F // 2 * 2) * CP, VECTOR)
    n = tl.arange(0, N_MAIN)
    acc = tl.zeros((BK, N_MAIN), tl.float32)
    if N_TAIL > 0:
        n_tail = N_MAIN + tl.arange(0, N_TAIL)
        acc_tail = tl.zeros((BK, N_TAIL), tl.float32)
    for step in range(STEPS):
        m = (split * STEPS + step) * BM
        patch, pixel, inside = locate(m, M, index, CP, NP, H, W, F, BORDER, BM, ALIGNED)
        source = packed + patch[:, None] + offset[None, :]
        if K % BK > 0:
            a = tl.load(source, mask=(k < K)[None, :], other=0.0)
        else:
            a = tl.load(source)
        s = tl.load(spread + pixel[:, None] + n[None, :], mask=inside[:, None], other=0.0)
        a = tl.trans(a)
        acc = tl.dot(a, s, acc, input_precision=PRECISION)
        if N_TAIL > 0:
            s = tl.load(spread + pixel[:, None] + n_tail[None, :], mask=inside[:, None], other=0.0)
            acc_tail = tl.dot(a, s, acc_tail, input_precision=PRECISION)
    target = partial + ((split * tl.num_programs(2) + r) * K + k)[:, None] * NP
    tl.store(target + n[None, :], acc, mask=(k < K)[:, None])
    if N_TAIL > 0:
        tl.store(target + n_tail[None, :], acc_tail, mask=(k < K)[:, None])


@triton.jit
def fold_kernel(
    partial, sums, grad_weight, grad_bias, unscale,
    O: tl.constexpr, OP: tl.constexpr, OB: tl.constexpr,
    C: tl.constexpr, CP: tl.constexpr, F: tl.constexpr,
    SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, BIAS_SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grad_weight[r, o, c, y, x] = Σ_split Σ_p D[(y + p_y, x + p_x, c), (o, p)], in that order.

    One program handles one c and y, so that reads of the same line of D hit the cache. The last
    program handles the bias.
    """
    K: tl.constexpr = (F + 1) * (F + 1) * CP
    c = tl.program_id(0) // F
    dy = tl.program_id(0) % F
    r = tl.program_id(1).to(tl.int64)
    replicas = tl.num_programs(1)
    if c < C:
        t = tl.arange(0, BLOCK)
        o = t % O
        dx = t // O
        acc = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, SPLITS, AT_ONCE):
            for i in tl.static_range(4 * AT_ONCE):  # many loads in flight at once
                split = start + i // 4
                p = i % 4
                k = ((dy + p // 2) * (F + 1) + dx + p % 2) * CP + c
                source = partial + ((split * replicas + r) * K + k) * (4 * OP) + 4 * o + p
                inside = (dx < F) & (tl.full((BLOCK,), split, tl.int32) < SPLITS)
                acc += tl.load(source, mask=inside, other=0.0)
        target = ((r * O + o) * C + c) * (F * F) + dy * F + dx
        tl.store(grad_weight + target, acc * unscale, mask=dx < F)
    else:
        channel = tl.arange(0, OB)
        acc_bias = tl.zeros((OB,), tl.float32)
        for first in range(0, BIAS_SUMS, 256):
            i = first + tl.arange(0, 256)
            bias_sum = sums + (r * BIAS_SUMS + i)[:, None] * O + channel[None, :]
            mask = (i < BIAS_SUMS)[:, None] & (channel < O)[None, :]
            acc_bias += tl.sum(tl.load(bias_sum, mask=mask, other=0.0), axis=0)
        tl.store(grad_bias + r * O + channel, acc_bias, mask=channel < O)


@triton.jit
def input_gradient_kernel(
    filters, spread, grad_x, M, unscale,
    OP: tl.constexpr, C: tl.constexpr, C_MAIN: tl.constexpr, C_TAIL: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, REACH: tl.constexpr, KP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_x in the 2×2 blocks of BM pooled pixels of one replica."""
    H2: tl.constexpr = H // 2
    W2: tl.constexpr = W // 2
    WP: tl.constexpr = W2 + 2 * REACH
    SPAN: tl.constexpr = 2 * REACH + 1
    NP: tl.constexpr = 4 * OP
    r = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    row = tl.minimum(m, M - 1).to(tl.uint32)
    spread += r * (M // (H2 * W2)) * ((H2 + 2 * REACH) * WP * NP)
    window = spread + (pooled_pixel(row, H2, W2, REACH) - REACH * WP - REACH) * NP
    filters += r * (4 * (C_MAIN + C_TAIL) * KP)
    acc, acc_tail = windows_by_filters(
        window, filters, SPAN * SPAN * NP, KP, SPAN * NP, WP * NP,
        4 * C_MAIN, 4 * C_TAIL, BM, BK, VECTOR, PRECISION,
    )  # fmt: skip
    b = m // (H2 * W2)
    corner = r * M * (4 * C) + ((b * H + m // W2 % H2 * 2) * W + m % W2 * 2) * C
    n = tl.arange(0, 4 * C_MAIN)
    s = n // C_MAIN
    c = n % C_MAIN
    target = grad_x + corner[:, None] + ((s // 2 * W + s % 2) * C + c)[None, :]
    tl.store(target, acc * unscale, mask=(m < M)[:, None] & (c < C)[None, :])
    if C_TAIL > 0:
        n = tl.arange(0, 4 * C_TAIL)
        s = n // C_TAIL
        c = C_MAIN + n % C_TAIL
        target = grad_x + corner[:, None] + ((s // 2 * W + s % 2) * C + c)[None, :]
        tl.store(target, acc_tail * unscale, mask=(m < M)[:, None] & (c < C)[None, :])
