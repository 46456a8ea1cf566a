"""Tests with the real trainers. They take long to import: `make test-trainers` runs them."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded, and nothing waits for it

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path, config):
    """Collect a test of this folder only if the folder or the file is named in the command."""
    named = [Path(config.invocation_params.dir, arg.split("::")[0]) for arg in config.args]
    if any(HERE in (path.resolve(), *path.resolve().parents) for path in named):
        return None
    return True
