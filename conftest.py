"""One torch thread (small operations are far slower with two on a busy machine), fixed seeds.

Doctests of the Triton modules run in Triton's interpreter, or are skipped without Triton. Modules
for trainers need packages that take long to import, and have no doctests.
"""

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from support.device import ON_GPU

collect_ignore = ["tests/support"]
collect_ignore_glob = [
    f"src/equilibrate/integrations/{name}.py"
    for name in ("_lightning", "lightning", "pytorch_lightning", "transformers")
]
if find_spec("triton") is None:
    collect_ignore_glob += [
        f"paper/src/equilibrate_paper/ensemble/_ops/{name}"
        for name in ("triton.py", "step_kernels.py", "conv/*")
    ]
elif not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported

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
