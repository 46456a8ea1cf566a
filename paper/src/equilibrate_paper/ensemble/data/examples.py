"""Inputs on the device: packed for the first layer, or as indices into a data set."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibrate_paper.ensemble.precision import ConvPrecision


@dataclass(frozen=True, eq=False)
class PackedImages:
    """A data set of images, and a copy in the layout that the Triton convolution reads.

    Create it with `equilibrate_paper.ensemble._ops.conv.pack_images`.
    """

    images: Tensor
    """The images, (N, C, H, W)."""
    packed: Tensor
    """The copy: channels last, with a border of zeros."""
    width: int
    """Width of the filters that the border was made for."""
    precision: ConvPrecision
    """Precision that the copy is stored in."""


PreparedInputs = Tensor | PackedImages
"""The inputs of a data set, (N, …), in the form that the first layer reads."""


@dataclass(frozen=True, eq=False)
class IndexedInputs:
    """Inputs of each replica, as indices into a shared data set: replica r sees data[index[r]]."""

    data: PreparedInputs
    """The data set, (N, …)."""
    index: Tensor
    """Indices of the examples, (R, B)."""

    def gather(self) -> Tensor:
        """Copy the examples.

        Returns:
            The inputs of each replica, (R, B, …).
        """
        data = self.data.images if isinstance(self.data, PackedImages) else self.data
        return data.index_select(0, self.index.flatten()).unflatten(0, self.index.shape)


class PreparedInputsCache:
    """Prepare data sets for the first layer, and keep the last few prepared ones.

    A data set is recognized by its tensor object and by torch's version counter, so a tensor that
    was modified in place is prepared again. Inference tensors have no version counter and are
    prepared each time.

    Args:
        prepare: Makes the prepared inputs from a tensor on `device`.
        device: The device on which the inputs are needed.

    Example:
        >>> cache = PreparedInputsCache(lambda inputs: 2 * inputs, torch.device("cpu"))
        >>> inputs = torch.ones(2, 3)
        >>> cache.get(inputs) is cache.get(inputs)
        True
    """

    def __init__(self, prepare: Callable[[Tensor], PreparedInputs], device: torch.device) -> None:
        self._prepare, self._device = prepare, device
        self._kept: deque[tuple[Tensor, int, PreparedInputs]] = deque(maxlen=3)

    def get(self, inputs: Tensor) -> PreparedInputs:
        """Prepare `inputs`, or return them as prepared before.

        Args:
            inputs: The inputs of a data set, (N, …), on any device.

        Returns:
            The prepared inputs on the device of the cache.
        """
        on_device = inputs.to(self._device)
        for known, version, prepared in self._kept:
            if known is on_device and version == on_device._version:
                return prepared
        prepared = self._prepare(on_device)
        # A tensor that was just copied to the device has no other owner, so nobody can pass it
        # again; and inputs that need no preparation are not worth keeping.
        if on_device is inputs and prepared is not on_device and not on_device.is_inference():
            self._kept.append((on_device, on_device._version, prepared))
        return prepared
