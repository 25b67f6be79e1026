"""Starts a node's pool daemons again when they die, at growing pauses, and says when it gives one up.

A daemon that ended soon after its start will most likely do so again: the next one waits, each time twice as
long, and after MOST_FAILURES in a row there is no next one. Engines keep their memory in either case.
"""

import logging
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rose.node.processes import ProcessGroup, ServerProcess

logger = logging.getLogger(__name__)

STEADY_S = 60.0
"""A daemon that ran for this long had come up."""
FIRST_PAUSE_S = 10.0
MOST_FAILURES = 6
"""In a row; with the pauses between them, they take about five minutes."""

_NUM_LAUNCHER_WORDS = len(("python", "-m", "rose.memory.daemon.daemon"))
"""Of a daemon's command line, before the arguments of `rose pool`."""

Clock = Callable[[], float]


@dataclass(slots=True)
class _Daemon:
    """A pool's daemon: the process that runs or ran last, and what became of those before it."""

    process: ServerProcess
    started_s: float
    num_failures: int = 0
    next_s: float | None = None
    """When the next one starts; None while this one runs."""
    is_given_up: bool = False


class PoolKeeper:
    """The pool daemons of a node, all of which have come up once."""

    def __init__(
        self,
        group: ProcessGroup,
        pools: Sequence[ServerProcess],
        new_pools: Callable[[], list[ServerProcess]],
        *,
        now: Clock = time.monotonic,
    ) -> None:
        """``new_pools`` describes a process for each of ``pools``, in their order."""
        self._group = group
        self._new_pools = new_pools
        self._now = now
        self._daemons = [_Daemon(process=pool, started_s=now()) for pool in pools]

    def keep(self) -> None:
        """Starts again what is due. To be called a few times a second."""
        for index, daemon in enumerate(self._daemons):
            if daemon.is_given_up or daemon.process.is_alive():
                continue
            if daemon.next_s is None:
                self._note_end(daemon)
            elif self._now() >= daemon.next_s:
                new = self._new_pools()[index]
                daemon.process = self._group.replace(daemon.process, new)
                daemon.started_s, daemon.next_s = self._now(), None

    def _note_end(self, daemon: _Daemon) -> None:
        ran_s = self._now() - daemon.started_s
        daemon.num_failures = daemon.num_failures + 1 if ran_s < STEADY_S else 0
        if daemon.num_failures >= MOST_FAILURES:
            daemon.is_given_up = True
            logger.error(
                "gave up name=%s: %d daemons in a row ended within %.0f s of their start. Engines keep their "
                "memory and go on, but none can join this pool. Mend what the log says, then run: rose pool "
                "%s; log=%s ends with: %s",
                daemon.process.name,
                daemon.num_failures,
                STEADY_S,
                shlex.join(daemon.process.argv[_NUM_LAUNCHER_WORDS:]),
                daemon.process.log_path,
                daemon.process.log_tail(1),
            )
            return
        pause_s = FIRST_PAUSE_S * 2 ** (daemon.num_failures - 1) if daemon.num_failures else 0.0
        daemon.next_s = self._now() + pause_s
        logger.warning(
            "starting again in %.0f s name=%s: it ran for %.0f s; its log ends with: %s",
            pause_s,
            daemon.process.name,
            ran_s,
            daemon.process.log_tail(1),
        )
