"""Running jobs that change their group, with a clock of the test's own."""

import random
from typing import Any

import pytest
from lone_scheduler import HOUR_S, Scheduler, long_job, only

from rose.scheduler.runtime.channel.messages import (
    Answer,
    Cancel,
    Completed,
    Exited,
    Granted,
    Hello,
    Overview,
    Release,
    SchedulerMessage,
    Start,
    Status,
)

PAUSE_S = 60.0


class Moving:
    """a beside x, b in a group of its own; then x ends, and one of the others goes to the other."""

    def __init__(self, **cluster: Any) -> None:
        self.scheduler = Scheduler(**{"policy": "lifetime", "groups": {}, "move_pause_s": PAUSE_S, **cluster})
        self.scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
        for name in ("a", "x", "b"):
            assert only(Answer, self.scheduler.submit(name, **long_job(name))).error is None
        assert [self.group(name) for name in ("a", "x", "b")] == ["group-1", "group-1", "group-2"]

    def group(self, name: str) -> str:
        return str(self.scheduler.job(name)["group"])

    def end_x(self) -> list[SchedulerMessage]:
        self.scheduler.call(Cancel, job="x")
        return self.scheduler.call(Exited, job="x", attempt=1, exit_status=-15, client="runner")

    def mover(self) -> str:
        [found] = [name for name in ("a", "b") if self.scheduler.job(name)["moving_to"] is not None]
        return found

    def groups(self) -> dict[str, dict[str, Any]]:
        reply = only(Answer, self.scheduler.call(Status))
        return {name: each["jobs"] for name, each in reply.body["groups"].items()}

    def run_phase(self, job: str, phase: str, iteration: int = 0) -> None:
        grant = only(Granted, self.scheduler.request(job, phase, iteration))
        reply = self.scheduler.call(Release, job=job, attempt=1, phase=phase, epoch=grant.epoch, client=job)
        assert only(Answer, [each for each in reply if isinstance(each, Answer)]).error is None

    def complete(self, job: str, iteration: int = 0) -> dict[str, Any]:
        answers = self.scheduler.call(Completed, job=job, attempt=1, iteration=iteration, client=job)
        reply = only(Answer, answers)
        assert reply.error is None
        return dict(reply.body)


def test_a_job_ends_its_iteration_where_it_is_and_goes_on_in_the_other_group() -> None:
    moving = Moving()
    moving.end_x()
    mover = moving.mover()
    old, new = moving.group(mover), moving.scheduler.job(mover)["moving_to"]
    assert {old, new} == {"group-1", "group-2"}
    assert mover in moving.groups()[new], "its place is taken from the decision on"
    moving.run_phase(mover, "rollout")
    assert moving.groups()[old] == {mover: [0]}
    moving.run_phase(mover, "train")
    assert moving.complete(mover) == {"group": new, "rollout_nodes": [0], "ends": False}
    assert moving.groups() == {new: {"a": [0], "b": [0]}}, "the other group's nodes are given back"
    moving.scheduler.wait(5.0)
    other = "b" if mover == "a" else "a"
    only(Granted, moving.scheduler.request(mover, "rollout", 1))
    assert not moving.scheduler.request(other), "now the two take turns"
    [move] = moving.scheduler.job(mover)["moves"]
    assert (move["from"]["group"], move["to"]["group"]) == (old, new)
    assert (move["iteration"], move["is_warm"], move["pause_s"]) == (1, True, 5.0)
    assert "moved by lifetime, $" in move["why"]
    seen = only(Answer, moving.scheduler.call(Overview)).body["jobs"]
    assert [each["moves"] for each in seen if each["name"] == mover] == [[move]]


@pytest.mark.parametrize("when", ["decided", "rollout", "trained", "begun", "arrived"])
@pytest.mark.parametrize("is_same_clock", [True, False])
def test_a_scheduler_that_is_killed_in_the_middle_of_a_move_goes_on_with_it(
    when: str, is_same_clock: bool
) -> None:
    moving = Moving()

    def maybe_restart(point: str) -> None:
        if point == when:
            scheduler = moving.scheduler
            clock = "clock 1" if is_same_clock else "clock 2"
            scheduler.restart(scheduler.now if is_same_clock else 5.0, clock)

    moving.end_x()
    mover = moving.mover()
    new = moving.scheduler.job(mover)["moving_to"]
    maybe_restart("decided")
    grant = only(Granted, moving.scheduler.request(mover))
    maybe_restart("rollout")
    moving.scheduler.call(Release, job=mover, attempt=1, phase="rollout", epoch=grant.epoch, client=mover)
    moving.run_phase(mover, "train")
    maybe_restart("trained")
    place = moving.complete(mover)
    maybe_restart("begun")
    assert moving.complete(mover) == place == {"group": new, "rollout_nodes": [0], "ends": False}, (
        "asked again"
    )
    moving.scheduler.wait(2.0)
    only(Granted, moving.scheduler.request(mover, "rollout", 1))
    maybe_restart("arrived")
    job = moving.scheduler.job(mover)
    assert (job["iterations"][0], job["attempt"], job["restarts"]) == (1, 1, 0)
    assert [each["pause_s"] for each in job["moves"]] == [2.0]
    assert moving.groups() == {new: {"a": [0], "b": [0]}}


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_job_that_is_killed_in_the_middle_of_a_move_starts_again_in_the_new_group(is_begun: bool) -> None:
    moving = Moving()
    moving.run_phase("a", "rollout")
    moving.end_x()
    mover = moving.mover()
    new = moving.scheduler.job(mover)["moving_to"]
    if is_begun:
        moving.complete(mover)
    answers = moving.scheduler.call(Exited, job=mover, attempt=1, exit_status=-9, client="runner")
    start = only(Start, answers)
    assert (start.attempt, start.first_iteration, start.group) == (2, int(is_begun), new)
    assert moving.groups() == {new: {"a": [0], "b": [0]}}
    moving.scheduler.wait(1.0)
    only(Granted, moving.scheduler.request(mover, "rollout", int(is_begun), attempt=2))
    [move] = moving.scheduler.job(mover)["moves"]
    assert (move["is_warm"], move["pause_s"]) == (is_begun, 1.0)


@pytest.mark.parametrize("name", ["mover", "other"])
def test_a_job_that_ends_before_a_move_leaves_nothing_behind(name: str) -> None:
    moving = Moving()
    moving.end_x()
    mover = moving.mover()
    new = moving.scheduler.job(mover)["moving_to"]
    ends = mover if name == "mover" else {"a": "b", "b": "a"}[mover]
    moving.scheduler.call(Cancel, job=ends)
    moving.scheduler.call(Exited, job=ends, attempt=1, exit_status=-15, client="runner")
    if name == "other":
        assert moving.complete(mover)["group"] == new
        only(Granted, moving.scheduler.request(mover, "rollout", 1))
        assert moving.groups() == {new: {mover: [0]}}
        return
    assert moving.groups() == {new: {({"a": "b", "b": "a"}[mover]): [0]}}


def test_a_job_that_arrives_finds_the_groups_as_they_will_be() -> None:
    """Else it would be packed beside the job that leaves, and the move would gain nothing."""
    moving = Moving()
    moving.end_x()
    mover = moving.mover()
    old, new = moving.group(mover), moving.scheduler.job(mover)["moving_to"]
    reply = only(Answer, moving.scheduler.submit("c", **long_job("c")))
    assert reply.body["group"] not in (old, new), "one is given up, the other is full"


@pytest.mark.parametrize(
    "cluster",
    [{"policy": "lifetime-static"}, {"move_pause_s": 200 * HOUR_S}],
    ids=["static", "a pause beyond the SLO"],
)
def test_no_job_is_moved_where_that_is_not_wanted(cluster: dict[str, Any]) -> None:
    moving = Moving(**cluster)
    moving.end_x()
    assert [moving.scheduler.job(name)["moving_to"] for name in "ab"] == [None, None]


def test_a_job_that_named_its_group_stays_there() -> None:
    moving = Moving()
    moving.scheduler.submit("p", **long_job("p", group="group-2"))
    moving.scheduler.call(Cancel, job="b")
    moving.scheduler.call(Exited, job="b", attempt=1, exit_status=-15, client="runner")
    moving.end_x()
    assert [moving.scheduler.job(name)["moving_to"] for name in "ap"] == ["group-2", None]


def test_the_nodes_that_a_job_leaves_in_a_group_are_used_again() -> None:
    """With one of two rollout nodes unused, the policy is asked as if it were given back."""
    scheduler = Scheduler(groups={})
    train = {"seconds": 1.0, "memory_gb": 1}
    for name in ("a", "b"):
        phases = {"rollout": {"seconds": HOUR_S}, "train": train}
        scheduler.submit(name, **{**long_job(name, 1.01), "phases": phases})
    assert scheduler.job("b")["group"] == "group-1", "on a rollout node of its own"
    scheduler.call(Cancel, job="a")
    phases = {"rollout": {"seconds": HOUR_S}, "train": train}
    reply = only(Answer, scheduler.submit("c", **{**long_job("c", 1.01), "phases": phases}))
    assert (reply.body["group"], reply.body["rollout_nodes"]) == ("group-1", [0])


class Client:
    """A job's process: asks again until it is answered, as ControlClient does."""

    def __init__(self, name: str, num_iterations: int) -> None:
        self.name, self.num_iterations = name, num_iterations
        self.attempt, self.iteration, self.phase = 1, 0, "rollout"
        self.epoch: int | None = None
        self.done: list[tuple[int, str]] = []


class RandomDay:
    """Jobs that come, end, crash and lose their scheduler at random, all of them on one clock."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(policy="lifetime", groups={}, move_pause_s=1.0, lease_s=1e7)
        self.scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
        self.clients: dict[str, Client] = {}
        self.granted: dict[str, Granted] = {}
        self.completed: dict[str, list[int]] = {}

    def play(self, number: int) -> None:
        """Lets one thing happen: a job comes, one crashes, or one makes a step."""
        running = [each for each in self.clients.values() if each.iteration < each.num_iterations]
        choice = self.rng.random()
        if number < 300 and choice < 0.1 and len(running) < 8:
            self._submit(f"j{number}")
        elif choice < 0.13 and running:
            crashed = self.rng.choice(running)
            self.granted.pop(crashed.name, None)
            self._exit(crashed, 1)
        elif running:
            self.scheduler.now += self.rng.random() * HOUR_S
            self.scheduler.control.tick(self.scheduler.now)
            self._hear(self.scheduler.wait(0.25))
            self._step(self.rng.choice(running))

    def check_nodes(self) -> None:
        """Checks that no node is held by two phases at once, and that nothing is miscounted."""
        state = self.scheduler.control._state
        state.groups.check_integrity(self.scheduler.now)
        assert set(state.live) | set(state.ended) == set(state.jobs)
        assert sum(state.num_in_state.values()) == len(state.jobs)
        groups = only(Answer, self.scheduler.call(Status)).body["groups"]
        for group in groups.values():
            used = [
                node if phase == "rollout" else "train"
                for job, phase in group["holders"].items()
                for node in (group["jobs"][job] if phase == "rollout" else [0])
            ]
            assert len(used) == len(set(used)), group

    def num_moves(self) -> int:
        """Checks each job's iterations, and returns how many moves were made."""
        num_moves = 0
        for name, client in self.clients.items():
            job = self.scheduler.job(name)
            num_moves += len(job["moves"])
            if job["state"] != "failed":
                assert self.completed[name] == list(range(client.iteration)), "each once, in order"
                assert job["iterations"][0] == client.iteration
        return num_moves

    def _submit(self, name: str) -> None:
        self.clients[name] = client = Client(name, self.rng.randint(2, 12))
        self.completed[name] = []
        train_s = self.rng.choice([0.3, 1.0]) * HOUR_S
        phases = {"rollout": {"seconds": HOUR_S}, "train": {"seconds": train_s}}
        fields = {"iterations": client.num_iterations, "phases": phases}
        self._hear(
            self.scheduler.submit(name, **{**long_job(name, self.rng.choice([1.1, 1.5, 2.2])), **fields})
        )

    def _step(self, client: Client) -> None:
        """Asks for the client's next permit, or releases the one that it has."""
        held = self.granted.pop(client.name, None)
        if held is None:
            self._hear(self.scheduler.request(client.name, client.phase, client.iteration, client.attempt))
            return
        common: dict[str, Any] = {"job": client.name, "attempt": client.attempt, "client": client.name}
        call = dict(phase=held.phase, epoch=held.epoch, **common)
        if self.rng.random() < 0.1:  # its answer is lost with the scheduler
            self.scheduler.call(Release, **call)
            self.scheduler.restart(self.scheduler.now, "clock 1")
        for reply in self._hear(self.scheduler.call(Release, **call)):
            assert reply.error is None
        if client.phase == "rollout":
            client.phase = "train"
            return
        for _ in range(self.rng.choice([1, 1, 2])):
            [reply] = self._hear(self.scheduler.call(Completed, iteration=client.iteration, **common))
            assert reply.error is None
            if self.rng.random() < 0.1:
                self.scheduler.restart(self.scheduler.now, "clock 1")
        self.completed[client.name].append(client.iteration)
        client.iteration, client.phase = client.iteration + 1, "rollout"
        if client.iteration == client.num_iterations:
            self._exit(client, 0)

    def _exit(self, client: Client, exit_status: int) -> None:
        exited = {"job": client.name, "attempt": client.attempt, "exit_status": exit_status}
        self._hear(self.scheduler.call(Exited, client="runner", **exited))

    def _hear(self, messages: list[SchedulerMessage]) -> list[Answer]:
        """Takes permits and starts down for the clients, and returns the answers."""
        for each in messages:
            if isinstance(each, Granted):
                self.granted[each.job] = each
            elif isinstance(each, Start) and each.job in self.clients:
                client = self.clients[each.job]
                client.attempt, client.iteration, client.phase = each.attempt, each.first_iteration, "rollout"
                self.granted.pop(each.job, None)
        return [each for each in messages if isinstance(each, Answer)]


@pytest.mark.slow
def test_no_iteration_is_lost_or_run_twice_whoever_is_killed() -> None:
    num_moves = 0
    for seed in range(12):
        day = RandomDay(seed)
        for number in range(400):
            day.play(number)
            day.check_nodes()
        num_moves += day.num_moves()
    assert num_moves >= 12
