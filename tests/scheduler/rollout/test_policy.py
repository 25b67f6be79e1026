"""PaperPolicy, PinnedPolicy and VersionRule as tables."""

import pytest

from rose.errors import NoWorkerError
from rose.scheduler.rollout.policy import (
    PaperPolicy,
    PinnedPolicy,
    Turn,
    VersionMode,
    VersionRule,
    WorkerKind,
    WorkerView,
)
from rose.types import WeightVersion

NOW = 100.0


def dedicated(name: str, in_flight: int = 0, **fields: object) -> WorkerView:
    return _view(name, WorkerKind.DEDICATED, in_flight, fields)


def serving(name: str, in_flight: int = 0, **fields: object) -> WorkerView:
    return _view(name, WorkerKind.SERVING, in_flight, fields)


def _view(name: str, kind: WorkerKind, in_flight: int, fields: dict[str, object]) -> WorkerView:
    values: dict[str, object] = {"alive": True, "cap": 16, "load": in_flight / 16, **fields}
    return WorkerView(id=name, kind=kind, in_flight=in_flight, **values)  # type: ignore[arg-type]


def version(number: int, run_id: str = "run") -> WeightVersion:
    return WeightVersion(run_id=run_id, number=number)


@pytest.mark.parametrize(
    ("affine", "workers", "picked"),
    [
        ("a", [dedicated("a", 15), dedicated("b")], "a"),
        ("a", [dedicated("a", 16), dedicated("b", 3)], "b"),
        ("a", [dedicated("a", alive=False), dedicated("b", 3)], "b"),
        ("s", [serving("s", 5), dedicated("b")], "s"),
        ("s", [serving("s", 5, eligible=False), dedicated("b")], "b"),
        ("gone", [dedicated("a", 2), dedicated("b", 1)], "b"),
        (None, [serving("s"), dedicated("a", 15)], "a"),
        (None, [serving("s", 4), serving("t", 2), dedicated("a", 16)], "t"),
        (None, [serving("s", 4), serving("t", 2, eligible=False), dedicated("a", 16)], "s"),
        (None, [serving("s", eligible=False), dedicated("a", 16)], None),
        (None, [dedicated("b", 1), dedicated("a", 1)], "a"),
        (None, [dedicated("a", not_before=NOW + 1), dedicated("b", 9)], "b"),
        (None, [dedicated("a", not_before=NOW), dedicated("b", 9)], "a"),
        (None, [], None),
    ],
)
def test_paper_policy_picks_affine_then_dedicated_then_eligible_serving_then_queues(
    affine: str | None, workers: list[WorkerView], picked: str | None
) -> None:
    assert PaperPolicy().pick(Turn(session="t", affine=affine), workers, NOW) == picked


@pytest.mark.parametrize(("until", "picked"), [(NOW + 0.5, "b"), (NOW, "a")])
def test_a_worker_that_failed_this_turn_is_avoided_for_a_while(until: float, picked: str) -> None:
    turn = Turn(session="t", affine="a", avoid_until={"a": until})
    assert PaperPolicy().pick(turn, [dedicated("a"), dedicated("b")], NOW) == picked


@pytest.mark.parametrize(
    ("affine", "workers", "picked"),
    [
        (None, [dedicated("a", 2), dedicated("b", 1)], "b"),
        ("a", [dedicated("a", 15), dedicated("b")], "a"),
        ("a", [dedicated("a", 16), dedicated("b")], None),
        ("a", [dedicated("a", alive=False), dedicated("b")], "b"),
    ],
)
def test_pinned_policy_waits_for_the_first_worker_unless_it_died(
    affine: str | None, workers: list[WorkerView], picked: str | None
) -> None:
    assert PinnedPolicy().pick(Turn(session="t", affine=affine), workers, NOW) == picked


VERSIONED = [
    dedicated("base", weight_version=None),
    dedicated("v5", 1, weight_version=version(5)),
    dedicated("v6", 2, weight_version=version(6)),
    dedicated("v7", 3, weight_version=version(7)),
    dedicated("v8", 0, weight_version=version(8), alive=False),
    dedicated("other", 9, weight_version=version(2, "other")),
]


@pytest.mark.parametrize(
    ("rule", "turn", "admitted"),
    [
        (VersionRule(), Turn(session="t"), ["v7", "other"]),
        (VersionRule(), Turn(session="t", run_id="run"), ["v7"]),
        (VersionRule(), Turn(session="t", pinned_version=version(5)), ["v7", "other"]),
        (VersionRule(mode=VersionMode.MAX_LAG, max_lag=1), Turn(session="t", run_id="run"), ["v6", "v7"]),
        (VersionRule(mode=VersionMode.PINNED), Turn(session="t", pinned_version=version(6)), ["v6"]),
        (VersionRule(mode=VersionMode.PINNED), Turn(session="t", run_id="run"), ["v7"]),
        (VersionRule(mode=VersionMode.PINNED), Turn(session="t", pinned_version=version(8)), []),
    ],
)
def test_version_rule_admits(rule: VersionRule, turn: Turn, admitted: list[str]) -> None:
    assert [w.id for w in rule.admits(turn, VERSIONED)] == admitted


def test_a_pinned_version_that_no_worker_holds_is_an_error_not_a_wait() -> None:
    policy = PaperPolicy(versions=VersionRule(mode=VersionMode.PINNED))
    with pytest.raises(NoWorkerError, match="run/4"):
        policy.pick(Turn(session="t", pinned_version=version(4)), VERSIONED, NOW)


def test_workers_without_any_version_are_all_admitted() -> None:
    assert len(VersionRule().admits(Turn(session="t"), [dedicated("a"), serving("b")])) == 2


def test_a_worker_on_cooldown_still_counts_as_the_newest() -> None:
    new = dedicated("new", weight_version=version(2), not_before=NOW + 1)
    old = dedicated("old", weight_version=version(1))
    assert PaperPolicy().pick(Turn(session="t"), [new, old], NOW) is None
