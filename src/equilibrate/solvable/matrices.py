"""Symmetric matrices of the solvable models: conversion to float64, checks, and sampling."""

from __future__ import annotations

import torch
from torch import Tensor

# Relative; wide enough for matrices that were computed in float32.
_ROUNDING = 1e-6


def positive_definite(name: str, value: Tensor) -> Tensor:
    """Return `value` as a symmetric positive definite float64 matrix.

    Args:
        name: Name of the argument, for error messages.
        value: The argument of the user.

    Raises:
        ValueError: If it is not a symmetric positive definite matrix, or the diagonal of one.
    """
    matrix = _symmetric(name, value)
    spectrum = torch.linalg.eigvalsh(matrix)
    if spectrum[0] <= len(matrix) * torch.finfo(torch.float64).eps * spectrum.abs().max():
        raise ValueError(
            f"{name} must be positive definite, got smallest eigenvalue {spectrum[0].item():.6g}; "
            "remove the directions without curvature"
        )
    return matrix


def covariance(name: str, value: Tensor, like: Tensor) -> Tensor:
    """Return `value` as a covariance matrix, which may be singular.

    Args:
        name: Name of the argument, for error messages.
        value: The argument of the user.
        like: A matrix of the right dimension and device.

    Raises:
        ValueError: If it is not a covariance matrix of this dimension, or the diagonal of one.
    """
    matrix = _symmetric(name, value).to(like.device)
    if matrix.shape != like.shape:
        raise ValueError(f"{name} must be of dimension {len(like)}, got {len(matrix)}")
    spectrum = torch.linalg.eigvalsh(matrix)
    if spectrum[0] < -_ROUNDING * spectrum.abs().max():
        raise ValueError(
            f"{name} must be a covariance, without negative eigenvalues, got "
            f"{spectrum[0].item():.6g}"
        )
    return matrix


def vector(name: str, value: Tensor | None, like: Tensor) -> Tensor:
    """Return `value` as a float64 vector, or the zero vector for None.

    Args:
        name: Name of the argument, for error messages.
        value: The argument of the user.
        like: A matrix of the right dimension and device.

    Raises:
        ValueError: If it is not a finite vector of this dimension.
    """
    if value is None:
        return torch.zeros_like(like[0])
    entries = torch.as_tensor(value).to(like)
    if entries.shape != like[0].shape:
        raise ValueError(f"{name} must have shape ({len(like)},), got {tuple(entries.shape)}")
    if not entries.isfinite().all():
        raise ValueError(f"{name} must be finite, got {entries.tolist()}")
    return entries


def product_trace(left: Tensor, right: Tensor) -> float:
    """Return Tr(left · right)."""
    return (left * right.T).sum().item()


def root(covariance: Tensor) -> Tensor:
    """Return B with BBᵀ = covariance. Unlike Cholesky's factor it exists for singular matrices."""
    values, basis = torch.linalg.eigh(covariance)
    return basis * values.clamp(min=0).sqrt()


def gaussian(shape: tuple[int, ...], root: Tensor, generator: torch.Generator) -> Tensor:
    """Return random Gaussian vectors, of shape (*shape, d), with covariance root·rootᵀ."""
    size = (*shape, len(root))
    draw = torch.randn(size, dtype=root.dtype, device=root.device, generator=generator)
    return draw @ root.T


def _symmetric(name: str, value: Tensor) -> Tensor:
    matrix = torch.as_tensor(value).to(torch.float64)
    if matrix.ndim == 1:
        matrix = matrix.diag()
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise ValueError(
            f"{name} must be a square matrix, or the vector of a diagonal matrix, got shape "
            f"{tuple(matrix.shape)}"
        )
    if not matrix.isfinite().all():
        raise ValueError(f"{name} must be finite, got {matrix.tolist()}")
    if (matrix - matrix.T).abs().max() > _ROUNDING * matrix.abs().max():
        raise ValueError(f"{name} must be symmetric, got {matrix.tolist()}; use (m + m.T) / 2")
    return (matrix + matrix.T) / 2
