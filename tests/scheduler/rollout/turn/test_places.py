"""Which turn gets the next place, when turns of all sizes wait for one worker."""

import logging
import math
from collections.abc import Hashable
from dataclasses import dataclass, field

import pytest

from rose.errors import NoWorkerError
from rose.scheduler.rollout.placing.cost import CostPolicy
from rose.scheduler.rollout.placing.policy import PaperPolicy, PinnedPolicy, PlacementPolicy
from rose.scheduler.rollout.placing.versions import NewestVersions, VersionRule
from rose.scheduler.rollout.placing.views import TurnView, WorkerKind
from rose.scheduler.rollout.router_config import RouterConfig, RouterJob, WorkerSpec
from rose.scheduler.rollout.turn.accounts import JobAccounts
from rose.scheduler.rollout.turn.place import Place
from rose.scheduler.rollout.turn.places import Places, Waiter
from rose.scheduler.rollout.workers.members import Members
from rose.scheduler.rollout.workers.worker import Worker
from rose.types import WeightVersion

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


class Waiting:
    """Turns that wait for workers with room for one turn each."""

    def __init__(self, policy: PlacementPolicy, kind: WorkerKind, **jobs: RouterJob) -> None:
        config = RouterConfig(turns_per_gpu=1, jobs=jobs)
        members = Members([Worker(WorkerSpec(url=f"http://gpu:{n}", kind=kind), config) for n in (1, 2)])
        for worker in members.values():
            worker.seen(0.0)
        self.ids = list(members)
        self.placed: list[str] = []
        self._jobs = JobAccounts(config)
        self._places = Places(members, policy, self._jobs)

    def come(self, name: str, job: str = "job", affine: str | None = None) -> None:
        turn = TurnView(session=name, job=job, affine=affine)
        self._places.enqueue(Waiter(turn, self._jobs.get(job, 0.0), 1.0, lambda _: self.placed.append(name)))

    def pump(self) -> None:
        self._places.pump(0.0)


@dataclass(frozen=True, slots=True)
class Counting(CostPolicy):
    asked: list[TurnView] = field(default_factory=list)

    def likeness(self, turn: TurnView, now: float) -> Hashable:
        self.asked.append(turn)
        return CostPolicy.likeness(self, turn, now)


@pytest.mark.parametrize("limit", [RouterJob(max_serving_gpus=0), RouterJob(max_in_flight=1)])
def test_a_long_queue_of_turns_that_can_go_nowhere_costs_other_jobs_turns_no_search(limit: RouterJob) -> None:
    policy = Counting()
    waiting = Waiting(policy, WorkerKind.SERVING, long=limit)
    for number in range(500):
        waiting.come(f"{number}", "long")
    waiting.pump()
    policy.asked.clear()
    waiting.come("other", "other")
    waiting.pump()
    assert waiting.placed[-1] == "other"
    assert len(policy.asked) < 10


def test_a_pinned_turn_whose_worker_is_full_holds_up_none_for_another_worker() -> None:
    waiting = Waiting(PinnedPolicy(), WorkerKind.DEDICATED)
    full, free = waiting.ids
    waiting.come("first", affine=full)
    waiting.pump()
    waiting.come("second", affine=full)
    waiting.come("third", affine=free)
    waiting.pump()
    assert waiting.placed == ["first", "third"]


def test_turns_that_wait_for_an_older_runs_version_are_named_with_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The run began again at a new relay, and the router knows the versions of the old one."""
    config, known = RouterConfig(), NewestVersions()
    worker = Worker(WorkerSpec(url="http://gpu:1"), config)
    worker.weight_version = WeightVersion(run_id="run", number=3)
    worker.seen(0.0)
    known.heard(WeightVersion(run_id="run", number=57), now=0.0)
    jobs, placed = JobAccounts(config), list[Place | NoWorkerError]()
    places = Places(Members([worker]), PaperPolicy(versions=VersionRule(known=known)), jobs)
    for number in range(5):
        turn = TurnView(session=f"{number}", run_id="run")
        places.enqueue(Waiter(turn, jobs.get("job", 0.0), 1.0, placed.append))
    told = {}
    for now in range(100):
        places.pump(float(now))
        told[now] = len(caplog.messages)
    assert (told[9], told[10], told[69], told[70], told[99]) == (0, 1, 1, 2, 2)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert caplog.messages[0] == (
        "turns have waited 10 s for weights run/57, and the newest that workers have are run/3. If the run"
        " began again under its old id, such as at a new relay, make the router forget the old one:"
        " DELETE /admin/runs/run"
    )
    known.forget("run")
    places.pump(100.0)
    assert len(placed) == 5
