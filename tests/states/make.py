"""Write the states of this release, which all later releases must load.

Run it once for a release, as the last thing before it, and commit the file:

    python tests/states/make.py
"""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from support import states  # noqa: E402

import equilibrate  # noqa: E402


def main() -> None:
    """Write `<version>.pt.gz`: for each case its state halfway, and what it finds at the end."""
    torch.set_num_threads(1)
    content = {}
    for name in states.CASES:
        case = states.halfway(name)
        saved = io.BytesIO()
        torch.save(case.state_dict(), saved)  # a copy: the case continues
        saved.seek(0)
        content[name] = {"state": torch.load(saved), "found": states.finish(case)}
    file = io.BytesIO()
    torch.save(content, file)
    path = HERE / f"{equilibrate.__version__}.pt.gz"
    path.write_bytes(gzip.compress(file.getvalue(), mtime=0))
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
