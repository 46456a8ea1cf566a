"""Triton kernels of the three matrix products behind `conv_relu_pool`.

A pooled pixel sees an (F+1)² patch of the input, and its four candidates are four shifted F²
filters in that patch. So the convolution is one product, patch (K = (F+1)²·C) times filters
(N = 4·O), with the maximum over the four taken in registers: each patch is read once for all four.
At F = 5 the filter matrix is 25/36 full; the tensor cores have the slack, the memory has not.

    forward          Y[m, (o, p)] = Σ_k patch[m, k] filters[(o, p), k]; then bias, max over p, ReLU
    weight gradient  D[k, (p, o)] = Σ_m patch[m, k] S[m, (p, o)];       then p is folded in
    input gradient   X[m, (s, c)] = Σ_j S[m + j, (p, o)] filters'[(s, c), (j, p, o)]

Here m runs over pooled pixels, p over the four pool positions, s over the four pixels of a 2×2
block of the input, j over the neighbouring pooled pixels, and S[m, (p, o)] is the gradient of
pooled pixel m if its maximum sat at p, else 0.
Block shapes are powers of two; so a count such as O = 20 is covered by a main block of 16 and a
tail of 4 (names ending in `_TAIL`; 0 for none), not by 32.
"""

# ruff: noqa: E741, SIM108
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false
# O is the number of filters, as in the shape (R, O, C, F, F). Branches on constants are decided
# while Triton compiles, and written out.

import triton
import triton.language as tl


@triton.jit
def patch_offset(k, CP: tl.constexpr, WP: tl.constexpr, F: tl.constexpr):
    """Where entry k = (y, x, c) of a patch lies: a row of the patch is contiguous in `packed`."""
    SEGMENT: tl.constexpr = (F + 1) * CP
    offset = k + k // SEGMENT * (WP * CP - SEGMENT)
    return tl.max_contiguous(tl.multiple_of(offset, 4), 4)  # CP is a multiple of 4


@triton.jit
def patch_start(row, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr):
    """Which pixel of the packed images is the first of the patch under pooled pixel `row`."""
    HP: tl.constexpr = H + F // 2 * 2
    WP: tl.constexpr = W + F // 2 * 2
    H2: tl.constexpr = H // 2
    W2: tl.constexpr = W // 2
    return (row // (H2 * W2) * HP + row // W2 % H2 * 2) * WP + row % W2 * 2


@triton.jit
def pool(acc, bias, o, O: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr):
    """Bias, maximum over the four positions (the first of equals) and ReLU; 4 marks a dead one."""
    b = tl.load(bias + o, mask=o < O, other=0.0)
    v = tl.reshape(acc, (BM, BO, 4)) + b[None, :, None]
    best, position = tl.max(v, axis=2, return_indices=True, return_indices_tie_break_left=True)
    dead = best <= 0  # and not best > 0: a NaN must stay one
    return tl.where(dead, 0.0, best), tl.where(dead, 4, position).to(tl.uint8)


@triton.jit
def forward_kernel(
    packed, filters, bias, y, argmax, stride_bias, M,
    O: tl.constexpr, O_MAIN: tl.constexpr, O_TAIL: tl.constexpr, CP: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, KP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[r, m, o] and argmax[r, m, o] for BM pooled pixels of one replica."""
    HP: tl.constexpr = H + F // 2 * 2
    WP: tl.constexpr = W + F // 2 * 2
    H2: tl.constexpr = H // 2
    W2: tl.constexpr = W // 2
    K: tl.constexpr = (F + 1) * (F + 1) * CP
    N_MAIN: tl.constexpr = 4 * O_MAIN
    N_TAIL: tl.constexpr = 4 * O_TAIL
    r = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    row = tl.minimum(m, M - 1).to(tl.uint32)
    patch = packed + r * (M // (H2 * W2) * (HP * WP * CP)) + patch_start(row, H, W, F) * CP
    filters += r * ((N_MAIN + N_TAIL) * KP)
    n = tl.arange(0, N_MAIN)
    acc = tl.zeros((BM, N_MAIN), tl.float32)
    if O_TAIL > 0:
        n_tail = N_MAIN + tl.arange(0, N_TAIL)
        acc_tail = tl.zeros((BM, N_TAIL), tl.float32)
    for k0 in range(0, KP, BK):
        k = k0 + tl.arange(0, BK)
        source = patch[:, None] + patch_offset(k, CP, WP, F)[None, :]
        if KP > K:
            a = tl.load(source, mask=(k < K)[None, :], other=0.0)
        else:
            a = tl.load(source)
        w = tl.load(filters + n[None, :] * KP + k[:, None])
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
        if O_TAIL > 0:
            w_tail = tl.load(filters + n_tail[None, :] * KP + k[:, None])
            acc_tail = tl.dot(a, w_tail, acc_tail, input_precision=PRECISION)
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
def where_tagged(t, p):
    """The tagged gradients t whose maximum sat at position p, else 0; the tag is taken off."""
    bits = t.to(tl.int32, bitcast=True) ^ p
    return tl.where((bits & 3) == 0, bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def pooled_pixel(row, H2: tl.constexpr, W2: tl.constexpr, BORDER: tl.constexpr):
    """Which pixel of the bordered pooled images is pooled pixel `row`."""
    HP: tl.constexpr = H2 + 2 * BORDER
    WP: tl.constexpr = W2 + 2 * BORDER
    return (row // (H2 * W2) * HP + row // W2 % H2 + BORDER) * WP + row % W2 + BORDER


@triton.jit
def locate(
    m, M, CP: tl.constexpr, OP: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr,
    BORDER: tl.constexpr, BM: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Where patches and gradients of the BM pooled pixels from m on begin, and which of them exist.

    ALIGNED promises that M is a multiple of BM and that a block ends no row or image half way, or
    is made of whole images: then its pixels lie where its first does, plus constants, and a loop
    needs no divisions.
    """
    H2: tl.constexpr = H // 2
    W2: tl.constexpr = W // 2
    row = tl.arange(0, BM)
    if ALIGNED:
        first = tl.minimum(m, M - BM).to(tl.uint32)
        row = row.to(tl.uint32)
        patch = patch_start(row, H, W, F) * CP + patch_start(first, H, W, F) * CP
        pixel = pooled_pixel(row, H2, W2, BORDER) * OP + pooled_pixel(first, H2, W2, BORDER) * OP
        pixel -= (BORDER * (W2 + 2 * BORDER) + BORDER) * OP
        inside = tl.full((BM,), m, tl.int32) < M
    else:
        inside = m + row < M
        row = tl.minimum(m + row, M - 1).to(tl.uint32)
        patch = patch_start(row, H, W, F) * CP
        pixel = pooled_pixel(row, H2, W2, BORDER) * OP
    return patch, pixel, inside


@triton.jit
def load_patches(packed, patch, offset, k, K: tl.constexpr, MASKED: tl.constexpr):
    """Entries k of patches that begin at `patch`."""
    source = packed + patch[:, None] + offset[None, :]
    if MASKED:
        a = tl.load(source, mask=(k < K)[None, :], other=0.0)
    else:
        a = tl.load(source)
    return a


@triton.jit
def weight_gradient_kernel(
    packed, tagged, partial, M,
    O_MAIN: tl.constexpr, O_TAIL: tl.constexpr, CP: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, BORDER: tl.constexpr,
    STEPS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """D[k, (p, o)] over STEPS·BM pooled pixels: one summand, so that the sum has a fixed order."""
    H2: tl.constexpr = H // 2
    W2: tl.constexpr = W // 2
    OP: tl.constexpr = O_MAIN + O_TAIL
    K: tl.constexpr = (F + 1) * (F + 1) * CP
    N_MAIN: tl.constexpr = 4 * O_MAIN
    N_TAIL: tl.constexpr = 4 * O_TAIL
    split = tl.program_id(1)
    r = tl.program_id(2).to(tl.int64)
    images = M // (H2 * W2)
    packed += r * images * ((H + F // 2 * 2) * (W + F // 2 * 2) * CP)
    tagged += r * images * ((H2 + 2 * BORDER) * (W2 + 2 * BORDER) * OP)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    offset = patch_offset(k, CP, W + F // 2 * 2, F)
    n = tl.arange(0, N_MAIN)
    o = n % O_MAIN
    acc = tl.zeros((BK, N_MAIN), tl.float32)
    if O_TAIL > 0:
        n_tail = tl.arange(0, N_TAIL)
        o_tail = O_MAIN + n_tail % O_TAIL
        acc_tail = tl.zeros((BK, N_TAIL), tl.float32)
    m = split * STEPS * BM
    patch, pixel, inside = locate(m, M, CP, OP, H, W, F, BORDER, BM, ALIGNED)
    a = load_patches(packed, patch, offset, k, K, K % BK > 0)
    t = tl.load(tagged + pixel[:, None] + o[None, :], mask=inside[:, None], other=0.0)
    if O_TAIL > 0:
        t_tail = tl.load(tagged + pixel[:, None] + o_tail[None, :], mask=inside[:, None], other=0.0)
    for _ in range(STEPS):
        # Load for the next round before this one's products, to hide the memory's latency.
        m += BM
        patch, pixel, inside = locate(m, M, CP, OP, H, W, F, BORDER, BM, ALIGNED)
        a_next = load_patches(packed, patch, offset, k, K, K % BK > 0)
        t_next = tl.load(tagged + pixel[:, None] + o[None, :], mask=inside[:, None], other=0.0)
        a = tl.trans(a)
        s = where_tagged(t, (n // O_MAIN)[None, :])
        acc = tl.dot(a, s, acc, input_precision=PRECISION)
        if O_TAIL > 0:
            s = where_tagged(t_tail, (n_tail // O_TAIL)[None, :])
            acc_tail = tl.dot(a, s, acc_tail, input_precision=PRECISION)
            t_tail = tl.load(
                tagged + pixel[:, None] + o_tail[None, :], mask=inside[:, None], other=0.0
            )
        a = a_next
        t = t_next
    target = partial + ((split * tl.num_programs(2) + r) * K + k)[:, None] * (4 * OP)
    tl.store(target + n[None, :], acc, mask=(k < K)[:, None])
    if O_TAIL > 0:
        tl.store(target + N_MAIN + n_tail[None, :], acc_tail, mask=(k < K)[:, None])


@triton.jit
def fold_kernel(
    partial, sums, grad_weight, grad_bias,
    O: tl.constexpr, O_MAIN: tl.constexpr, O_TAIL: tl.constexpr, OB: tl.constexpr,
    C: tl.constexpr, CP: tl.constexpr, F: tl.constexpr,
    SPLITS: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grad_weight[r, o, c, y, x] = Σ_split Σ_p D[(y + p_y, x + p_x, c), (p, o)], in that order."""
    OP: tl.constexpr = O_MAIN + O_TAIL
    K: tl.constexpr = (F + 1) * (F + 1) * CP
    r = tl.program_id(1).to(tl.int64)
    replicas = tl.num_programs(1)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = t % O
    c = t // O % C
    dx = t // (O * C) % F
    dy = t // (O * C * F)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SPLITS, 4):
        for i in tl.static_range(16):  # many loads under way at once
            split = start + i // 4
            p = i % 4
            k = ((dy + p // 2) * (F + 1) + dx + p % 2) * CP + c
            n = tl.where(o < O_MAIN, p * O_MAIN + o, 4 * O_MAIN + p * O_TAIL + o - O_MAIN)
            source = partial + ((split * replicas + r) * K + k) * (4 * OP) + n
            inside = (dy < F) & (tl.full((BLOCK,), split, tl.int32) < SPLITS)
            acc += tl.load(source, mask=inside, other=0.0)
    target = ((r * O + o) * C + c) * (F * F) + dy * F + dx
    tl.store(grad_weight + target, acc, mask=dy < F)
    if tl.program_id(0) == 0:
        channel = tl.arange(0, OB)
        acc_bias = tl.zeros((OB,), tl.float32)
        for first in range(0, SHARES, 256):
            i = first + tl.arange(0, 256)
            share = sums + (r * SHARES + i)[:, None] * O + channel[None, :]
            mask = (i < SHARES)[:, None] & (channel < O)[None, :]
            acc_bias += tl.sum(tl.load(share, mask=mask, other=0.0), axis=0)
        tl.store(grad_bias + r * O + channel, acc_bias, mask=channel < O)


@triton.jit
def input_gradient_kernel(
    filters, tagged, grad_x, M,
    O_MAIN: tl.constexpr, O_TAIL: tl.constexpr,
    C: tl.constexpr, C_MAIN: tl.constexpr, C_TAIL: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, REACH: tl.constexpr,
    BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_x on the 2×2 blocks under BM pooled pixels of one replica."""
    H2: tl.constexpr = H // 2
    W2: tl.constexpr = W // 2
    SPAN: tl.constexpr = 2 * REACH + 1
    OP: tl.constexpr = O_MAIN + O_TAIL
    K_MAIN: tl.constexpr = 4 * O_MAIN
    K_TAIL: tl.constexpr = 4 * O_TAIL
    K: tl.constexpr = SPAN * SPAN * 4 * OP
    N_MAIN: tl.constexpr = 4 * C_MAIN
    N_TAIL: tl.constexpr = 4 * C_TAIL
    r = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    row = tl.minimum(m, M - 1).to(tl.uint32)
    tagged += r * (M // (H2 * W2)) * ((H2 + 2 * REACH) * (W2 + 2 * REACH) * OP)
    pixel = tagged + (pooled_pixel(row, H2, W2, REACH) - REACH * (W2 + 2 * REACH) - REACH) * OP
    filters += r * (4 * (C_MAIN + C_TAIL) * K)
    n = tl.arange(0, N_MAIN)
    acc = tl.zeros((BM, N_MAIN), tl.float32)
    o = tl.arange(0, O_MAIN)
    columns = filters + n[None, :] * K + o[:, None]
    t = tl.load(pixel[:, None] + o[None, :])
    if O_TAIL > 0:
        k_tail = tl.arange(0, K_TAIL)
        gradients_tail = pixel[:, None] + (O_MAIN + k_tail % O_TAIL)[None, :]
        columns_tail = filters + n[None, :] * K + (K_MAIN + k_tail)[:, None]
        t_tail = tl.load(gradients_tail)
    if C_TAIL > 0:
        n_tail = N_MAIN + tl.arange(0, N_TAIL)
        acc_tail = tl.zeros((BM, N_TAIL), tl.float32)
    for j in range(SPAN * SPAN):
        # Load for the next round before this one's products, to hide the memory's latency.
        after = tl.minimum(j + 1, SPAN * SPAN - 1)
        step = (after // SPAN * (W2 + 2 * REACH) + after % SPAN) * OP
        t_next = tl.load(pixel[:, None] + o[None, :] + step)
        for p in tl.static_range(4):
            s = where_tagged(t, p)
            w = tl.load(columns + j * (4 * OP) + p * O_MAIN)
            acc = tl.dot(s, w, acc, input_precision=PRECISION)
            if C_TAIL > 0:
                rest = filters + n_tail[None, :] * K + j * (4 * OP) + p * O_MAIN
                acc_tail = tl.dot(
                    s, tl.load(rest + o[:, None]), acc_tail, input_precision=PRECISION
                )
        if O_TAIL > 0:
            s = where_tagged(t_tail, (k_tail // O_TAIL)[None, :])
            acc = tl.dot(s, tl.load(columns_tail + j * (4 * OP)), acc, input_precision=PRECISION)
            if C_TAIL > 0:
                rest = filters + n_tail[None, :] * K + j * (4 * OP) + K_MAIN
                w = tl.load(rest + k_tail[:, None])
                acc_tail = tl.dot(s, w, acc_tail, input_precision=PRECISION)
            t_tail = tl.load(gradients_tail + step)
        t = t_next
    b = m // (H2 * W2)
    corner = r * M * (4 * C) + ((b * H + m // W2 % H2 * 2) * W + m % W2 * 2) * C
    s = n // C_MAIN
    c = n % C_MAIN
    target = grad_x + corner[:, None] + ((s // 2 * W + s % 2) * C + c)[None, :]
    tl.store(target, acc, mask=(m < M)[:, None] & (c < C)[None, :])
    if C_TAIL > 0:
        n = tl.arange(0, N_TAIL)
        s = n // C_TAIL
        c = C_MAIN + n % C_TAIL
        target = grad_x + corner[:, None] + ((s // 2 * W + s % 2) * C + c)[None, :]
        tl.store(target, acc_tail, mask=(m < M)[:, None] & (c < C)[None, :])
