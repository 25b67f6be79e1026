"""Which turn gets the next place, when turns of all sizes wait for one worker."""

import math

import pytest

from rose.errors import NoWorkerError
from rose.scheduler.rollout.placing.cost import CostPolicy
from rose.scheduler.rollout.placing.policy import PaperPolicy, PlacementPolicy
from rose.scheduler.rollout.placing.views import TurnView
from rose.scheduler.rollout.router_config import RouterConfig, RouterJob, WorkerSpec
from rose.scheduler.rollout.turn.accounts import JobAccounts
from rose.scheduler.rollout.turn.place import Place
from rose.scheduler.rollout.turn.places import Places, Waiter
from rose.scheduler.rollout.workers.members import Members
from rose.scheduler.rollout.workers.worker import Worker

LONG = TurnView(session="long", prompt_tokens=100_000, expected_tokens=4_000)


class OneWorker:
    """A worker of known speed with room for two turns, at which short turns always wait."""

    def __init__(self, policy: PlacementPolicy, **jobs: RouterJob) -> None:
        config, self.now = RouterConfig(turns_per_gpu=2, jobs=jobs), 0.0
        members, worker = Members(), Worker(WorkerSpec(url="http://gpu:1"), config)
        members.add(worker)
        worker.seen(0.0)
        for _ in range(10):
            worker.prefilled(1.0, 1000.0)
            worker.made_tokens(1, 0.0, 0.02)
        self.worker = worker
        self._jobs = JobAccounts(config)
        self._places = Places(members, policy, self._jobs)
        self._running: list[Place] = []
        self._num_short = 0
        for _ in range(10):
            self.come_short()
        self._places.pump(self.now)

    def come(self, turn: TurnView, since: float = math.inf) -> None:
        def placed(outcome: Place | NoWorkerError) -> None:
            assert isinstance(outcome, Place)
            self._running.append(outcome)

        waiter = Waiter(turn, self._jobs.get(turn.job, self.now), turn.expected_tokens, placed)
        self._places.enqueue(waiter, since=since)

    def come_short(self) -> None:
        self._num_short += 1
        self.come(TurnView(session=f"{self._num_short}", prompt_tokens=10, expected_tokens=10))

    def step(self) -> None:
        """One turn ends, and one short turn comes."""
        self.come_short()
        self.end_turn()

    def end_turn(self) -> None:
        self.now += 0.1
        self._places.release(self._running.pop(0), 10, self.now)
        self._places.pump(self.now)

    @property
    def num_queued(self) -> int:
        return self._places.num_queued

    @property
    def sessions(self) -> set[str]:
        return {place.turn.session for place in self._running}


@pytest.mark.parametrize("policy", [PaperPolicy(), CostPolicy()])
def test_a_long_prompt_waits_for_no_more_short_ones_than_came_before_it(policy: PlacementPolicy) -> None:
    one = OneWorker(policy)
    one.come(LONG)
    for _ in range(8):
        assert "long" not in one.sessions
        one.step()
    one.step()
    assert "long" in one.sessions


@pytest.mark.parametrize("policy", [PaperPolicy(), CostPolicy()])
def test_a_long_prompt_that_stalled_gets_the_first_place_after_its_pause(policy: PlacementPolicy) -> None:
    one = OneWorker(policy)
    one.come(TurnView(session="long", prompt_tokens=100_000, avoid_until={one.worker.id: 1.05}), since=0.0)
    while one.now < 1.05:
        assert "long" not in one.sessions
        one.step()
    assert "long" in one.sessions


def test_a_long_turn_of_one_job_waits_for_as_many_tokens_of_another_as_it_costs() -> None:
    one = OneWorker(CostPolicy())
    one.come(TurnView(session="long", job="agent", prompt_tokens=100_000, expected_tokens=4_000))
    num_steps = 0
    while "long" not in one.sessions:
        one.step()
        num_steps += 1
    assert 10 * num_steps <= 4_000 + 512


def test_a_job_of_higher_priority_is_placed_next_and_one_of_lower_priority_last() -> None:
    one = OneWorker(CostPolicy(), urgent=RouterJob(priority=2), idle=RouterJob(priority=-1))
    for name in ("idle", "urgent"):
        one.come(TurnView(session=name, job=name, prompt_tokens=10, expected_tokens=4_000))
    one.step()
    assert "urgent" in one.sessions
    for _ in range(100):
        one.step()
        assert "idle" not in one.sessions
    while one.num_queued > 1:
        one.end_turn()
    assert "idle" not in one.sessions
    one.end_turn()
    assert "idle" in one.sessions
