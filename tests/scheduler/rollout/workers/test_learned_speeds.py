"""The placement by cost with the speeds that it learns: what a slow moment of a worker does to it."""

import heapq
import itertools
from collections.abc import Callable

import pytest

from rose.errors import NoWorkerError
from rose.messages import RoutingStatus
from rose.scheduler.rollout.placing.cost import CostPolicy
from rose.scheduler.rollout.placing.views import TurnView
from rose.scheduler.rollout.router_config import RouterConfig, WorkerSpec
from rose.scheduler.rollout.turn.accounts import JobAccounts
from rose.scheduler.rollout.turn.place import Place
from rose.scheduler.rollout.turn.places import Places, Waiter
from rose.scheduler.rollout.workers.members import Members
from rose.scheduler.rollout.workers.worker import Worker

CHUNK = 16
STEP_S = 0.01
"""The time of a decode step, whatever the batch."""
SECOND = "gpu:2"
PREFILL_S = 2e-5
"""The time of a prompt's token."""


class Engines:
    """Workers whose engines decode as fast with many turns as with one, in scripted time."""

    def __init__(self, num_workers: int, turns_per_gpu: int = 16) -> None:
        config, self.now = RouterConfig(turns_per_gpu=turns_per_gpu), 0.0
        self.workers = Members(
            Worker(WorkerSpec(url=f"http://gpu:{number + 1}"), config) for number in range(num_workers)
        )
        self._places = Places(self.workers, CostPolicy(), jobs := JobAccounts(config))
        self._job = jobs.get("job", 0.0)
        self.slowness = dict.fromkeys(self.workers, 1.0)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._num_running = 0
        self._beat()
        for _ in range(4):
            self.burst([100] * 8 * num_workers)

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), act))

    def _beat(self) -> None:
        for worker in self.workers.values():
            worker.take_status(RoutingStatus(), self.now)
            worker.seen(self.now)
        self._at(self.now + 1.0, self._beat)

    def burst(self, lengths: list[int]) -> list[int]:
        """Runs turns of these many tokens, which come at once, to their end. Returns how many ran on each
        worker."""
        ran = dict.fromkeys(self.workers, 0)
        for length in lengths:
            worker_id = self._come(length)
            ran[worker_id] += 1
        while self._num_running:
            self.now, _, act = heapq.heappop(self._events)
            act()
        return list(ran.values())

    def pause(self, seconds: float) -> None:
        until = self.now + seconds
        while self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = until

    def _come(self, length: int) -> str:
        found: list[Place] = []

        def placed(outcome: Place | NoWorkerError) -> None:
            assert isinstance(outcome, Place)
            found.append(outcome)

        turn = TurnView(session=str(next(self._order)), prompt_tokens=100, expected_tokens=4000.0)
        self._places.enqueue(Waiter(turn, self._job, turn.expected_tokens, placed))
        self._places.pump(self.now)
        (place,), began, self._num_running = found, self.now, self._num_running + 1
        first_s = PREFILL_S * (place.missing_tokens + place.ahead_tokens)
        self._at(began + first_s, lambda: self._make(place, length, 1, began))
        return place.worker.id

    def _make(self, place: Place, length: int, num_tokens: int, began: float) -> None:
        place.received(num_tokens, self.now, began)
        left = length - place.num_tokens
        if left > 0:
            took_s = min(CHUNK, left) * STEP_S * self.slowness[place.worker.id]
            self._at(self.now + took_s, lambda: self._make(place, length, min(CHUNK, left), began))
        else:
            self._num_running -= 1
            self._places.release(place, place.num_tokens, self.now)

    def slow_moment(self, times: float) -> None:
        """The second worker is this many times as slow during one burst, at whose end it is idle."""
        self.slowness[SECOND] = times
        self.burst([64] * 16)
        self.slowness[SECOND] = 1.0


@pytest.mark.parametrize("times", [1.5, 3.0, 10.0])
@pytest.mark.parametrize("lengths", [[16, 16, 16, 400], [16, 16, 16, 400] * 4])
def test_a_worker_that_was_slow_for_a_moment_gets_its_part_of_the_turns_again(
    times: float, lengths: list[int]
) -> None:
    engines = Engines(2)
    engines.slow_moment(times)
    until, least = engines.now + 300.0, 0
    while engines.now < until and least < 0.4 * len(lengths):
        least = min(engines.burst(lengths))
    assert least >= 0.4 * len(lengths)


def test_a_worker_that_is_a_little_slower_gets_nearly_as_many_turns_of_a_large_burst() -> None:
    engines = Engines(2, turns_per_gpu=256)
    engines.slowness[SECOND] = 1.05
    for _ in range(3):
        ran = engines.burst([100] * 256)
    assert min(ran) >= 100


def test_a_worker_that_is_much_slower_is_seldom_tried_and_a_pause_of_all_makes_none_forget_that() -> None:
    engines = Engines(2)
    engines.slowness[SECOND] = 3.0
    engines.burst([100] * 32)
    ran = [engines.burst([100] * 8) for _ in range(60)]
    assert sum(slow for _, slow in ran) <= 0.02 * 60 * 8
    engines.pause(3600.0)
    assert engines.burst([100] * 8) == [8, 0]
