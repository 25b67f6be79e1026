"""How attempts on Ray end, and what holds their nodes until then. No Ray cluster runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served_cluster import wait_until

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

from rose.jobs.on_ray import ending, groups, parts  # noqa: E402 - loads Ray
from rose.jobs.on_ray.actors import Begun, Where  # noqa: E402
from rose.jobs.on_ray.adopt import find  # noqa: E402
from rose.jobs.on_ray.attempt import RayAttempt  # noqa: E402
from rose.jobs.on_ray.ending import AttemptSetup, Remains  # noqa: E402
from rose.jobs.on_ray.parts import PartRef, confirm_end  # noqa: E402
from rose.jobs.ranks import HostPart  # noqa: E402
from rose.scheduler.runtime.channel.messages import Start  # noqa: E402
from rose.scheduler.runtime.job.job import JobNode  # noqa: E402
from rose.scheduler.runtime.job.spec import RayClusterSpec, RunSpec  # noqa: E402

SPEC = RunSpec.model_validate(
    {
        "name": "a",
        "command": ["x"],
        "phases": {"rollout": {"seconds": 1.0}, "train": {"seconds": 1.0}},
        "max_tokens": 64,
        "iterations": 1,
    }
)
ORDER = Start(job="a", attempt=3, spec=SPEC.model_dump(), first_iteration=0, group="g/1", rollout_nodes=[0])
PLACED = "root/g/1/rollout-0+train-0/11111111"
PART = "part/a/3/g/1/rollout-0/node-1"


class Question:
    """A call of an actor. Its answer comes after `after_s`, and is raised if it is an error."""

    def __init__(self, answer: Any, clock: "Clock", after_s: float = 0.0) -> None:
        self.answer, self.at_s = answer, clock.now_s + after_s


class Clock:
    """Time passes only while something is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        for module in (parts, groups):
            monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray, "get", self._get)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def _wait(self, asked: list[Question], num_returns: int = 1, timeout: float = 0.0) -> tuple[Any, Any]:
        if not all(each.at_s <= self.now_s for each in asked):
            self.now_s += timeout
        done = [each for each in asked if each.at_s <= self.now_s]
        return done, [each for each in asked if each not in done]

    def _get(self, asked: Question | list[Question]) -> Any:
        if isinstance(asked, list):
            return [self._get(each) for each in asked]
        if isinstance(asked.answer, Exception):
            raise asked.answer
        return asked.answer


class Actor:
    """An actor whose every method asks what `answers` says."""

    def __init__(self, **answers: Callable[[], Question]) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": staticmethod(lambda *_: self._answers[name]())})


class Nodes:
    """Ray's nodes, of which one is alive as often as was said. Each other look fails or finds it dead."""

    def __init__(self, *looks: bool | Exception) -> None:
        self._looks = list(looks)

    def is_alive(self, ray_node: str) -> bool:
        look = self._looks.pop(0) if self._looks else False
        if isinstance(look, Exception):
            raise look
        return look


class Groups:
    """Notes who has left."""

    lifetime = "detached"

    def __init__(self, seat: Exception | None = None) -> None:
        self.left: list[str] = []
        self._seat = seat

    def seat(self, *_: object, **__: object) -> None:
        if self._seat is not None:
            raise self._seat

    def vacate(self, job: str) -> None:
        pass

    def leave(self, job: str) -> None:
        self.left.append(job)


def attempt_setup(nodes: Any, groups: Any) -> AttemptSetup:
    return AttemptSetup(nodes=nodes, groups=groups, channel="unix:/c", root="root", hung_s=60.0)


def begun() -> Begun:
    nodes = tuple(JobNode(name=name, address="h") for name in ("rollout-0", "train-0"))
    part = HostPart(nodes=nodes, master_port=1)
    return Begun(order=ORDER, part=part, ray_nodes=("node-1", "node-2"), identity="1:1", pids=[2])


def find_one(monkeypatch: pytest.MonkeyPatch, actor: Actor, hung_s: float = 60.0) -> Any:
    """What is found of an attempt of one part, the group's nodes, and the freed placement groups."""
    freed: list[str] = []
    monkeypatch.setattr(ray.util, "list_named_actors", lambda: [PART])
    monkeypatch.setattr(ray, "get_actor", lambda name: actor)
    tables = {name: {"name": name, "state": "CREATED"} for name in (PLACED, "root/other/train-0/22222222")}
    monkeypatch.setattr(ray.util, "placement_group_table", lambda: tables)
    monkeypatch.setattr(ray.util, "get_placement_group", lambda name: name)
    monkeypatch.setattr(groups, "remove_placement_group", freed.append)
    nodes = groups.GroupNodes(RayClusterSpec(), "root")
    return *find(nodes, hung_s), nodes, freed


def test_the_nodes_of_a_broken_attempt_are_kept_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    actor = Actor(begun=lambda: Question(None, clock))  # it was only prepared
    survivors, broken, nodes, freed = find_one(monkeypatch, actor)
    assert not survivors and (broken["a"].attempt, broken["a"].group) == (3, "g/1")
    assert freed == ["root/other/train-0/22222222"]
    assert nodes.view({"node-1"}).leaving == ["a"], "its Ray node is known"
    nodes.leave("a")
    assert PLACED in freed


@pytest.mark.parametrize(("hung_s", "is_adopted"), [(60.0, True), (20.0, False)])
def test_a_part_has_the_clusters_time_to_answer_the_next_scheduler(
    monkeypatch: pytest.MonkeyPatch, hung_s: float, is_adopted: bool
) -> None:
    clock = Clock(monkeypatch)
    survivors, broken, _, freed = find_one(
        monkeypatch, Actor(begun=lambda: Question(begun(), clock, after_s=40.0)), hung_s
    )
    assert [each.order.attempt for each in survivors] == ([3] if is_adopted else [])
    assert list(broken) == ([] if is_adopted else ["a"]) and PLACED not in freed


def test_an_attempt_ends_though_ray_fails_and_gives_its_nodes_back_only_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ending, "RETRY_S", 0.05)
    held = Groups()
    nodes = Nodes(RuntimeError("no head"), RuntimeError("no head"))
    said: list[list[str]] = []
    part = PartRef(node="rollout-0", ray_node="node-1", actor=Actor())
    remains = Remains("a", [part], attempt_setup(nodes, held), lambda lines, runs: said.append(lines))
    remains.leave_group()
    wait_until(lambda: remains.ended() is not None, "its end")
    ended = remains.ended()
    assert ended is not None and ended.lost is not None and held.left == ["a"]
    assert said == [["waits for Ray, to end it: no head"]]


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.ActorAlreadyExistsError("The name part/a is already taken"),
        ValueError("The name part/a is already taken"),
        TypeError("The name part/a is already taken"),
    ],
)
def test_an_error_of_the_runner_or_of_ray_is_a_crash_and_not_the_jobs_end(
    tmp_path: Path, error: Exception
) -> None:
    attempt = RayAttempt(
        SPEC,
        ORDER,
        setup=attempt_setup(Nodes(), Groups(seat=error)),
        code=lambda: None,
        log=tmp_path / "a.log",
        say=lambda lines, runs: None,
    )
    wait_until(lambda: attempt.ended() is not None, "its end")
    ended = attempt.ended()
    assert ended is not None and ended.exit_status == -9
    assert ended.cannot_start is None and "already taken" in str(ended.why)


def test_a_part_whose_processes_do_not_end_is_told_with_its_pids(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    gone = ray.exceptions.ActorDiedError()
    sweeps = [[7], [7], []]

    def sweep(*_: object) -> list[int]:
        clock.sleep(10.0)
        return sweeps.pop(0)

    monkeypatch.setattr(parts, "_sweep", sweep)
    said: list[list[str]] = []
    part = PartRef(node="rollout-0", ray_node="node-1", actor=Actor(kill=lambda: Question(gone, clock)))
    nodes: Any = Nodes(*[True] * 20)
    confirm_end(part, nodes, "root", "a", look=lambda: None, say=said.append)
    assert len(said) == 2 and not sweeps
    assert "waits for the end of rollout-0 on Ray node node-1" in said[0][0]
    assert "pids [7] run on after SIGKILL" in said[0][0]


def test_a_part_that_ray_can_not_reach_is_killed_before_its_host_counts_as_swept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    answers = [ray.exceptions.ActorUnavailableError("no route", None), ray.exceptions.ActorDiedError()]
    seen: list[str] = []
    monkeypatch.setattr(ray, "kill", lambda actor: seen.append("kill"))

    def sweep(*_: object) -> list[int]:
        seen.append("sweep")
        return []

    monkeypatch.setattr(parts, "_sweep", sweep)
    actor = Actor(kill=lambda: Question(answers.pop(0), clock))
    part = PartRef(node="rollout-0", ray_node="node-1", actor=actor)
    nodes: Any = Nodes(*[True] * 5)
    confirm_end(part, nodes, "root", "a", look=lambda: None, say=lambda _: None)
    assert seen == ["kill", "sweep"]


def test_keepers_that_answer_slowly_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    where = Where(ray_node="node-1", address="h", devices=())
    names = ("rollout-0", "train-0")
    num_asked = 0

    def ask() -> Question:
        nonlocal num_asked
        num_asked += 1
        return Question(where, clock, after_s=4 * groups.FRESH_S)

    table = {"state": "CREATED", "bundles_to_node_id": {0: "node-1", 1: "node-1"}}
    monkeypatch.setattr(ray.util, "placement_group_table", lambda pg: table)
    nodes = groups.GroupNodes(RayClusterSpec(), "root")
    keepers: dict[str, Any] = {name: Actor(where=ask) for name in names}
    nodes._groups["g"] = [groups._Placed(nodes=names, name="root/g", pg=None, keepers=keepers)]

    def is_wanted() -> bool:
        return clock.now_s < 10 * groups.FRESH_S

    seats = nodes.seat("a", "g", names, SPEC.placement, is_wanted, lambda spots: None)
    assert seats is not None and [seat.ray_node for seat in seats] == ["node-1", "node-1"]
    assert num_asked == 2
