"""Sizes of one layer, and how the kernels lay them out."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """The sizes of one layer and what follows from them."""

    replicas: int
    batch: int
    channels: int
    height: int
    width: int
    outputs: int
    filter: int

    @classmethod
    def of(cls, weight: Tensor, y: Tensor) -> "Geometry":
        """Read the sizes off the weight and the result (or its gradient)."""
        replicas, outputs, channels, _, width = weight.shape
        return cls(replicas, y.shape[1], channels, 2 * y.shape[3], 2 * y.shape[4], outputs, width)

    @classmethod
    def before(cls, weight: Tensor, x: Tensor, index: Tensor | None) -> "Geometry":
        """Read the sizes off weight and images."""
        replicas, outputs, channels, _, width = weight.shape
        batch = x.shape[1] if index is None else index.shape[1]
        return cls(replicas, batch, channels, x.shape[-2], x.shape[-1], outputs, width)

    @property
    def padded_channels(self) -> int:
        """Channels of the packed image: 16-byte loads need a multiple of 4."""
        return blocks(self.channels, 4) * 4

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of the images in memory, channels last."""
        return (self.replicas, self.batch, self.height, self.width, self.channels)

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the packed image, with its border of zeros."""
        border = self.filter // 2 * 2
        size = (self.height + border, self.width + border)
        return (self.replicas, self.batch, *size, self.padded_channels)

    @property
    def output_blocks(self) -> tuple[int, int]:
        """Main block and tail of the outputs; a matrix product sums over 16 at least."""
        return main_and_tail(self.outputs, least=16)

    @property
    def channel_blocks(self) -> tuple[int, int]:
        """Main block and tail of the channels."""
        return main_and_tail(self.channels)

    @property
    def patch(self) -> int:
        """Entries of the patch under a pooled pixel."""
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
        """How many pooled pixels away an input pixel still has a say."""
        return (self.filter // 2 + 1) // 2


def blocks(count: int, size: int) -> int:
    """How many blocks of `size` cover `count`."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (count - 1).bit_length()


def main_and_tail(count: int, least: int = 4) -> tuple[int, int]:
    """Two powers of two, the first no less than `least`, or one and 0: what covers `count` best.

    >>> main_and_tail(16), main_and_tail(20), main_and_tail(3), main_and_tail(30)
    ((16, 0), (16, 4), (4, 0), (32, 0))
    """
    main = max(least, 1 << (count.bit_length() - 1))
    rest = max(0, count - main)
    if rest == 0:
        return main, 0
    tail = max(4, power_of_two(rest))
    return (main, tail) if tail < main else (2 * main, 0)
