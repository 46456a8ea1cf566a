"""Inputs on the device: packed for the first layer, or as indices into a data set."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedImages:
    """A data set of images, and a copy in the layout that the Triton convolution reads.

    Create it with `equilibrate_paper.ensemble._ops.conv.pack_images`.
    """

    images: Tensor
    """The images, (N, C, H, W)."""
    packed: Tensor
    """The copy: channels last, with a border of zeros."""


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
