"""Triton kernels of one training step, launched by `triton.py`."""

# pyright: reportMissingImports=false
# B is the number of examples in a block, C the number of classes in a block, N that of neurons.

import triton
import triton.language as tl


@triton.jit
def take_kernel(
    order, counts, inputs, targets, index, x, y, input_size, target_size,
    INPUT: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Copy one example: program (b, r) copies example order[counts[r], r, b].

    Without `x` only its index and target are written.
    """
    place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    epoch = tl.load(counts + tl.program_id(1)) * tl.num_programs(0) * tl.num_programs(1)
    example = tl.load(order + epoch + place).to(tl.int64)
    tl.store(index + place, example)
    k = tl.arange(0, TARGET)
    to = y + place * target_size + k
    tl.store(to, tl.load(targets + example * target_size + k, k < target_size), k < target_size)
    if x is not None:
        k = tl.arange(0, INPUT)
        source = inputs + example * input_size + k
        to = x + place.to(tl.int64) * input_size + k
        tl.store(to, tl.load(source, k < input_size), k < input_size)


@triton.jit
def add_bias_kernel(
    y, bias, rows, stride,
    COLUMNS: tl.constexpr, RELU: tl.constexpr, B: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add the bias in place and, with RELU, compute max(0, ·)."""
    r = tl.program_id(2).to(tl.int64)
    b = tl.program_id(0) * B + tl.arange(0, B)
    n = tl.program_id(1) * N + tl.arange(0, N)
    inside = (b < rows)[:, None] & (n < COLUMNS)[None, :]
    at = y + r * rows * COLUMNS + b[:, None] * COLUMNS + n[None, :]
    v = tl.load(at, inside) + tl.load(bias + r * stride + n, n < COLUMNS)[None, :]
    if RELU:
        v = tl.where(v <= 0, 0.0, v)  # a NaN stays a NaN, as in torch
    tl.store(at, v, inside)


@triton.jit
def bias_gradient_kernel(
    grad, y, out, rows, stride,
    COLUMNS: tl.constexpr, STEPS: tl.constexpr, B: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Sum the gradient over the examples; with `y`, first set it to zero in place where y ≤ 0."""
    r = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * N + tl.arange(0, N)
    total = tl.zeros((B, N), tl.float32)
    for step in range(STEPS):
        b = step * B + tl.arange(0, B)
        inside = (b < rows)[:, None] & (n < COLUMNS)[None, :]
        at = r * rows * COLUMNS + b[:, None] * COLUMNS + n[None, :]
        g = tl.load(grad + at, inside, other=0.0)
        if y is not None:
            g = tl.where(tl.load(y + at, inside, other=0.0) <= 0, 0.0, g)
            tl.store(grad + at, g, inside)
        total += g
    tl.store(out + r * stride + n, tl.sum(total, axis=0), n < COLUMNS)


@triton.jit
def cross_entropy_kernel(
    outputs, targets, bias, grad, losses, out, rows, classes, stride_bias, stride_out,
    STEPS: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One replica: mean of log Σ exp o − o_target, its gradient, and the gradient of the bias."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, C)
    loss = tl.zeros((B,), tl.float32)
    total = tl.zeros((B, C), tl.float32)
    for step in range(STEPS):
        b = step * B + tl.arange(0, B)
        inside = (b < rows)[:, None] & (c < classes)[None, :]
        at = (r * rows + b[:, None]) * classes + c[None, :]
        o = tl.load(outputs + at, inside, other=0.0)
        if bias is not None:
            o += tl.load(bias + r * stride_bias + c, c < classes, other=0.0)[None, :]
        o = tl.where((c < classes)[None, :], o, float("-inf"))
        # tl.max ignores NaN, but the sum below does not: a diverged replica has a NaN loss
        largest = tl.max(o, axis=1)
        e = tl.exp(o - largest[:, None])
        partition = tl.sum(e, axis=1)
        target = tl.load(targets + r * rows + b, b < rows, other=0)
        right = c[None, :] == target[:, None]
        chosen = tl.sum(tl.where(right, o, 0.0), axis=1)
        loss += tl.where(b < rows, largest + tl.log(partition) - chosen, 0.0)
        g = (e / partition[:, None] - tl.where(right, 1.0, 0.0)) / rows
        g = tl.where(inside, g, 0.0)
        tl.store(grad + at, g, inside)
        total += g
    tl.store(losses + r, tl.sum(loss, axis=0).to(tl.float64) / rows)
    if bias is not None:
        tl.store(out + r * stride_out + c, tl.sum(total, axis=0), c < classes)


@triton.jit
def update_kernel(
    parameters, gradient, first, second, third, powers, lr, sums,
    stride, weight_decay, a, b, c, epsilon, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block, θ′ = θ − ηu, and compute its part of the left side, u² and −v·g.

    SGD: `first`, if given, is the momentum buffer before the step, with a = μ and b = 1 − ν.
    Adam: `powers` are (β₁ᵗ, β₂ᵗ), `first` is the mean, `second` the square and `third`, if given,
    the largest square, with a = 1 − β₁, b = β₂ and c = 1 − β₂. The padding of rows stays zero.
    """
    r = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < stride
    at = r * stride + k
    theta = tl.load(parameters + at, inside, other=0.0)
    g = tl.load(gradient + at, inside, other=0.0) + weight_decay * theta
    work = tl.zeros((BLOCK,), tl.float32)
    if powers is None:
        direction = b * g
        if first is not None:
            before = tl.load(first + at, inside, other=0.0)
            work = before * g
            direction += a * before
            tl.store(first + at, direction, inside)
        left = theta * g
    else:
        mean = tl.load(first + at, inside, other=0.0)
        mean += a * (g - mean)
        square = b * tl.load(second + at, inside, other=0.0) + c * g * g
        tl.store(first + at, mean, inside)
        tl.store(second + at, square, inside)
        if third is not None:
            largest = tl.load(third + at, inside, other=0.0)
            square = tl.where((square > largest) | (square != square), square, largest)
            tl.store(third + at, square, inside)
        mean_bias = (1 - tl.load(powers + 2 * r)).to(tl.float32)
        square_bias = (1 - tl.load(powers + 2 * r + 1)).to(tl.float32)
        root = tl.sqrt(square) / tl.sqrt(square_bias) + epsilon
        direction = mean / mean_bias / root
        left = theta * direction
    tl.store(parameters + at, theta - tl.load(lr + r).to(tl.float32) * direction, inside)
    blocks = tl.num_programs(0)
    part = sums + r * 3 * blocks + tl.program_id(0)
    tl.store(part, tl.sum(left, axis=0).to(tl.float64))
    tl.store(part + blocks, tl.sum(direction * direction, axis=0).to(tl.float64))
    tl.store(part + 2 * blocks, tl.sum(work, axis=0).to(tl.float64))


@triton.jit
def row_kernel(
    sums, losses, lr, rows, counts, blocks, COEFFICIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """Add up the parts of one replica and write its row: left, right, loss, v·g."""
    r = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    count = tl.load(counts + r)
    part = sums + r * 3 * blocks + k
    left = tl.sum(tl.load(part, k < blocks, other=0.0), axis=0)
    square = tl.sum(tl.load(part + blocks, k < blocks, other=0.0), axis=0)
    work = tl.sum(tl.load(part + 2 * blocks, k < blocks, other=0.0), axis=0)
    row = rows + (count * tl.num_programs(0) + r) * 4
    tl.store(row, left)
    tl.store(row + 1, tl.load(lr + r) * COEFFICIENT * square)
    tl.store(row + 2, tl.load(losses + r))
    tl.store(row + 3, 0.0 - work)  # 0, not −0, without a velocity
    tl.store(counts + r, count + 1)
