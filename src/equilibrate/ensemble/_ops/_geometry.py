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
    def before(cls, weight: Tensor, packed: Tensor, index: Tensor | None) -> "Geometry":
        """Read the sizes off weight and packed images."""
        replicas, outputs, channels, _, width = weight.shape
        batch = packed.shape[-4] if index is None else index.shape[1]
        height, breadth = (size - width // 2 * 2 for size in packed.shape[-3:-1])
        return cls(replicas, batch, channels, height, breadth, outputs, width)

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
        """Main block and tail of the outputs; a matrix product sums over 16 at least."""
        return main_and_tail(self.outputs, least=16)

    @property
    def channel_blocks(self) -> tuple[int, int]:
        """Main block and tail of the channels."""
        return main_and_tail(self.channels)

    @property
    def scale(self) -> float:
        """What gradients of a mean over the batch are multiplied by to suit half precision.

        256 for an image's own gradient, times the batch size rounded down to a power of two.
        """
        return 256.0 * 2.0 ** (self.batch.bit_length() - 1)

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


def packed_shape(leading: tuple[int, ...], sizes: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Shape of packed images of `sizes` (C, H, W), with the border that filters of `width` need.

    >>> packed_shape((7,), (3, 32, 32), 5)
    (7, 36, 36, 4)
    """
    channels, *image = sizes
    return (*leading, *(size + width // 2 * 2 for size in image), padded(channels))


def padded(channels: int) -> int:
    """The next multiple of 4: a pair of pixels then fills whole 16-byte loads.

    >>> padded(3), padded(20)
    (4, 20)
    """
    return blocks(channels, 4) * 4


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
