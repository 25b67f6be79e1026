"""A process of a board is killed or stopped at each of its accesses to the page, and the others go on.

    python board_faults.py PAGE guest|serving KILL|STOP

A program, as it forks for each access: a fork of the tests' own process, which has loaded torch, takes long.
"""

import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from board_setup import FAR_S, IDLE, begin, work

from rose._shm import Words
from rose.admission import rollout_side
from rose.admission.board import MAX_GRANT_WAIT_S, BoardWord, parties
from rose.admission.claim import guest_of
from rose.admission.gate import GateReason
from rose.admission.rollout_side import RolloutSide
from rose.admission.serving_side import ServingSide, StepStart
from rose.admission.slack import NEVER

DONE = 77


class FatalWords(Words):
    """Its process signals itself ahead of one access."""

    countdown = 0
    fatal = signal.SIGKILL

    def _count(self) -> None:
        if self.countdown == 0:
            os.kill(os.getpid(), self.fatal)
        self.countdown -= 1

    def load(self, index: int) -> int:
        self._count()
        return super().load(index)

    def store(self, index: int, value: int) -> None:
        self._count()
        super().store(index, value)

    def add(self, index: int, value: int) -> int:
        self._count()
        return super().add(index, value)

    def cas(self, index: int, expected: int, desired: int) -> bool:
        self._count()
        return super().cas(index, expected, desired)


def live_as_guest(words: Words) -> None:
    """All that a guest does; the steps' time is over at once."""
    side = RolloutSide(words)
    side.set_want(True)
    side.wait_grant(0.0)
    side.decline(side.view(), GateReason.NO_SLACK)
    assert side.try_begin(time.monotonic(), side.view())
    side.pause()
    side.try_resume(0.0, 0.0)
    side.end_step(1)
    side.detach()


def live_as_serving(words: Words) -> None:
    """All that a serving engine does, but for its waits."""
    side = ServingSide(words)
    side.set_max_step(0.1)
    side.begin_step()
    side.end_step(work())
    side.offer_grant(NEVER, 1e-6)
    side.begin_step()
    side.end_step(IDLE)
    side.detach()


class Victim:
    """A process that plays a part and meets a signal on its way."""

    def __init__(
        self, page: memoryview, part: Callable[[Words], None], fatal: signal.Signals, at: int
    ) -> None:
        self._is_stopped = False
        self.pid = os.fork()
        if self.pid == 0:
            words = FatalWords(page)
            words.countdown, words.fatal = at, fatal
            try:
                part(words)
            finally:
                os._exit(DONE)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        self._is_stopped = os.WIFSTOPPED(status)
        self.is_done = os.WIFEXITED(status)

    def go_on(self) -> None:
        if self._is_stopped:
            os.kill(self.pid, signal.SIGCONT)
            os.waitpid(self.pid, 0)


def fail_guests(page_memory: memoryview, fatal: signal.Signals) -> None:
    words = Words(page_memory)
    serving, guest = ServingSide(words), RolloutSide(words)
    guest.set_want(True)
    at, victim = 0, None
    while victim is None or not victim.is_done:
        victim = Victim(page_memory, live_as_guest, fatal, at)
        # Its time is over, so serving waits for nothing; a dead one it notices.
        assert serving.begin_step(grace_s=0.0) in (
            *(StepStart.CLEAR, StepStart.OVERRUN),
            *((StepStart.ROLLOUT_DIED, StepStart.WAITED) if fatal is signal.SIGKILL else ()),
        ), at
        serving.end_step(work())
        serving.offer_grant(NEVER, MAX_GRANT_WAIT_S / 4)
        serving.begin_step(grace_s=0.0)
        serving.end_step(IDLE)
        guest.serving_alive()  # looks at the others
        deadline_s = time.monotonic() + FAR_S
        while not (guest.wait_grant() and begin(guest)):
            assert time.monotonic() < deadline_s
        victim.go_on()  # it does not end a step that is not its own
        assert guest_of(words.load(BoardWord.CLAIM)) == guest.slot, at
        guest.end_step(1)
        at += 1
    assert at > 60
    assert len(parties(words)[1]) == 2


def fail_serving(page_memory: memoryview, fatal: signal.Signals) -> None:
    words = Words(page_memory)
    serving, guest = ServingSide(words), RolloutSide(words)
    guest.set_want(True)
    at, victim = 0, None
    while victim is None or not victim.is_done:
        victim = Victim(page_memory, live_as_serving, fatal, at)
        assert serving.begin_step() is StepStart.CLEAR, at
        serving.end_step(IDLE)
        guest.wait_grant(0.0)
        guest.serving_alive()
        if begin(guest):
            guest.end_step(1)
        victim.go_on()
        assert Victim(page_memory, live_as_serving, fatal, at=10**9).is_done  # it takes a dead one's slot
        guest.serving_alive()
        assert begin(guest), at
        guest.end_step(1)
        at += 1
    assert at > 40
    assert len(parties(words)[0]) == 2


def main(page: Path, part: str, fatal: str) -> None:
    with page.open("r+b") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 4096))
    with patch.object(rollout_side, "MAX_STEP_WAIT_S", 0.0):
        {"guest": fail_guests, "serving": fail_serving}[part](memory, signal.Signals[f"SIG{fatal}"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
