"""Starts a node's pool daemons again when they die, after growing pauses, and gives one up that keeps dying.

A daemon that ends within STEADY_S of its start has failed. The first failure in a row is followed by a pause
of FIRST_PAUSE_S, and each further one by a pause twice as long. After MOST_FAILURES in a row the daemon is
started no more, and an error says how to start it by hand. Engines keep their memory throughout.
"""

import logging
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rose.node.processes import ProcessGroup, ServerProcess

logger = logging.getLogger(__name__)

STEADY_S = 60.0
FIRST_PAUSE_S = 10.0
MOST_FAILURES = 6
"""The five pauses between so many failures take about five minutes."""


@dataclass(slots=True)
class _Daemon:
    """The process of a pool's daemon that runs or ran last, and how many before it failed in a row."""

    process: ServerProcess
    started_s: float
    num_failures: int = 0
    next_s: float | None = None
    """When the next process starts; None while one runs."""
    is_given_up: bool = False


class PoolKeeper:
    """Watches the pool daemons of a node, which all run when it is made."""

    def __init__(
        self,
        group: ProcessGroup,
        pools: Sequence[ServerProcess],
        new_pools: Callable[[], list[ServerProcess]],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``pools`` belong to ``group``. ``new_pools`` describes a process for each, in the same order."""
        self._group = group
        self._new_pools = new_pools
        self._now = now
        self._daemons = [_Daemon(process=pool, started_s=now()) for pool in pools]

    def keep(self) -> None:
        """Notes which daemons have ended, and starts those that are due. It is called every second or so."""
        for index, daemon in enumerate(self._daemons):
            if daemon.is_given_up or daemon.process.is_alive():
                continue
            if daemon.next_s is None:
                self._note_end(daemon)
            elif self._now() >= daemon.next_s:
                self._start(daemon, self._new_pools()[index])

    def _start(self, daemon: _Daemon, new: ServerProcess) -> None:
        old, daemon.process = daemon.process, new
        daemon.started_s, daemon.next_s = self._now(), None
        try:
            self._group.replace(old, new)
        except OSError as error:  # as no process can be made; the engines go on, and this counts as a failure
            logger.error("cannot start name=%s: %s", new.name, error)

    def _note_end(self, daemon: _Daemon) -> None:
        ran_s = self._now() - daemon.started_s
        daemon.num_failures = daemon.num_failures + 1 if ran_s < STEADY_S else 0
        if daemon.num_failures >= MOST_FAILURES:
            daemon.is_given_up = True
            logger.error(
                "gave up name=%s: it ended %d times in a row within %.0f s of its start. Engines keep their "
                "memory and go on, but none can join this pool. Mend what %s shows, then run in this node's "
                "environment: %s",
                daemon.process.name,
                daemon.num_failures,
                STEADY_S,
                daemon.process.log_path,
                _command(daemon.process),
            )
            return
        pause_s = FIRST_PAUSE_S * 2 ** (daemon.num_failures - 1) if daemon.num_failures else 0.0
        daemon.next_s = self._now() + pause_s
        logger.warning(
            "starting again name=%s in %.0f s: it ran for %.0f s", daemon.process.name, pause_s, ran_s
        )


def _command(process: ServerProcess) -> str:
    """Returns the shell command that starts the process, with the variables that name its GPUs."""
    given = [f"{name}={value}" for name, value in process.added_env.items()]
    return shlex.join([*(["env", *given] if given else []), *process.argv])
