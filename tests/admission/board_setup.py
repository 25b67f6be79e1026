"""What the tests of the board share: publications, both sides, and real processes on a page."""

import subprocess
import sys
import threading
import time
from pathlib import Path

from rose._shm import Words
from rose.admission.gate import ServingView
from rose.admission.rollout_side import RolloutSide
from rose.admission.serving_side import ServingSide
from rose.admission.slack import NEVER

PLAYER = Path(__file__).with_name("board_player.py")
VIOLATIONS, TOTAL, STOP = 408, 416, 424
FAR_S = 600.0


def work(latest_start_s: float = NEVER, pending: bool = False) -> ServingView:
    return ServingView(has_work=True, has_pending_prefill=pending, latest_start_s=latest_start_s)


IDLE = ServingView(has_work=False, has_pending_prefill=False, latest_start_s=NEVER)


def in_thread(action: object, *args: object) -> threading.Thread:
    assert callable(action)
    thread = threading.Thread(target=action, args=args)
    thread.start()
    return thread


class Players:
    """Real processes on the page; all are stopped at the end of the test."""

    def __init__(self, page: Path) -> None:
        self._page = page
        self._running: list[subprocess.Popen[str]] = []

    def start(self, *args: str) -> subprocess.Popen[str]:
        player = subprocess.Popen(
            [sys.executable, str(PLAYER), str(self._page), *args], stdout=subprocess.PIPE, text=True
        )
        self._running.append(player)
        return player

    def start_hanging(self, action: str) -> subprocess.Popen[str]:
        player = self.start(action)
        assert player.stdout is not None
        assert player.stdout.readline() == "in step\n"
        return player

    def stop(self) -> None:
        for player in self._running:
            player.kill()
            player.wait()
            if player.stdout is not None:
                player.stdout.close()


def serving_and_wanting(words: Words) -> tuple[ServingSide, RolloutSide]:
    """Both sides: serving between two steps, rollout with something to run."""
    serving, rollout = ServingSide(words), RolloutSide(words)
    rollout.set_want(True)
    serving.publish(work())
    return serving, rollout


def await_grant(rollout: RolloutSide) -> None:
    while not rollout.wait_grant():
        pass


def begin(rollout: RolloutSide) -> bool:
    return rollout.try_begin(time.monotonic() + FAR_S, rollout.view())
