"""The processes of `torchrun`, which execute a reproduction together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from equilibrate_paper.runs.errors import RunError

T = TypeVar("T")

# Processes wait for each other as long as the longest run takes. A process that ends early does
# not leave the others waiting, because torchrun stops them.
_TIMEOUT = timedelta(days=365)


@dataclass(frozen=True)
class Ranks:
    """The place of this process among the processes that work on the same folder.

    The default is a single process, which does not need `torch.distributed`.

    >>> Ranks().together(lambda: "result")
    ['result']
    """

    rank: int = 0
    """Number of this process."""
    size: int = 1
    """Number of processes."""
    local_rank: int = 0
    """Number of this process among those on the same machine."""

    def together(self, action: Callable[[], T]) -> list[T]:
        """Call a function on every rank and wait until all ranks have done so.

        If it fails on some ranks, it raises an error on all of them, so that no rank waits for one
        that has failed.

        Args:
            action: The function. Its result must be picklable.

        Returns:
            The results of all ranks, in the order of the ranks.

        Raises:
            RunError: If the function failed on another rank. A rank on which it failed raises its
                own error.
        """
        if self.size == 1:
            return [action()]
        import torch.distributed as dist

        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            failure = error
        message = None if failure is None else str(failure) or type(failure).__name__
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, (result, message))
        if failure is not None:
            raise failure
        for rank, (_, message) in enumerate(answers):
            if message is not None:
                raise RunError(f"rank {rank} failed: {message}")
        return [result for result, _ in answers]

    def first(self, action: Callable[[], T]) -> T:
        """Call a function on rank 0 while the other ranks wait. Errors are as in `together`.

        Args:
            action: The function. Its result must be picklable.

        Returns:
            Its result, on every rank.
        """
        chosen: Callable[[], Any] = action if self.rank == 0 else lambda: None
        return self.together(chosen)[0]


@contextmanager
def connect() -> Iterator[Ranks]:
    """Connect the processes that torchrun started, until the `with` block ends.

    Yields:
        The place of this process; that of a single process if torchrun did not start it.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        yield Ranks(dist.get_rank(), size, int(os.environ.get("LOCAL_RANK", "0")))
    finally:
        dist.destroy_process_group()
