"""The four policies and VersionRule as tables."""

from typing import Any

import pytest

from rose.errors import NoWorkerError
from rose.scheduler.rollout.placing.cost import CostPolicy
from rose.scheduler.rollout.placing.fleet import Fleet
from rose.scheduler.rollout.placing.policy import PaperPolicy, PinnedPolicy, PlacementPolicy, TurnwisePolicy
from rose.scheduler.rollout.placing.versions import NewestVersions, VersionMode, VersionRule
from rose.scheduler.rollout.placing.views import NO_RUN, NOBODY, Speed, TurnView, WorkerKind, WorkerView
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


def admits(rule: VersionRule, turn: TurnView, workers: list[WorkerView]) -> list[str]:
    """The live workers that the rule admits."""
    fleet = Fleet(workers)
    cohorts = rule.admits(turn, fleet.cohorts)
    return [w.id for w in workers if w.alive and fleet.is_in(w.id, cohorts)]


def heard(numbers: dict[str, int], models: list[str] | None = None) -> NewestVersions:
    newest = NewestVersions()
    for run_id, number in numbers.items():
        newest.heard(version(number, run_id), models, now=NOW)
    return newest


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
    assert PaperPolicy().pick(TurnView(session="t", affine=affine), Fleet(workers), NOW) == picked


@pytest.mark.parametrize(("until", "picked"), [(NOW + 0.5, "b"), (NOW, "a")])
def test_a_worker_that_failed_this_turn_is_avoided_for_a_while(until: float, picked: str) -> None:
    turn = TurnView(session="t", affine="a", avoid_until={"a": until})
    assert PaperPolicy().pick(turn, Fleet([dedicated("a"), dedicated("b")]), NOW) == picked


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
    assert PinnedPolicy().pick(TurnView(session="t", affine=affine), Fleet(workers), NOW) == picked


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
        (VersionRule(), TurnView(session="t"), ["v7", "other"]),
        (VersionRule(), TurnView(session="t", run_id="run"), ["v7"]),
        (VersionRule(), TurnView(session="t", pinned_version=version(5)), ["v7", "other"]),
        (VersionRule(mode=VersionMode.MAX_LAG, max_lag=1), TurnView(session="t", run_id="run"), ["v6", "v7"]),
        (VersionRule(mode=VersionMode.PINNED), TurnView(session="t", pinned_version=version(6)), ["v6"]),
        (VersionRule(mode=VersionMode.PINNED), TurnView(session="t", run_id="run"), ["v7"]),
        (VersionRule(mode=VersionMode.PINNED), TurnView(session="t", pinned_version=version(8)), []),
    ],
)
def test_version_rule_admits(rule: VersionRule, turn: TurnView, admitted: list[str]) -> None:
    assert admits(rule, turn, VERSIONED) == admitted


BEGUN_ANEW = [dedicated("base"), dedicated("v5", weight_version=version(5)), dedicated("dead", alive=False)]


@pytest.mark.parametrize(
    ("mode", "max_lag", "run_id", "known", "admitted"),
    [
        (VersionMode.LATEST, 0, None, {"run": 7}, []),
        (VersionMode.LATEST, 0, "run", {"run": 7}, []),
        (VersionMode.LATEST, 0, "run", {"run": 5}, ["v5"]),
        (VersionMode.LATEST, 0, "run", {"run": 4}, ["v5"]),
        (VersionMode.MAX_LAG, 2, "run", {"run": 7}, ["v5"]),
        (VersionMode.MAX_LAG, 1, "run", {"run": 7}, []),
        (VersionMode.MAX_LAG, 9, "run", {"run": 7}, ["v5"]),
        (VersionMode.PINNED, 0, "run", {"run": 7}, []),
        (VersionMode.LATEST, 0, None, {"other": 7}, ["v5"]),
        (VersionMode.LATEST, 0, "other", {"other": 7}, []),
        (VersionMode.LATEST, 0, "new", {"run": 7}, ["base"]),
    ],
)
def test_the_newest_version_outlives_its_workers_and_counts_for_its_own_run_alone(
    mode: VersionMode, max_lag: int, run_id: str | None, known: dict[str, int], admitted: list[str]
) -> None:
    rule = VersionRule(mode=mode, max_lag=max_lag, known=heard(known))
    assert admits(rule, TurnView(session="t", run_id=run_id), BEGUN_ANEW) == admitted


def test_the_newest_version_never_goes_back_until_its_run_is_forgotten() -> None:
    newest = NewestVersions()
    for number, run_id in ((7, "run"), (5, "run"), (0, "next")):
        newest.heard(version(number, run_id), now=NOW)
    assert newest.numbers == {"run": 7, "next": 0}
    newest.forget("run")
    newest.heard(version(1), now=NOW)
    assert newest.numbers == {"run": 1, "next": 0}


def test_no_workers_version_counts_as_newer_than_what_was_announced() -> None:
    absurd, next_one = version(999_999), version(8)
    workers = [
        dedicated("v7", weight_version=version(7)),
        dedicated("v8", weight_version=next_one),
        dedicated("absurd", weight_version=absurd),
        dedicated("v6", weight_version=version(6)),
    ]
    newest = heard({"run": 999_999})
    newest.announced(version(7), NOW)
    newest.heard(absurd, ["a"], now=NOW)
    assert (newest.numbers, newest.of("a")) == ({"run": 7}, {"run": 7})
    turn = TurnView(session="t", run_id="run")
    assert admits(VersionRule(known=newest), turn, workers) == ["v7", "v8", "absurd"]
    newest.announced(next_one, NOW)
    assert admits(VersionRule(known=newest), turn, workers) == ["v8", "absurd"]
    newest.announced(absurd, NOW)
    newest.heard(absurd, now=NOW)
    newest.announced(version(7), NOW)  # what is said last counts, so that a mistake does not last
    assert admits(VersionRule(known=newest), turn, workers) == ["v7", "v8", "absurd"]
    newest.forget("run")
    newest.heard(absurd, now=NOW)
    assert newest.numbers == {"run": 999_999}


def test_once_a_version_is_announced_base_weights_and_older_ones_take_no_turn_of_its_run() -> None:
    workers = [
        dedicated("base"),
        dedicated("v6", weight_version=version(6)),
        serving("v7", weight_version=version(7)),
        dedicated("other", weight_version=version(1, "other")),
    ]
    newest = NewestVersions()
    newest.announced(version(7), NOW)
    of_run, of_base = TurnView(session="t", run_id="run"), TurnView(session="t", run_id=NO_RUN)
    for mode, max_lag, admitted in (
        (VersionMode.LATEST, 0, ["v7"]),
        (VersionMode.MAX_LAG, 1, ["v6", "v7"]),
        (VersionMode.PINNED, 0, ["v7"]),
    ):
        rule = VersionRule(mode=mode, max_lag=max_lag, known=newest)
        assert admits(rule, of_run, workers) == admitted
        assert admits(rule, of_base, workers) == ["base"]
        assert not rule.are_held(of_run.wants, Fleet(workers[:1]).cohorts)
    newest.announced(version(8), NOW)
    assert admits(VersionRule(known=newest), of_run, workers) == []


def test_an_announced_version_keeps_no_turn_for_another_model_of_the_job_from_base_weights() -> None:
    workers = [dedicated("judge", models={"judge"}), dedicated("v0", models={"trained"})]
    newest, turn = NewestVersions(), TurnView(session="t", run_id="run", model="judge")
    newest.announced(version(0), NOW)
    assert admits(VersionRule(known=newest), turn, workers) == []  # nothing tells which model is trained
    newest.heard(version(0), ["trained"], now=NOW)
    assert admits(VersionRule(known=newest), turn, workers) == ["judge"]


def test_an_old_announcement_bounds_no_worker_that_has_newer_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    newest = heard({"run": 7})
    newest.announced(version(7), NOW)
    newest.heard(version(8), now=NOW + 600)
    newest.heard(version(7), now=NOW + 3600)  # an old one does no harm while nobody has newer weights
    assert (newest.numbers, caplog.messages) == ({"run": 7}, [])
    for number in (9, 10):
        newest.heard(version(number), now=NOW + 3600)
        assert newest.numbers == {"run": number}
    (message,) = caplog.messages
    assert "version 7 was announced more than 600 s ago, and a worker has run/9" in message
    newest.announced(version(9), NOW + 3600)
    assert newest.numbers == {"run": 9}


def test_a_run_that_was_announced_and_never_held_can_be_forgotten() -> None:
    newest = NewestVersions()
    newest.announced(version(9), NOW)
    newest.forget("run")
    assert newest.bound("run") == 0
    with pytest.raises(KeyError):
        newest.forget("run")


def test_the_newest_version_is_that_of_the_turns_model() -> None:
    newest = heard({"run": 7}, ["a", "both"])
    newest.heard(version(3), ["b", "both"], now=NOW)
    assert [newest.of(model) for model in ("a", "b", "both", "c")] == [{"run": 7}, {"run": 3}, {"run": 7}, {}]
    newest.heard(version(2, "next"), now=NOW)  # of a worker that does not say what it serves
    assert [newest.of(model) for model in ("b", "c")] == [{"run": 3, "next": 2}, {"next": 2}]
    newest.heard(version(1), ["d"], now=NOW)
    assert newest.of("d") == {"run": 1, "next": 2}
    newest.forget("run")
    assert [newest.of(model) for model in ("a", "d", None)] == [{"next": 2}] * 3


def test_a_pinned_version_that_no_worker_holds_is_an_error_not_a_wait() -> None:
    policy = PaperPolicy(versions=VersionRule(mode=VersionMode.PINNED))
    with pytest.raises(NoWorkerError, match="run/4"):
        policy.pick(TurnView(session="t", pinned_version=version(4)), Fleet(VERSIONED), NOW)


def test_workers_without_any_version_are_all_admitted() -> None:
    assert admits(VersionRule(), TurnView(session="t"), [dedicated("a"), serving("b")]) == ["a", "b"]


@pytest.mark.parametrize(("run_id", "picked"), [("run", "b"), ("other", "b"), (NO_RUN, "a"), (None, "a")])
def test_a_turn_of_a_run_gets_no_base_weights_of_a_worker_that_awaits_others(
    run_id: str | None, picked: str
) -> None:
    fleet = Fleet([dedicated("a", awaits_weights=True), dedicated("b", 3)])
    turn = TurnView(session="t", run_id=run_id)
    assert PaperPolicy().pick(turn, fleet, NOW) == picked
    fleet.drop("b")
    assert PaperPolicy().pick(turn, fleet, NOW) == ("a" if picked == "a" else None)
    fleet.put(dedicated("a", weight_version=version(1)))
    assert PaperPolicy().pick(turn, fleet, NOW) == ("a" if run_id in ("run", None) else None)


def test_a_worker_on_cooldown_still_counts_as_the_newest() -> None:
    new = dedicated("new", weight_version=version(2), not_before=NOW + 1)
    old = dedicated("old", weight_version=version(1))
    assert PaperPolicy().pick(TurnView(session="t"), Fleet([new, old]), NOW) is None


@pytest.mark.parametrize(
    ("workers", "picked"),
    [
        ([dedicated("a", 5), dedicated("b", 4)], "b"),
        ([dedicated("a", 16), serving("s", 2), serving("t", 1)], "t"),
        ([dedicated("a", 16), serving("s", 2, eligible=False)], None),
    ],
)
def test_turnwise_policy_goes_by_load_alone(workers: list[WorkerView], picked: str | None) -> None:
    assert TurnwisePolicy().pick(TurnView(session="t", affine="a"), Fleet(workers), NOW) == picked


POLICIES: list[PlacementPolicy] = [PaperPolicy(), PinnedPolicy(), TurnwisePolicy(), CostPolicy()]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("owner", "picked"), [(None, "s"), ("job", "s"), ("other", None), (NOBODY, None)])
def test_a_serving_gpu_takes_turns_of_the_job_that_borrowed_it_alone(
    policy: PlacementPolicy, owner: str | None, picked: str | None
) -> None:
    assert policy.pick(TurnView(session="t", job="job"), Fleet([serving("s", owner=owner)]), NOW) == picked


OF_MODELS = [
    dedicated("b0", models={"b"}, weight_version=version(9)),
    dedicated("a1", 5, models={"a", "b"}, weight_version=version(4)),
    serving("a2", 2, models={"a"}, weight_version=version(4)),
    dedicated("any", 9, weight_version=version(4)),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("model", "affine", "picked"),
    [
        ("a", None, "a1"),
        ("a", "b0", "a1"),
        ("c", None, "any"),
        ("c", "b0", "any"),
        (None, "b0", "b0"),
        ("b", "b0", "b0"),
    ],
)
def test_a_turn_goes_to_a_worker_of_its_model_or_one_that_does_not_say(
    policy: PlacementPolicy, model: str | None, affine: str | None, picked: str
) -> None:
    if isinstance(policy, PinnedPolicy) and model == "a":
        picked = "a2"  # whatever its kind
    assert policy.pick(TurnView(session="t", model=model, affine=affine), Fleet(OF_MODELS), NOW) == picked
    without = [worker for worker in OF_MODELS if worker.id == "b0"]
    assert policy.pick(TurnView(session="t", model="a", affine="b0"), Fleet(without), NOW) is None


FAST = Speed(prefill_s_per_token=1e-4, step_s=0.01, step_s_per_turn=0.001)


def known(name: str, in_flight: int = 0, **fields: object) -> WorkerView:
    return serving(name, in_flight, **{"share": 1.0, "speed": FAST, "share_until": NOW + 1, **fields})


@pytest.mark.parametrize(
    ("workers", "cached", "picked"),
    [
        ([known("a", 3), known("b", 1)], {}, "b"),
        ([known("a", share=0.25), known("b", 3)], {}, "b"),
        ([known("a", share=0.3), known("b", 3)], {"a": 20_000}, "a"),
        ([known("a", 2), known("b")], {"a": 19_000}, "a"),
        ([known("a", 2), known("b")], {"a": 100}, "b"),
        ([known("a", share=0.5), known("b")], {"a": 20_000}, "a"),
        ([known("a", pending_prefill_tokens=120_000), known("b", 1)], {}, "b"),
        ([known("a", share=0.0), known("b", 8)], {}, "b"),
        ([known("a", 16), known("b", 16)], {}, None),
    ],
)
def test_cost_policy_weighs_prefix_backlog_batch_and_share(
    workers: list[WorkerView], cached: dict[str, float], picked: str | None
) -> None:
    turn = TurnView(session="t", prompt_tokens=20_000, expected_tokens=200, cached_tokens=cached)
    assert CostPolicy().pick(turn, Fleet(workers), NOW) == picked


@pytest.mark.parametrize("unknown", [{"share": None}, {"share_until": NOW}])
def test_cost_policy_is_the_papers_while_telemetry_is_missing_or_stale(unknown: dict[str, Any]) -> None:
    turn = TurnView(session="t", affine="a", prompt_tokens=100, expected_tokens=100)
    workers = [known("a", 9), known("b"), known("c", **unknown)]
    fleet = Fleet(workers)
    assert CostPolicy().pick(turn, fleet, NOW) == PaperPolicy().pick(turn, fleet, NOW) == "a"
    assert CostPolicy().pick(turn, Fleet(workers[:2]), NOW) == "b"


@pytest.mark.parametrize("policy", POLICIES)
def test_turns_that_are_alike_find_a_place_together_or_not_at_all(policy: PlacementPolicy) -> None:
    workers = [dedicated("a", 16), dedicated("b", 3, models={"m"}), serving("s", owner="x", models={"n"})]
    turns = [
        TurnView(session=str(i), job=job, model=model, affine=affine, avoid_until=avoid)
        for i, (job, model, affine, avoid) in enumerate(
            (job, model, affine, avoid)
            for job in ("x", "y")
            for model in ("m", "n", "o", None)
            for affine in ("a", "b", None)
            for avoid in ({}, {"b": NOW + 1}, {"b": NOW - 1})
        )
    ]
    found: dict[object, set[bool]] = {}
    for turn in turns:
        is_placed = policy.pick(turn, Fleet(workers), NOW) is not None
        found.setdefault(policy.likeness(turn, NOW), set()).add(is_placed)
    assert all(len(outcomes) == 1 for outcomes in found.values())


def test_a_worker_of_unknown_speed_counts_as_the_slowest_and_none_known_means_paper() -> None:
    slow = Speed(prefill_s_per_token=2e-4, step_s=0.02, step_s_per_turn=0.001)
    turn = TurnView(session="t", affine="a", prompt_tokens=100, expected_tokens=100)
    assert CostPolicy().pick(turn, Fleet([known("a", 9), known("b", speed=None)]), NOW) == "b"
    three = Fleet([known("a", 2), known("b", speed=None), known("c", 15, speed=slow)])
    assert CostPolicy().pick(turn, three, NOW) == "a"
    assert CostPolicy().pick(turn, Fleet([known("a", 9, speed=None), known("b", speed=None)]), NOW) == "a"
