"""A group's permits through random joins, restarts, crashes and releases."""

import random

import msgspec
import pytest

from rose.scheduler.group.certificate import certify
from rose.scheduler.group.model import Group, Job, Member, Phase
from rose.scheduler.runtime.decide.group_permits import GroupPermits, OrderRow, PermitsRow

LEASE_S = 10.0


def group_of(names: list[str], num_rollout_nodes: int) -> Group:
    members = tuple(
        Member(
            job=Job(name=name, rollout_s=1.0, train_s=1.0, slo=1000.0),
            rollout_nodes=(index % num_rollout_nodes,),
        )
        for index, name in enumerate(names)
    )
    return Group(name="g", num_train_nodes=1, num_rollout_nodes=num_rollout_nodes, members=members)


def form(permits: GroupPermits, group: Group, now: float) -> None:
    permits.form(group, certify(group, permits.order_for(group)), now)


def restarted(permits: GroupPermits, now: float, clock: str = "clock") -> GroupPermits:
    """Returns what a new scheduler makes of what is kept in JSON."""
    order, row = map(msgspec.json.encode, permits.rows())
    fresh = GroupPermits(LEASE_S, clock)
    fresh.restore(msgspec.json.decode(order, type=OrderRow), msgspec.json.decode(row, type=PermitsRow), now)
    return fresh


class Play:
    """Jobs that alternate between their phases on some permits."""

    def __init__(self, num_rollout_nodes: int) -> None:
        self.num_rollout_nodes = num_rollout_nodes
        self.names: list[str] = []
        self.permits = GroupPermits(LEASE_S, "clock")
        self.asks: dict[str, Phase] = {}
        self.next_phase: dict[str, Phase] = {}
        self.now = 0.0
        self.last_epoch = 0
        self.num_released: dict[tuple[str, Phase], int] = {}
        self.join()

    def join(self) -> None:
        name = "abcde"[len(self.names)]
        self.names.append(name)
        self.next_phase[name] = Phase.ROLLOUT
        form(self.permits, group_of(self.names, self.num_rollout_nodes), self.now)

    def restart(self) -> None:
        self.permits = restarted(self.permits, self.now)
        for name, phase in self.asks.items():
            self.permits.ask(name, phase, 0)

    def crash(self, name: str) -> None:
        self.permits.drop(name, self.now)
        self.asks.pop(name, None)
        self.next_phase[name] = Phase.ROLLOUT

    def step(self, name: str) -> None:
        """Releases what the job holds, or asks for its next phase."""
        hold = self.permits.holds.get(name)
        if hold is not None:
            assert self.permits.release(name, hold.epoch, self.now)
            assert not self.permits.release(name, hold.epoch, self.now), "a permit is given back once"
            self.next_phase[name] = Phase.TRAIN if hold.phase is Phase.ROLLOUT else Phase.ROLLOUT
            self.num_released[name, hold.phase] = self.num_released.get((name, hold.phase), 0) + 1
        elif name not in self.asks:
            self.asks[name] = self.next_phase[name]
            self.permits.ask(name, self.asks[name], 0)
        self.grant()

    def grant(self) -> None:
        for hold in self.permits.grant(self.now):
            assert hold.epoch > self.last_epoch, "epochs grow, across restarts as well"
            self.last_epoch = hold.epoch
            del self.asks[hold.job]
        nodes = [
            -1 if each.phase is Phase.TRAIN else self.names.index(each.job) % self.num_rollout_nodes
            for each in self.permits.holds.values()
        ]
        assert len(nodes) == len(set(nodes)), "a node has one holder"


@pytest.mark.parametrize("seed", range(20))
def test_a_node_has_one_holder_and_nobody_starves(seed: int) -> None:
    rng = random.Random(seed)
    play = Play(rng.choice([1, 2, 3]))
    for _ in range(150):
        play.now += 0.5 * rng.random()
        choice = rng.random()
        if choice < 0.06 and len(play.names) < 5:
            play.join()
        elif choice < 0.1:
            play.restart()
        elif choice < 0.13:
            play.crash(rng.choice(play.names))
        play.step(rng.choice(play.names))
    play.num_released.clear()
    for _ in range(25):
        play.now += 0.1
        for name in play.names:
            play.step(name)
    assert set(play.num_released) == {(name, phase) for name in play.names for phase in Phase}


def test_a_group_whose_jobs_are_all_away_waits_for_them() -> None:
    permits = GroupPermits(LEASE_S, "clock")
    form(permits, group_of(["a", "b"], 1), 0.0)
    assert permits.grant(5 * LEASE_S) == []
    permits.ask("b", Phase.ROLLOUT, 3)
    [hold] = permits.grant(5 * LEASE_S)
    assert (hold.job, hold.iteration) == ("b", 3)


def test_a_job_that_stays_away_between_phases_is_passed_over() -> None:
    permits = GroupPermits(LEASE_S, "clock")
    form(permits, group_of(["a", "b"], 1), 0.0)
    permits.ask("a", Phase.ROLLOUT, 0)
    [hold] = permits.grant(0.0)
    permits.ask("b", Phase.ROLLOUT, 0)
    assert permits.grant(1.0) == [] and permits.holders_before("b") == ["a"]
    assert permits.release("a", hold.epoch, 1.0)
    [second] = permits.grant(1.0)
    assert permits.release("b", second.epoch, 2.0)
    permits.ask("b", Phase.TRAIN, 0)
    assert permits.grant(2.0) == [], "a trains first"
    [third] = permits.grant(2.0 + LEASE_S)
    assert (third.job, third.phase) == ("b", Phase.TRAIN)
