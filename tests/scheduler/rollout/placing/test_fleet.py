"""A fleet's decisions are those of a look at every worker, whatever has happened to the workers."""

from hypothesis import given
from hypothesis import strategies as st

from rose.scheduler.rollout.placing.cost import CostPolicy
from rose.scheduler.rollout.placing.fleet import Fleet
from rose.scheduler.rollout.placing.policy import PaperPolicy, PinnedPolicy, PlacementPolicy, TurnwisePolicy
from rose.scheduler.rollout.placing.versions import NewestVersions, VersionGone, VersionMode, VersionRule
from rose.scheduler.rollout.placing.views import NO_RUN, NOBODY, Speed, TurnView, WorkerKind, WorkerView
from rose.types import WeightVersion
from tests.scheduler.rollout.placing.full_scan import picked

NOW = 100.0
NAMES = st.sampled_from("abcdefgh")
MODELS = st.sampled_from(["m", "n"])
CONTEXTS = st.sampled_from([10, 20, 30])
JOBS = st.sampled_from(["x", "y"])
MOMENTS = st.sampled_from([0.0, NOW, NOW + 1])
VERSIONS = st.builds(WeightVersion, run_id=st.sampled_from("rs"), number=st.integers(0, 2))
ADAPTERS = st.builds(WeightVersion, run_id=MODELS, number=st.integers(0, 2))
"""Their runs are the models' names."""
SPEEDS = st.builds(
    lambda one: Speed(prefill_s_per_token=one * 1e-4, step_s=one * 0.01, step_s_per_turn=0.001),
    st.sampled_from([1, 2, 3]),
)


@st.composite
def worker_views(draw: st.DrawFn) -> WorkerView:
    in_flight = draw(st.integers(0, 3))
    return WorkerView(
        id=draw(NAMES),
        kind=draw(st.sampled_from(WorkerKind)),
        alive=draw(st.sampled_from([True, True, True, False])),
        in_flight=in_flight,
        cap=draw(st.sampled_from([3, 3, 1])),
        eligible=draw(st.booleans()),
        owner=draw(st.none() | JOBS | st.just(NOBODY)),
        models=draw(st.none() | st.frozensets(MODELS, min_size=1)),
        contexts=draw(st.dictionaries(MODELS, st.none() | CONTEXTS, max_size=2)),
        weight_version=draw(st.none() | VERSIONS),
        adapters={each.run_id: each for each in draw(st.lists(ADAPTERS, max_size=2))},
        awaits_weights=draw(st.booleans()),
        load=in_flight / 3,
        not_before=draw(MOMENTS),
        share=draw(st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0, None])),
        share_until=draw(st.sampled_from([NOW + 1, NOW + 1, NOW + 1, NOW])),
        speed=draw(st.none() | SPEEDS),
        pending_prefill_tokens=draw(st.sampled_from([0.0, 700.0])),
    )


@st.composite
def turns(draw: st.DrawFn) -> TurnView:
    return TurnView(
        session="t",
        job=draw(JOBS),
        model=draw(st.none() | MODELS),
        affine=draw(st.none() | NAMES),
        run_id=draw(st.none() | st.sampled_from(["r", "s", "m", NO_RUN])),
        pinned_version=draw(st.none() | VERSIONS | ADAPTERS),
        avoid_until=draw(st.dictionaries(NAMES, MOMENTS, max_size=2)),
        least_context=draw(st.none() | CONTEXTS),
        prompt_tokens=draw(st.sampled_from([0, 1000, 20_000])),
        expected_tokens=draw(st.sampled_from([0.0, 100.0, 333.3])),
        cached_tokens=draw(st.dictionaries(NAMES, st.sampled_from([500.0, 20_000.0]), max_size=2)),
    )


@st.composite
def rules(draw: st.DrawFn) -> VersionRule:
    known = NewestVersions()
    for version in draw(st.lists(VERSIONS, max_size=2)):
        known.heard(version, draw(st.none() | st.frozensets(MODELS)), now=NOW)
    for version in draw(st.lists(ADAPTERS, max_size=2)):
        known.heard_adapter(version, now=NOW)
    for version in draw(st.lists(VERSIONS | ADAPTERS, max_size=1)):
        known.announced(version, NOW)
    return VersionRule(mode=draw(st.sampled_from(VersionMode)), max_lag=draw(st.integers(0, 2)), known=known)


POLICIES = st.sampled_from([PaperPolicy, CostPolicy, PinnedPolicy, TurnwisePolicy])


@given(st.lists(worker_views() | NAMES | turns(), max_size=40), POLICIES, rules())
def test_every_decision_is_that_of_a_look_at_all_workers(
    events: list[WorkerView | str | TurnView],
    make_policy: type[PaperPolicy | CostPolicy | PinnedPolicy | TurnwisePolicy],
    rule: VersionRule,
) -> None:
    policy: PlacementPolicy = make_policy(versions=rule)
    fleet, views = Fleet(), dict[str, WorkerView]()
    for event in events:
        if isinstance(event, WorkerView):
            fleet.put(event)
            views[event.id] = event
        elif isinstance(event, str):
            if views.pop(event, None) is not None:
                fleet.drop(event)
        else:
            try:
                expected = picked(policy, event, list(views.values()), NOW)
            except VersionGone:
                expected = "gone"
            try:
                found = policy.pick(event, fleet, NOW)
            except VersionGone:
                found = "gone"
            assert found == expected
        fleet.check_integrity()
        assert fleet.is_open == any(
            view.has_room and (view.kind is WorkerKind.DEDICATED or view.eligible) for view in views.values()
        )
