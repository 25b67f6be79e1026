"""Jobs of many priorities and teams while everything dies at random: no iteration is lost or run twice."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from full_cluster import Full

from rose.scheduler.runtime.channel.messages import (
    Answer,
    AnyCall,
    Cancel,
    Completed,
    Exited,
    Granted,
    Hello,
    HoldJob,
    Release,
    ReleaseJob,
    SchedulerMessage,
    Start,
    Stop,
)
from rose.scheduler.runtime.decide.records import JobState

PHASES = ("rollout", "train")
NUM_STEPS = 500


@dataclass
class Process:
    """One attempt of a job, as its runner and its program have it."""

    attempt: int
    iteration: int
    phase: int = 0
    has_asked: bool = False
    epoch: int | None = None
    must_end: bool = False


class World:
    """A scheduler, the processes that it has started, and chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        by_share = self.chance.random() < 0.5
        rules = {"by_priority": True, "by_share": by_share, "min_run_s": self.chance.choice([0, 5])}
        policy = self.chance.choice(["solo", "lifetime", "lifetime-multirate"])
        teams = {"a": {}, "b": {"max_rollout_nodes": 2}}
        self.full = Full(self.chance.randint(1, 4), policy=policy, teams=teams, preemption=rules)
        self.scheduler = self.full.scheduler
        self.processes: dict[str, Process] = {}
        self.done: dict[str, list[int]] = {}
        self.num_jobs = 0

    def step(self) -> None:
        what = self.chance.random()
        if what < 0.12:
            self._submit()
        elif what < 0.16:
            jobs = list(self.scheduler.control._state.live)
            calls: list[type[AnyCall]] = [Cancel, HoldJob, HoldJob, ReleaseJob, ReleaseJob, ReleaseJob]
            call = self.chance.choice(calls)
            self._hear(self.scheduler.call(call, job=self.chance.choice(jobs)) if jobs else [])
        elif what < 0.2:
            self._hear(self.scheduler.wait(self.chance.choice([0.25, 1, 5])))
        elif what < 0.23:
            self.scheduler.restart(self.scheduler.now + 1)
        elif what < 0.235:
            self.processes.clear()
            self._hear(self.scheduler.call(Hello, client="runner", running={}, log_folder="/logs"))
        elif self.processes:
            self._go_on(self.chance.choice(list(self.processes)))

    def _submit(self) -> None:
        self.num_jobs += 1
        num_nodes = self.chance.randint(1, 2)
        fields: dict[str, Any] = {
            "group": None,
            "phases": {kind: {"seconds": 1.0, "nodes": num_nodes} for kind in PHASES},
            "priority": self.chance.choice([0, 0, 1, 5]),
            "team": self.chance.choice([None, "a", "b"]),
            "iterations": self.chance.randint(2, 20),
            "max_restarts": self.chance.choice([0, 3, 3]),
        }
        self._hear(self.scheduler.submit(f"j{self.num_jobs}", **fields))

    def _go_on(self, name: str) -> None:
        """The process ends, or its program goes on by one call."""
        process = self.processes[name]
        asked: dict[str, Any] = {"job": name, "attempt": process.attempt}
        is_done = process.iteration == self.scheduler.control._state.spec_of(name).iterations
        if process.must_end or is_done or self.chance.random() < 0.01:
            del self.processes[name]
            status = -15 if process.must_end else 0 if is_done else 1
            self._hear(self.scheduler.call(Exited, client="runner", **asked, exit_status=status))
        elif process.epoch is not None:
            self.scheduler.now += 1.0
            phase, epoch, process.epoch, process.has_asked = PHASES[process.phase], process.epoch, None, False
            process.phase = 1 - process.phase
            self._hear(self.scheduler.call(Release, client=name, **asked, phase=phase, epoch=epoch))
            if phase == "train":
                self._complete(name, process, asked)
        elif not process.has_asked:
            process.has_asked = True
            phase = PHASES[process.phase]
            self._hear(self.scheduler.request(name, phase, process.iteration, process.attempt))

    def _complete(self, name: str, process: Process, asked: dict[str, Any]) -> None:
        said = self.scheduler.call(Completed, client=name, **asked, iteration=process.iteration)
        answer = next(each for each in said if isinstance(each, Answer))
        process.must_end = answer.error is not None or answer.body["ends"]
        if answer.error is None:
            self.done.setdefault(name, []).append(process.iteration)
            process.iteration += 1
        self._hear(said)

    def _hear(self, said: list[SchedulerMessage]) -> None:
        for each in said:
            if isinstance(each, Start):
                assert each.first_iteration == len(self.done.get(each.job, [])), "behind what is done"
                self.processes[each.job] = Process(each.attempt, each.first_iteration)
                continue
            process = self.processes.get(each.job) if isinstance(each, Granted | Stop) else None
            if process is None or not isinstance(each, Granted | Stop) or process.attempt != each.attempt:
                continue
            if isinstance(each, Granted):
                process.epoch = each.epoch
            else:
                process.must_end = True

    def check(self) -> None:
        state = self.scheduler.control._state
        state.groups.check_integrity(self.scheduler.now)
        for permits in state.permits.values():
            permits.check_integrity()
        for iterations in self.done.values():
            assert iterations == list(range(len(iterations))), "each exactly once, in order"
        for name in state.live:
            record = state.jobs[name]
            if record.state is JobState.RUNNING and record.gives_way is not None:
                assert name in state.takeovers[record.gives_way.to]
            if record.state.is_waiting:
                assert record.gives_way is None and name not in self.processes


@pytest.mark.parametrize("seed", range(6))
def test_no_iteration_is_lost_or_run_twice_whatever_dies(seed: int) -> None:
    world = World(seed)
    for _ in range(NUM_STEPS):
        world.step()
        world.check()
    assert sum(map(len, world.done.values())) > 10
    jobs = world.scheduler.control._state.jobs.values()
    assert sum(len(job.preemptions) for job in jobs) > 0, "else the test shows nothing"
