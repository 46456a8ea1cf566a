"""Run doctests of the Triton modules in Triton's interpreter, or skip them without Triton.

Modules for trainers need packages that take long to import, and have no doctests.
"""

import os
from importlib.util import find_spec

import torch

collect_ignore_glob = [
    f"equilibrate/integrations/{name}.py"
    for name in ("_lightning", "lightning", "pytorch_lightning", "transformers")
]
if find_spec("triton") is None:
    collect_ignore_glob += [
        f"equilibrate/ensemble/_ops/{name}" for name in ("triton.py", "step_kernels.py", "conv/*")
    ]
elif not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported
