"""Where kernels are tested: on a GPU as they are, without one in Triton's interpreter."""

import os

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported
