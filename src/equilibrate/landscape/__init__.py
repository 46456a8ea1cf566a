"""What costs a pass over the data or a Hessian-vector product: the shape of the loss landscape."""

from equilibrate.landscape.surface import (
    Landscape,
    Noise,
    NoiseCurvature,
    connected_scaling,
)

__all__ = [
    "Landscape",
    "Noise",
    "NoiseCurvature",
    "connected_scaling",
]
