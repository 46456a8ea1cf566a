"""What costs a pass over the data or a Hessian-vector product: the shape of the loss landscape."""

from equilibrate.landscape.second_relation import (
    Readings,
    SecondRelation,
    read_second_relation,
)
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
    "Readings",
    "SecondRelation",
    "connected_scaling",
    "read_second_relation",
]
