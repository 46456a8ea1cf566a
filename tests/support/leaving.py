"""How processes of a test that torchrun has started end."""

import os
import sys

import torch.distributed as dist


def leave() -> None:
    """End the process after all others have come here, without running destructors.

    In some of them gloo now and then aborts if another process has left already.
    """
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
