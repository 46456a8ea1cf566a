"""One torch thread (small operations are far slower with two on a busy machine) and fixed seeds."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
