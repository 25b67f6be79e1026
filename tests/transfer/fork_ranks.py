"""The ranks of a trainer as forks of one process, which has loaded torch for all of them."""

import os
from collections.abc import Callable


def run_ranks(run: Callable[..., None], num_ranks: str, *rest: str) -> int:
    """Calls ``run(rank, num_ranks, *rest)`` in a fork for each rank; returns the largest exit status."""
    pids = []
    for rank in range(int(num_ranks)):
        pid = os.fork()
        if pid == 0:
            run(rank, int(num_ranks), *rest)
            os._exit(0)
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
