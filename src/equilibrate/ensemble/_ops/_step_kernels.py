"""The Triton kernels behind `fused.py`."""

# pyright: reportMissingImports=false
# B is the number of examples and C of classes, in capitals for a block of them.

import triton
import triton.language as tl


@triton.jit
def take_kernel(
    order, counts, images, labels, index, x, y, row, label,
    ROW: tl.constexpr, LABEL: tl.constexpr,
):  # fmt: skip
    """Copy one example: program (b, r) takes number order[counts[r], r, b].

    Where there is no `x` the images stay where they are.
    """
    place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    epoch = tl.load(counts + tl.program_id(1)) * tl.num_programs(0) * tl.num_programs(1)
    example = tl.load(order + epoch + place).to(tl.int64)
    tl.store(index + place, example)
    k = tl.arange(0, LABEL)
    tl.store(y + place * label + k, tl.load(labels + example * label + k, k < label), k < label)
    if x is not None:
        k = tl.arange(0, ROW)
        source = images + example * row + k
        tl.store(x + place.to(tl.int64) * row + k, tl.load(source, k < row), k < row)


@triton.jit
def add_bias_kernel(
    y, bias, rows, stride,
    COLUMNS: tl.constexpr, RELU: tl.constexpr, B: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add the bias in place and, with RELU, take max(0, ·)."""
    r = tl.program_id(2).to(tl.int64)
    b = tl.program_id(0) * B + tl.arange(0, B)
    n = tl.program_id(1) * N + tl.arange(0, N)
    inside = (b < rows)[:, None] & (n < COLUMNS)[None, :]
    at = y + r * rows * COLUMNS + b[:, None] * COLUMNS + n[None, :]
    v = tl.load(at, inside) + tl.load(bias + r * stride + n, n < COLUMNS)[None, :]
    if RELU:
        v = tl.where(v <= 0, 0.0, v)  # as torch's, it hands a NaN on
    tl.store(at, v, inside)


@triton.jit
def bias_gradient_kernel(
    grad, y, into, rows, stride,
    COLUMNS: tl.constexpr, STEPS: tl.constexpr, B: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Mask the gradient in place where there is a `y`, and sum it over the examples."""
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
    tl.store(into + r * stride + n, tl.sum(total, axis=0), n < COLUMNS)


@triton.jit
def cross_entropy_kernel(
    outputs, labels, bias, grad, losses, into, rows, classes, stride_bias, stride_into,
    STEPS: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One replica: mean of log Σ exp o − o_label, its gradient, and the gradient of the bias."""
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
        # tl.max passes over NaN: a diverged replica is to stay one
        largest = tl.max(o, axis=1)
        e = tl.exp(o - largest[:, None])
        partition = tl.sum(e, axis=1)
        label = tl.load(labels + r * rows + b, b < rows, other=0)
        right = c[None, :] == label[:, None]
        chosen = tl.sum(tl.where(right, o, 0.0), axis=1)
        loss += tl.where(b < rows, largest + tl.log(partition) - chosen, 0.0)
        g = (e / partition[:, None] - tl.where(right, 1.0, 0.0)) / rows
        g = tl.where(inside, g, 0.0)
        tl.store(grad + at, g, inside)
        total += g
    tl.store(losses + r, tl.sum(loss, axis=0).to(tl.float64) / rows)
    if bias is not None:
        tl.store(into + r * stride_into + c, tl.sum(total, axis=0), c < classes)


@triton.jit
def update_kernel(
    parameters, gradient, first, second, third, powers, lr, sums,
    stride, weight_decay, a, b, c, epsilon, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of θ′ = θ − ηu; its shares of the left side, u² and −v·g.

    SGD: `first`, where there is one, is the pull before the step, with a = μ and b = 1 − ν. Adam
    has `powers` (β₁ᵗ, β₂ᵗ), mean and square, perhaps the largest square, with a = 1 − β₁, b = β₂
    and c = 1 − β₂. What lies between two rows are zeros, and stays so.
    """
    r = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < stride
    at = r * stride + k
    theta = tl.load(parameters + at, inside, other=0.0)
    g = tl.load(gradient + at, inside, other=0.0) + weight_decay * theta
    work = tl.zeros((BLOCK,), tl.float32)
    if powers is None:
        pull = b * g
        if first is not None:
            before = tl.load(first + at, inside, other=0.0)
            work = before * g
            pull += a * before
            tl.store(first + at, pull, inside)
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
        pull = mean / mean_bias / root
        left = theta * pull
    tl.store(parameters + at, theta - tl.load(lr + r).to(tl.float32) * pull, inside)
    blocks = tl.num_programs(0)
    share = sums + r * 3 * blocks + tl.program_id(0)
    tl.store(share, tl.sum(left, axis=0).to(tl.float64))
    tl.store(share + blocks, tl.sum(pull * pull, axis=0).to(tl.float64))
    tl.store(share + 2 * blocks, tl.sum(work, axis=0).to(tl.float64))


@triton.jit
def row_kernel(
    sums, losses, lr, rows, counts, blocks, COEFFICIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the shares of one replica up and write its row: left, right, loss, v·g."""
    r = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    count = tl.load(counts + r)
    share = sums + r * 3 * blocks + k
    left = tl.sum(tl.load(share, k < blocks, other=0.0), axis=0)
    square = tl.sum(tl.load(share + blocks, k < blocks, other=0.0), axis=0)
    work = tl.sum(tl.load(share + 2 * blocks, k < blocks, other=0.0), axis=0)
    row = rows + (count * tl.num_programs(0) + r) * 4
    tl.store(row, left)
    tl.store(row + 1, tl.load(lr + r) * COEFFICIENT * square)
    tl.store(row + 2, tl.load(losses + r))
    tl.store(row + 3, 0.0 - work)  # not −0 where there is none
    tl.store(counts + r, count + 1)
