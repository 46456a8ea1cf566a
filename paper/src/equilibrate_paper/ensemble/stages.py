"""Stages of a network: functions of all replicas at once, and their gradients.

Parameters and inputs have the replicas on their first axis, and the outputs of a replica depend on
that replica alone. Autograd differentiates a stage by default. The most common stages compute their
gradients explicitly, which is faster and writes them directly where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from equilibrate_paper.ensemble._ops import Ops
from equilibrate_paper.ensemble._ops.side_stream import SideStream
from equilibrate_paper.ensemble.data.examples import IndexedInputs, PreparedInputs

Tensors = Mapping[str, Tensor]
Function = Callable[[Tensors, Any], Tensor]
SIDE_STREAM = SideStream()
"""Where the weight gradients of linear layers are computed on a GPU."""


@dataclass(frozen=True)
class StageTensors:
    """The tensors of a stage, by their names in the layer."""

    tensors: Tensors
    """All parameters and buffers."""
    gradients: Tensors
    """Where the gradients of the trained parameters are written."""
    differentiates_inputs: bool
    """Whether stages before this one need the gradient of its inputs."""


class Stage:
    """A function of (tensors, inputs), differentiated by autograd.

    Args:
        function: Computes the outputs.
        own: The tensors of the stage.
        reads_indices: Whether the function takes `IndexedInputs`.
    """

    def __init__(
        self, function: Function, own: StageTensors, *, reads_indices: bool = False
    ) -> None:
        self._function = function
        self._tensors = own.tensors
        self._gradients = own.gradients
        self._leaves = {name: own.tensors[name].detach().requires_grad_() for name in own.gradients}
        self._differentiates_inputs = own.differentiates_inputs
        self.reads_indices = reads_indices

    @property
    def needs_gradient(self) -> bool:
        """Whether this stage, or one before it, has parameters to train."""
        return self._differentiates_inputs or bool(self._gradients)

    def prepare(self, inputs: Tensor) -> PreparedInputs:
        """Prepare a data set, if this is the first stage.

        Args:
            inputs: The inputs of the data set, (N, …).

        Returns:
            The inputs in the form that this stage reads.
        """
        return inputs

    def __call__(self, x: Tensor | IndexedInputs) -> Tensor:
        """Compute the outputs without saving anything for `backward`.

        Args:
            x: Inputs, (R, B, …).

        Returns:
            Outputs, (R, B, …).
        """
        return self._function(self._tensors, x)

    def forward(self, x: Tensor | IndexedInputs) -> tuple[Tensor, Any]:
        """Compute the outputs.

        Args:
            x: Inputs, (R, B, …).

        Returns:
            The outputs, and what `backward` needs.
        """
        if not self.needs_gradient:
            return self(x), None
        with torch.enable_grad():
            if self._differentiates_inputs and isinstance(x, Tensor):
                x = x.detach().requires_grad_()
            y = self._function({**self._tensors, **self._leaves}, x)
        return y.detach(), (x, y)

    def backward(self, saved: Any, grad: Tensor) -> Tensor | None:
        """Write the gradients of the parameters.

        Args:
            saved: What `forward` saved.
            grad: The gradient of the outputs.

        Returns:
            The gradient of the inputs, or None if no earlier stage needs it.
        """
        if not self.needs_gradient:
            return None
        x, y = saved
        wanted = [*self._leaves.values(), *([x] if self._differentiates_inputs else [])]
        found = torch.autograd.grad(y, wanted, grad, materialize_grads=True)
        for gradient, value in zip(self._gradients.values(), found, strict=False):
            gradient.copy_(value)
        return found[-1] if self._differentiates_inputs else None


class LinearStage(Stage):
    """y = x Wᵀ + b for each replica, or max(y, 0) with a ReLU.

    On a GPU the gradient of the weight is computed on `SIDE_STREAM`. Call `SIDE_STREAM.join` before
    using it.

    Args:
        own: The tensors of the stage.
        ops: The operations to use.
        relu: Whether a ReLU follows the layer.
    """

    def __init__(self, own: StageTensors, ops: Ops, *, relu: bool) -> None:
        super().__init__(lambda _, x: self.forward(x)[0], own)
        # Made once: on a CPU a view takes as long as a small product.
        self._weight = own.tensors["weight"]
        self._weight_transposed = own.tensors["weight"].mT
        self._bias = own.tensors["bias"].unsqueeze(1)
        self.relu = relu
        self._ops = ops

    def forward(self, x: Tensor | IndexedInputs) -> tuple[Tensor, Any]:
        """Compute the outputs; see `Stage.forward`.

        Args:
            x: Inputs, (R, B, …, M).

        Returns:
            The outputs, (R, B, …, N), and what `backward` needs.
        """
        assert isinstance(x, Tensor)
        rows = x.flatten(1, -2)
        y = self._ops.linear(rows, self._weight_transposed, self._bias, relu=self.relu)
        return y if x.dim() == 3 else y.unflatten(1, x.shape[1:-1]), (x, y)

    def backward(self, saved: Any, grad: Tensor) -> Tensor | None:
        """Compute ∂W = (∂y)ᵀ x, ∂b = Σ ∂y and ∂x = ∂y W; with a ReLU, ∂y is 0 where y = 0.

        Args:
            saved: What `forward` saved.
            grad: The gradient of the outputs.

        Returns:
            The gradient of the inputs, or None if no earlier stage needs it.
        """
        x, y = saved
        grad = self._ops.bias_gradient(
            grad.flatten(1, -2), y if self.relu else None, self._gradients["bias"]
        )
        return self._products(x, grad)

    def differentiate_cross_entropy(
        self, x: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the cross-entropy of the outputs, and write all gradients.

        Args:
            x: Inputs, (R, B, M).
            targets: Class indices, (R, B).

        Returns:
            The loss of each replica, (R,), and the gradient of the inputs, or None if no earlier
            stage needs it.
        """
        losses, grad = self._ops.linear_cross_entropy(
            x, self._weight_transposed, self._bias, targets, self._gradients["bias"]
        )
        return losses, self._products(x, grad)

    def _products(self, x: Tensor, grad: Tensor) -> Tensor | None:
        # Kept alive: the side stream may read them after this function has returned.
        self._read = x, grad
        with SIDE_STREAM.use(grad.device):
            torch.bmm(grad.mT, x.flatten(1, -2), out=self._gradients["weight"])
        if not self._differentiates_inputs:
            return None
        found = torch.bmm(grad, self._weight)
        return found if x.dim() == 3 else found.view(x.shape)


class ReLUStage(Stage):
    """y = max(x, 0).

    Args:
        own: The tensors of the stage.
    """

    def __init__(self, own: StageTensors) -> None:
        super().__init__(lambda _, x: F.relu(x), own)

    def forward(self, x: Tensor | IndexedInputs) -> tuple[Tensor, Any]:
        """Compute the outputs; see `Stage.forward`.

        Args:
            x: Inputs, (R, B, …).

        Returns:
            The outputs, and what `backward` needs.
        """
        y = self(x)
        return y, y

    def backward(self, saved: Any, grad: Tensor) -> Tensor | None:
        """Compute ∂x = ∂y where y > 0, else 0.

        Args:
            saved: What `forward` saved.
            grad: The gradient of the outputs.

        Returns:
            The gradient of the inputs, or None if no earlier stage needs it.
        """
        if not self._differentiates_inputs:
            return None
        return torch.ops.aten.threshold_backward(grad, saved, 0)


class ConvReluPoolStage(Stage):
    """Convolution, ReLU and 2×2 max-pooling.

    Args:
        own: The tensors of the stage.
        ops: The operations to use.
    """

    def __init__(self, own: StageTensors, ops: Ops) -> None:
        super().__init__(
            lambda tensors, x: ops.conv_relu_pool(x, tensors["weight"], tensors["bias"]),
            own,
            reads_indices=ops.conv_reads_indices,
        )
        self._ops = ops

    def prepare(self, inputs: Tensor) -> PreparedInputs:
        """Lay out a data set once, instead of at each step.

        Args:
            inputs: The images of the data set, (N, C, H, W).

        Returns:
            The images in the form that this stage reads.
        """
        return self._ops.prepare_images(inputs, self._tensors["weight"], self._tensors["bias"])


def flatten_stage(own: StageTensors) -> Stage:
    """Make a stage that flattens all axes of an example into one.

    Args:
        own: The tensors of the stage.

    Returns:
        The stage.
    """
    return Stage(lambda _, x: x.flatten(2), own)


def module_stage(layer: nn.Module, own: StageTensors) -> Stage:
    """Make a stage of any module with `torch.func.vmap`.

    Args:
        layer: The module.
        own: The tensors of the stage.

    Returns:
        The stage.
    """
    # One entry for each attribute that holds a tensor: a tied tensor has several.
    named = dict((*layer.named_parameters(), *layer.named_buffers()))
    first = {id(tensor): name for name, tensor in named.items()}
    places = {
        f"{path}.{name}" if path else name: first[id(tensor)]
        for path, module in layer.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }

    def one(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        given = {place: tensors[name] for place, name in places.items()}
        return functional_call(layer, given, (x,), tie_weights=False)

    return Stage(lambda tensors, x: vmap(one)(dict(tensors), x), own)
