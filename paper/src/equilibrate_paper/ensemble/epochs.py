"""Run the training steps of an epoch, on a GPU as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from equilibrate_paper.ensemble._ops.protocol import Updater
from equilibrate_paper.ensemble.batches import Batches, BatchOrders
from equilibrate_paper.ensemble.network import Network
from equilibrate_paper.ensemble.precision import Precision, matrix_products
from equilibrate_paper.ensemble.results import Averages
from equilibrate_paper.ensemble.updates import FlatTensors

# Most steps in one CUDA graph: between two graphs a GPU is idle for a few microseconds.
_STEPS_IN_GRAPH = 25
_WARM_UPS = 2


class EpochRunner:
    """Runs epochs of training steps on static tensors.

    Args:
        network: The network of all replicas.
        batches: Reads the mini-batches.
        orders: Draws the example indices of an epoch.
        flat: The flat tensors of all replicas.
        updater: Makes a step from the gradient.
        steps: Steps of an epoch.
        precision: Precision of products on a GPU.
    """

    def __init__(
        self,
        network: Network,
        batches: Batches,
        orders: BatchOrders,
        flat: FlatTensors,
        updater: Updater,
        *,
        steps: int,
        precision: Precision,
    ) -> None:
        self._network, self._batches, self._orders = network, batches, orders
        self._flat, self._update = flat, updater
        self._steps = steps
        self._precision: Precision = precision
        self._rows = flat.lr.new_zeros((steps, len(flat.lr), len(Averages._fields)))
        self._steps_in_graph = max(n for n in range(1, _STEPS_IN_GRAPH + 1) if steps % n == 0)
        self._replay: Callable[[], None] | None = None

    def run(self, epoch: int) -> Tensor:
        """Train every replica for one epoch. The host waits for the device once, at its end.

        Args:
            epoch: The epoch, starting at 0.

        Returns:
            The columns of `Averages` at each step, float64 (steps, R, 4) on the host.
        """
        self._batches.start(self._orders.get(epoch))
        if self._rows.device.type == "cpu":
            for _ in range(self._steps):
                self._step()
        else:
            self._replay_steps()
            self._orders.get(epoch + 1)  # drawn while the device is busy
        return self._rows.to("cpu", copy=True)

    def _replay_steps(self) -> None:
        if self._replay is None:
            written = [self._flat.parameters, *self._flat.state.values(), self._batches.counts]
            with matrix_products(self._precision, self._rows.device):
                self._replay = _capture(self._step, written, times=self._steps_in_graph)
        for _ in range(self._steps // self._steps_in_graph):
            self._replay()

    @torch.no_grad()
    def _step(self) -> None:
        """Make one step of every replica. No number is copied to the host."""
        losses = self._network.differentiate(*self._batches.take()).double()
        self._update(losses, self._rows, self._batches.counts)


def _capture(step: Callable[[], None], written: Sequence[Tensor], times: int) -> Callable[[], None]:
    """Return a function that replays several calls of `step`, captured in one CUDA graph.

    Compilers and libraries set themselves up in the first calls, so the function is called a few
    times before the capture. The tensors in `written`, which it both reads and modifies, are
    restored after each of these calls.
    """
    with torch.cuda.device(written[0].device):
        saved = [tensor.clone() for tensor in written]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                step()
                for tensor, value in zip(written, saved, strict=True):
                    tensor.copy_(value)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                step()
    return graph.replay
