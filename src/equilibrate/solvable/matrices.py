"""Symmetric matrices as the solvable models take them: checked, in float64, and sampled from."""

from __future__ import annotations

import torch
from torch import Tensor

# Relative; wide enough for matrices that were computed in float32.
_ROUNDING = 1e-6


def positive_definite(name: str, value: Tensor) -> Tensor:
    """`value` as a symmetric positive definite float64 matrix; a vector stands for its diagonal."""
    matrix = _symmetric(name, value)
    spectrum = torch.linalg.eigvalsh(matrix)
    if spectrum[0] <= len(matrix) * torch.finfo(torch.float64).eps * spectrum.abs().max():
        raise ValueError(
            f"{name} must be positive definite, got smallest eigenvalue {spectrum[0].item():.6g}; "
            "leave flat directions out"
        )
    return matrix


def covariance(name: str, value: Tensor, like: Tensor) -> Tensor:
    """`value` as a covariance, which may be singular, of the dimension of the matrix `like`."""
    matrix = _symmetric(name, value).to(like.device)
    if matrix.shape != like.shape:
        raise ValueError(f"{name} must be of dimension {len(like)}, got {len(matrix)}")
    spectrum = torch.linalg.eigvalsh(matrix)
    if spectrum[0] < -_ROUNDING * spectrum.abs().max():
        raise ValueError(
            f"{name} must be a covariance, with no negative eigenvalue, got "
            f"{spectrum[0].item():.6g}"
        )
    return matrix


def vector(name: str, value: Tensor | None, like: Tensor) -> Tensor:
    """`value` as a float64 vector of the dimension of the matrix `like`; None stands for zero."""
    if value is None:
        return torch.zeros_like(like[0])
    entries = torch.as_tensor(value).to(like)
    if entries.shape != like[0].shape:
        raise ValueError(f"{name} must have shape ({len(like)},), got {tuple(entries.shape)}")
    if not entries.isfinite().all():
        raise ValueError(f"{name} must be finite, got {entries.tolist()}")
    return entries


def product_trace(left: Tensor, right: Tensor) -> float:
    """Tr(left · right)."""
    return (left * right.T).sum().item()


def root(covariance: Tensor) -> Tensor:
    """B with BBᵀ = covariance; unlike Cholesky's it exists for singular ones too."""
    values, basis = torch.linalg.eigh(covariance)
    return basis * values.clamp(min=0).sqrt()


def gaussian(shape: tuple[int, ...], root: Tensor, generator: torch.Generator) -> Tensor:
    """An array of `shape` of Gaussian vectors with zero mean and covariance root·rootᵀ."""
    size = (*shape, len(root))
    draw = torch.randn(size, dtype=root.dtype, device=root.device, generator=generator)
    return draw @ root.T


def _symmetric(name: str, value: Tensor) -> Tensor:
    matrix = torch.as_tensor(value).to(torch.float64)
    if matrix.ndim == 1:
        matrix = matrix.diag()
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise ValueError(
            f"{name} must be a square matrix or the vector of its diagonal, got shape "
            f"{tuple(matrix.shape)}"
        )
    if not matrix.isfinite().all():
        raise ValueError(f"{name} must be finite, got {matrix.tolist()}")
    if (matrix - matrix.T).abs().max() > _ROUNDING * matrix.abs().max():
        raise ValueError(f"{name} must be symmetric, got {matrix.tolist()}; use (m + m.T) / 2")
    return (matrix + matrix.T) / 2
