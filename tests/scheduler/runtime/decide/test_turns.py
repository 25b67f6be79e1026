"""A group's turns through random joins, restarts, crashes and releases."""

import random

import msgspec
import pytest

from rose.scheduler.cluster.model import Group, Job, Member
from rose.scheduler.group.certificate import certify
from rose.scheduler.runtime.decide.holds import Ask, OrderRow, TurnsRow
from rose.scheduler.runtime.decide.turns import Turns

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


def form(turns: Turns, group: Group, now: float) -> None:
    turns.form(group, certify(group, turns.order_for(group)), now)


def restarted(turns: Turns, now: float, clock: str = "clock") -> Turns:
    """As a new scheduler has it, from what is kept in JSON."""
    order, row = map(msgspec.json.encode, turns.rows())
    fresh = Turns(LEASE_S, clock)
    fresh.restore(msgspec.json.decode(order, type=OrderRow), msgspec.json.decode(row, type=TurnsRow), now)
    return fresh


class Play:
    """Jobs that alternate between their phases on some turns."""

    def __init__(self, num_rollout_nodes: int) -> None:
        self.num_rollout_nodes = num_rollout_nodes
        self.names: list[str] = []
        self.turns = Turns(LEASE_S, "clock")
        self.asks: dict[str, Ask] = {}
        self.next_phase: dict[str, str] = {}
        self.now = 0.0
        self.last_epoch = 0
        self.num_released: dict[tuple[str, str], int] = {}
        self.join()

    def join(self) -> None:
        name = "abcde"[len(self.names)]
        self.names.append(name)
        self.next_phase[name] = "rollout"
        form(self.turns, group_of(self.names, self.num_rollout_nodes), self.now)

    def restart(self) -> None:
        self.turns = restarted(self.turns, self.now)
        for ask in self.asks.values():
            self.turns.ask(ask)

    def crash(self, name: str) -> None:
        self.turns.drop(name, self.now)
        self.asks.pop(name, None)
        self.next_phase[name] = "rollout"

    def step(self, name: str) -> None:
        """Releases what the job holds, or asks for its next phase."""
        hold = self.turns.holds.get(name)
        if hold is not None:
            assert self.turns.release(name, hold.epoch, self.now)
            assert not self.turns.release(name, hold.epoch, self.now), "a permit is given back once"
            self.next_phase[name] = "train" if hold.phase == "rollout" else "rollout"
            self.num_released[name, hold.phase] = self.num_released.get((name, hold.phase), 0) + 1
        elif name not in self.asks:
            self.asks[name] = Ask(job=name, phase=self.next_phase[name], iteration=0)
            self.turns.ask(self.asks[name])
        self.grant()

    def grant(self) -> None:
        for hold in self.turns.grant(self.now):
            assert hold.epoch > self.last_epoch, "epochs grow, across restarts as well"
            self.last_epoch = hold.epoch
            del self.asks[hold.job]
        nodes = [
            -1 if each.phase == "train" else self.names.index(each.job) % self.num_rollout_nodes
            for each in self.turns.holds.values()
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
    assert set(play.num_released) == {(name, phase) for name in play.names for phase in ("rollout", "train")}


def test_a_group_whose_jobs_are_all_away_waits_for_them() -> None:
    turns = Turns(LEASE_S, "clock")
    form(turns, group_of(["a", "b"], 1), 0.0)
    assert turns.grant(5 * LEASE_S) == []
    turns.ask(Ask(job="b", phase="rollout", iteration=3))
    [hold] = turns.grant(5 * LEASE_S)
    assert (hold.job, hold.iteration) == ("b", 3)


def test_a_job_that_stays_away_between_phases_is_passed_over() -> None:
    turns = Turns(LEASE_S, "clock")
    form(turns, group_of(["a", "b"], 1), 0.0)
    turns.ask(Ask(job="a", phase="rollout", iteration=0))
    [hold] = turns.grant(0.0)
    turns.ask(Ask(job="b", phase="rollout", iteration=0))
    assert turns.grant(1.0) == [] and turns.holders_before("b") == ["a"]
    assert turns.release("a", hold.epoch, 1.0)
    [second] = turns.grant(1.0)
    assert turns.release("b", second.epoch, 2.0)
    turns.ask(Ask(job="b", phase="train", iteration=0))
    assert turns.grant(2.0) == [], "a trains first"
    [third] = turns.grant(2.0 + LEASE_S)
    assert (third.job, third.phase) == ("b", "train")
