"""One torch thread (small operations are far slower with two on a busy machine), fixed seeds."""

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from support.device import ON_GPU

# Some of these modules import trainers, which this environment need not have. None has doctests.
collect_ignore = ["support"]

torch.set_num_threads(1)
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The one place that knows what the marker `gpu` asks for."""
    if item.get_closest_marker("gpu") and not ON_GPU:
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder that holds MNIST and CIFAR-10 in their official layouts."""
    folder = os.environ.get("EQUILIBRATE_DATA")
    if not folder:
        pytest.skip("EQUILIBRATE_DATA does not name a folder with MNIST and CIFAR-10")
    return Path(folder)


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """A context in which writing beyond a number of bytes of a file fails, as on a full disk."""

    @contextmanager
    def limited(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error instead of a kill
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)

    return limited
