import pytest
from support.processes import Processes


@pytest.fixture(scope="session")
def processes():
    """Four processes, started once."""
    pool = Processes(4)
    yield pool
    pool.stop()
