"""Sizes of one layer, and the layouts that the kernels use."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """The sizes of one layer, and block sizes and shapes derived from them."""

    replicas: int
    """R."""
    batch: int
    """Images of each replica, B."""
    channels: int
    """Channels of an image, C."""
    height: int
    """Height of an image, H."""
    width: int
    """Width of an image, W."""
    outputs: int
    """Filters, O."""
    filter: int
    """Width of a filter, F."""

    @classmethod
    def of(cls, weight: Tensor, y: Tensor) -> "Geometry":
        """Return the sizes, given the weight and the result (or its gradient)."""
        replicas, outputs, channels, _, width = weight.shape
        return cls(replicas, y.shape[1], channels, 2 * y.shape[3], 2 * y.shape[4], outputs, width)

    @classmethod
    def from_packed(cls, weight: Tensor, packed: Tensor, index: Tensor | None) -> "Geometry":
        """Return the sizes, given the weight and packed images."""
        replicas, outputs, channels, _, width = weight.shape
        batch = packed.shape[-4] if index is None else index.shape[1]
        image_height, image_width = (size - width // 2 * 2 for size in packed.shape[-3:-1])
        return cls(replicas, batch, channels, image_height, image_width, outputs, width)

    @property
    def padded_channels(self) -> int:
        """Channels of the packed image."""
        return padded(self.channels)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of the images in memory, channels last."""
        return (self.replicas, self.batch, self.height, self.width, self.channels)

    @property
    def output_blocks(self) -> tuple[int, int]:
        """Main block and tail of the outputs; a matrix product sums over at least 16."""
        return main_and_tail(self.outputs, least=16)

    @property
    def channel_blocks(self) -> tuple[int, int]:
        """Main block and tail of the channels."""
        return main_and_tail(self.channels)

    @property
    def scale(self) -> float:
        """Factor that brings gradients of a mean over the batch into the range of half precision.

        256 for the gradient of a single image, times the batch size rounded down to a power of two.
        """
        return 256.0 * 2.0 ** (self.batch.bit_length() - 1)

    @property
    def patch(self) -> int:
        """Entries of the patch that one pooled pixel depends on."""
        return (self.filter + 1) ** 2 * self.padded_channels

    @property
    def pooled(self) -> int:
        """Pooled pixels of a replica."""
        return self.batch * (self.height // 2) * (self.width // 2)

    @property
    def pooled_shape(self) -> tuple[int, ...]:
        """Shape of the result in memory, channels last."""
        return (self.replicas, self.batch, self.height // 2, self.width // 2, self.outputs)

    @property
    def reach(self) -> int:
        """Distance in pooled pixels over which an input pixel has an effect."""
        return (self.filter // 2 + 1) // 2


def packed_shape(leading: tuple[int, ...], sizes: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Return the shape of packed images, with the border that the filters need.

    Args:
        leading: Leading axes, such as (N,) or (R, B).
        sizes: Size of an image, (C, H, W).
        width: Width of the filters.

    Example:
        >>> packed_shape((7,), (3, 32, 32), 5)
        (7, 36, 36, 4)
    """
    channels, *image = sizes
    return (*leading, *(size + width // 2 * 2 for size in image), padded(channels))


def padded(channels: int) -> int:
    """Return the next multiple of 4: a pair of pixels then fills whole 16-byte loads.

    Example:
        >>> padded(3), padded(20)
        (4, 20)
    """
    return blocks(channels, 4) * 4


def blocks(count: int, size: int) -> int:
    """Return the number of blocks of `size` that cover `count`."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def main_and_tail(count: int, least: int = 4) -> tuple[int, int]:
    """Return two powers of two, or one and 0, whose sum covers `count` with little waste.

    The first is at least `least`.

    Example:
        >>> main_and_tail(16), main_and_tail(20), main_and_tail(3), main_and_tail(30)
        ((16, 0), (16, 4), (4, 0), (32, 0))
    """
    main = max(least, 1 << (count.bit_length() - 1))
    rest = max(0, count - main)
    if rest == 0:
        return main, 0
    tail = max(4, power_of_two(rest))
    return (main, tail) if tail < main else (2 * main, 0)
