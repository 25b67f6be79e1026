"""An attempt's thread on Ray: it ends the attempt's parts at last, and holds the group's nodes until then.

An attempt has ended when all its parts are known to have ended. No error in the thread keeps the attempt from
ending, or frees its nodes earlier.
"""

import logging
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from rose.jobs.on_ray.cluster import RayNodes
from rose.jobs.on_ray.failures import reason
from rose.jobs.on_ray.groups import GroupNodes
from rose.jobs.on_ray.measured import RayRecording
from rose.jobs.on_ray.parts import PartRef, confirm_end
from rose.jobs.ranks import Ended

logger = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_S = 2.0
"""The time after which a step that Ray has refused is tried again."""
Say = Callable[[list[str], bool], None]
"""Hears where an attempt's processes are, or what it waits for, and whether they have started."""


class LetGo(Exception):
    """The scheduler ends, and the attempt goes on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSetup:
    """What all attempts of one scheduler run with."""

    nodes: RayNodes
    groups: GroupNodes
    channel: str
    root: str
    """Names the channel on the hosts."""
    hung_s: float
    recording: RayRecording | None = None
    """Jobs are run for their profile."""


class AttemptThread(ABC):
    """An attempt, from what `_life` does to the confirmed end of all its parts. Its thread owns the parts."""

    def __init__(self, job: str, parts: list[PartRef], setup: AttemptSetup, say: Say) -> None:
        self._job, self._parts, self._setup, self._tell = job, parts, setup, say
        self._said: tuple[list[str], bool] | None = None
        self._leaves = self._is_let_go = False
        self._ended: Ended | None = None
        self._thread = threading.Thread(target=self._run, name=f"rose-job-{job}", daemon=True)

    @abstractmethod
    def _life(self) -> Ended | None:
        """Returns how the attempt has ended; None: parts of it have been lost. Parts may still run.

        Raises: LetGo.
        """

    @abstractmethod
    def end(self, grace_s: float) -> None:
        """Sends SIGTERM, and SIGKILL after ``grace_s``. Does not wait; may be called again."""

    def leave_group(self) -> None:
        """Gives back the nodes of the job's group when the attempt has ended."""
        self._leaves = True
        if self._ended is not None:
            self._setup.groups.leave(self._job)

    def let_go(self) -> None:
        """Lets the attempt go on without this object."""
        self._is_let_go = True

    def wait_gone(self, timeout_s: float) -> None:
        """Waits until the thread has ended, after `let_go`."""
        self._thread.join(timeout_s)

    def ended(self) -> Ended | None:
        return self._ended if not self._thread.is_alive() else None

    def _run(self) -> None:
        try:
            try:
                ended = self._life()
            except LetGo:
                raise
            except Exception as error:
                logger.exception("attempt failed job=%s", self._job)
                ended = Ended(exit_status=-signal.SIGKILL, why=f"its runner failed: {reason(error)}")
            for part in self._parts:
                self._insist(partial(self._confirm, part))
            if ended is None:  # Ray may have held a node for alive until now
                ended = Ended(exit_status=-signal.SIGKILL, lost=self._insist(self._lost))
            self._insist(partial(self._setup.groups.vacate, self._job))
            self._ended = ended
            if self._leaves:
                self._insist(partial(self._setup.groups.leave, self._job))
        except LetGo:  # the next scheduler finds out how it has ended
            return

    def _lost(self) -> str | None:
        """Names what has taken parts of the attempt with it; None if the job itself has failed."""
        return None

    def _confirm(self, part: PartRef) -> None:
        setup = self._setup
        say = partial(self._say, runs=False)
        confirm_end(part, setup.nodes, setup.root, self._job, look=self._check_held, say=say)

    def _insist(self, step: Callable[[], T]) -> T:
        """Repeats a step until it succeeds, as while the Ray head is away. Raises: LetGo."""
        while True:
            self._check_held()
            try:
                return step()
            except LetGo:
                raise
            except Exception as error:
                logger.warning("not ended yet job=%s error=%r", self._job, error)
                self._say([f"waits for Ray, to end it: {reason(error)}"], runs=False)
            time.sleep(RETRY_S)

    def _check_held(self) -> None:
        """Raises: LetGo."""
        if self._is_let_go:
            raise LetGo

    def _say(self, lines: list[str], *, runs: bool) -> None:
        if (lines, runs) != self._said:
            self._said = (lines, runs)
            self._tell(lines, runs)


class Remains(AttemptThread):
    """The parts of a job's attempt that can't go on, until they have ended."""

    def __init__(self, job: str, parts: list[PartRef], setup: AttemptSetup, say: Say) -> None:
        super().__init__(job, parts, setup, say)
        self._thread.start()

    def _life(self) -> Ended:
        return Ended(exit_status=-signal.SIGKILL, lost="a part of it was lost with its scheduler")

    def end(self, grace_s: float) -> None:
        """Does nothing, because these parts are being ended already."""
