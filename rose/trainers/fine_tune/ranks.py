"""The processes of a data-parallel trainer, which are one guest of the board.

Rank 0 has the place on the board and asks for grants. The others compute the same pieces at the same time: a
piece begins on every rank under the same grant, and a grant goes back when the last rank has ended its piece.
Owns the group of processes through which they agree. Every rank has to call the same methods in the same
order.
"""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

from rose.arguments import report
from rose.errors import RoseError, WorkerError

HUNG_S = 600.0
"""A process that the others have waited for this long has hung. Publishing and saving take less."""
LATE_S = 60.0
"""A process that is so late at the end of a piece, or with its answer about a grant, has hung: rank 0 may
hold the GPU meanwhile."""
TELL_S = 30.0
"""Rank 0 tells the others so often that it still waits for a grant: serving may leave no time for long. Less
than LATE_S."""

_GLOO_TEXTS = ("Connection closed by peer", "Connection reset by peer", "a remote worker hanging")


class Ranks:
    """One process among those of a trainer.

    Raises: WorkerError from any method if another process has died, or has not come for `HUNG_S`, or for
    `LATE_S` where it must be near.
    """

    def __init__(self) -> None:
        """Call it on every rank, once torch's process group is there."""
        # gloo on the host: the trainer's own group may be on devices, which wait for grants.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=HUNG_S))
        self._soon = dist.new_group(backend="gloo", timeout=timedelta(seconds=LATE_S))
        self.is_leader = dist.get_rank() == 0
        self.count = dist.get_world_size()

    @classmethod
    def of_trainer(cls) -> Self | None:
        """Returns this process's; None for a trainer of one process."""
        return cls() if _is_one_of_several() else None

    @staticmethod
    @contextmanager
    def parting(name: str) -> Iterator[None]:
        """Leaves the trainer's group at the end, if there is one: a process that ends in it may abort.

        An error ends a process of several here and now, printed as the command ``name`` would. The group's
        destructor waits for the other processes, without end if one hangs.
        """
        try:
            yield
        except BaseException as raised:
            # A stop signal may come while an error is on its way.
            error = raised if isinstance(raised, Exception) else raised.__context__
            if not isinstance(error, Exception) or not _is_one_of_several():
                raise
            if _says_another_has_gone(error):
                error = _another_has_gone(error)
            if isinstance(error, RoseError):
                os._exit(report(name, error))
            traceback.print_exc()
            os._exit(1)
        finally:
            if dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()

    def most(self, value: float, *, soon: bool = False) -> float:
        """Returns the largest value of all ranks, once all have come here. ``soon``: within `LATE_S`."""
        shared = torch.tensor([value], dtype=torch.float64)
        group = self._soon if soon else self._group
        try:
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
        except RuntimeError as error:
            raise _another_has_gone(error) from error
        return float(shared)


def _another_has_gone(error: Exception) -> WorkerError:
    return WorkerError(f"another process of the trainer has gone or hangs: {error}")


def _says_another_has_gone(error: Exception) -> bool:
    """Whether a collective of the trainer's own failed: gloo raises a plain RuntimeError."""
    is_gloos = isinstance(error, RuntimeError) and any(text in str(error) for text in _GLOO_TEXTS)
    return is_gloos or isinstance(error, dist.DistError)


def _is_one_of_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
