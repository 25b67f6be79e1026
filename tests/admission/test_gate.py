"""The gate's decisions, as tables over modes and situations."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rose.admission.gate import (
    MIN_STEP_TOKENS,
    GatePolicy,
    GateReason,
    GateSettings,
    RolloutCandidate,
    ServingView,
)
from rose.admission.slack import NEVER
from rose.admission.step_time import UNPROFILED, StepTimeModel
from rose.types import SLO, Deployment, GateMode

NOW = 100.0
# 10 ms + 0.1 ms per prefill token + 1 ms per decode, exact
MODEL = StepTimeModel(base_s=0.01, per_prefill_token_s=1e-4, per_decode_s=1e-3, margin_s=0.0)
SLO_600_150 = SLO(ttft_s=0.6, tpot_s=0.15)
MIXED = RolloutCandidate(prefill_tokens_waiting=2000, num_decodes=10, context_tokens=0)


def policy(mode: GateMode = GateMode.DUAL) -> GatePolicy:
    return GatePolicy(GateSettings(slo=SLO_600_150, mode=mode))


def busy(slack_s: float = NEVER, pending: bool = False) -> ServingView:
    return ServingView(has_work=True, has_pending_prefill=pending, latest_start_s=NOW + slack_s)


IDLE = ServingView(has_work=False, has_pending_prefill=False, latest_start_s=NEVER)
ADMITTED, PREFILL_FIRST = GateReason.ADMITTED, GateReason.PREFILL_FIRST
NO_SLACK, HAS_WORK = GateReason.NO_SLACK, GateReason.SERVING_HAS_WORK


@pytest.mark.parametrize(
    ("mode", "idle", "roomy", "tight", "pending"),
    [
        (GateMode.DUAL, ADMITTED, ADMITTED, NO_SLACK, PREFILL_FIRST),
        (GateMode.TTFT_ONLY, ADMITTED, ADMITTED, NO_SLACK, ADMITTED),
        (GateMode.TPOT_ONLY, ADMITTED, ADMITTED, NO_SLACK, ADMITTED),
        (GateMode.IDLE, ADMITTED, HAS_WORK, HAS_WORK, HAS_WORK),
        (GateMode.ALTERNATE, ADMITTED, ADMITTED, ADMITTED, ADMITTED),
        (GateMode.EQUATIONS, ADMITTED, ADMITTED, ADMITTED, ADMITTED),
        (GateMode.OFF, ADMITTED, ADMITTED, ADMITTED, ADMITTED),
    ],
)
def test_each_gate_mode_decides_as_its_table_says(
    mode: GateMode, idle: GateReason, roomy: GateReason, tight: GateReason, pending: GateReason
) -> None:
    gate = policy(mode)
    found = [
        gate.decide(NOW, view, MIXED, MODEL).reason
        for view in (IDLE, busy(0.05), busy(0.005), busy(0.05, pending=True))
    ]
    assert found == [idle, roomy, tight, pending]


def test_no_slack_left_refuses_in_the_printed_equations_too() -> None:
    assert policy(GateMode.EQUATIONS).decide(NOW, busy(-0.001), MIXED, MODEL).reason is NO_SLACK


def test_printed_equations_admit_a_whole_chunk_on_any_slack() -> None:
    assert policy(GateMode.EQUATIONS).decide(NOW, busy(0.001), MIXED, MODEL).max_tokens == 512


def test_prefill_fills_what_decodes_leave_of_the_slack() -> None:
    # 50 ms: 10 base, 10 decodes, 30 ms left for 300 prefill tokens
    decision = policy().decide(NOW, busy(0.0500001), MIXED, MODEL)
    assert (decision.max_tokens, decision.max_seqs) == (310, 10)
    assert decision.step_s == pytest.approx(0.05)


def test_slack_too_short_for_all_decodes_is_saved() -> None:
    # All ten take 20 ms; the ITL cap of 150 ms leaves room for that.
    assert policy().decide(NOW, busy(0.0160001), MIXED, MODEL).reason is GateReason.SAVING


def test_if_no_gap_holds_all_decodes_slack_is_saved_for_most_of_them() -> None:
    # The bank pays two budgets of 12 ms on top of one: half of 36 ms is less than the 20 ms of all decodes.
    gate = GatePolicy(GateSettings(slo=SLO_600_150, tpot_target_s=0.012))
    # Ten make 500 tokens a second, seven 412 and six 375: less than 80%.
    assert gate.decide(NOW, busy(0.0160001), MIXED, MODEL).reason is GateReason.SAVING
    assert gate.decide(NOW, busy(0.0170001), MIXED, MODEL).max_tokens == 7


def test_slack_too_short_for_a_piece_of_prefill_is_saved() -> None:
    # Ten decodes and a quarter of a chunk take 32.8 ms; without prefill to do 20 ms are enough.
    assert policy().decide(NOW, busy(0.032), MIXED, MODEL).reason is GateReason.SAVING
    assert policy().decide(NOW, busy(0.033), MIXED, MODEL).is_admitted
    decodes = replace(MIXED, prefill_tokens_waiting=0)
    assert policy().decide(NOW, busy(0.021), decodes, MODEL).max_tokens == 10


@given(
    slack_s=st.floats(1e-4, 0.4),
    prefill=st.integers(0, 600),
    num_decodes=st.integers(0, 40),
    context=st.integers(0, 2000),
    waited_s=st.sampled_from([0.0, 0.5]),
    max_step_s=st.sampled_from([NEVER, 0.1, 0.018]),
)
def test_the_shortest_step_is_the_least_slack_that_is_used(
    slack_s: float, prefill: int, num_decodes: int, context: int, waited_s: float, max_step_s: float
) -> None:
    candidate = RolloutCandidate(
        prefill_tokens_waiting=prefill,
        num_decodes=num_decodes,
        context_tokens=context * num_decodes,
        computed_tokens=context,
        waited_s=waited_s,
    )
    model = replace(MODEL, per_context_token_s=2e-6, per_prefill_pair_s=1e-7)
    view = busy(slack_s)._replace(max_step_s=max_step_s)
    shortest_s = policy().shortest_step_s(view, candidate, model)
    assume(prefill + num_decodes > 0 and abs(slack_s - shortest_s) > 1e-6 and shortest_s <= max_step_s)
    assert policy().decide(NOW, view, candidate, model).is_admitted == (slack_s > shortest_s)


@pytest.mark.parametrize(
    ("gate", "model", "waited_s"),
    [
        (policy(), MODEL, 0.5),
        (GatePolicy(GateSettings(slo=SLO_600_150, tpot_target_s=0.012)), replace(MODEL, ratio_q99=2.3), 0.0),
    ],
    ids=["waited a quarter of the stall timeout", "no gap holds even the smallest efficient step"],
)
def test_some_decodes_run_where_saving_is_of_no_use(
    gate: GatePolicy, model: StepTimeModel, waited_s: float
) -> None:
    decision = gate.decide(NOW, busy(0.0160001 * model.ratio_q99), replace(MIXED, waited_s=waited_s), model)
    assert (decision.max_tokens, decision.max_seqs) == (6, 6)


def test_a_chunk_bounds_decodes_and_prefill_together() -> None:
    fast = StepTimeModel(base_s=1e-4, per_prefill_token_s=1e-6, per_decode_s=1e-6)
    assert policy().decide(NOW, busy(), MIXED, fast).max_tokens == 512


def test_an_idle_gpu_takes_no_step_longer_than_a_quarter_of_the_ttft_slo() -> None:
    many = RolloutCandidate(prefill_tokens_waiting=10_000, num_decodes=0, context_tokens=0)
    slow = StepTimeModel(base_s=0.01, per_prefill_token_s=1e-3, per_decode_s=1e-3, margin_s=0.0)
    decision = policy().decide(NOW, IDLE, many, slow)
    assert decision.max_tokens == pytest.approx(140, abs=1)
    assert decision.step_s <= 0.15 + 1e-9


def test_a_step_on_an_idle_gpu_is_as_short_as_serving_asks() -> None:
    decisions = [
        policy().decide(NOW, IDLE._replace(max_step_s=max_step_s), MIXED, MODEL)
        for max_step_s in (NEVER, 0.0500001, 0.0400001)
    ]
    assert [decision.max_tokens for decision in decisions] == [512, 310, 210]


def test_serving_and_not_the_rollout_engine_has_the_objective_that_bounds_a_step() -> None:
    """Beside a decoder, a TTFT of the rollout engine's own says nothing. A max_step_s of its own holds."""
    own = GateSettings(slo=SLO_600_150)  # its default is 0.15 s
    shorter = replace(own, max_step_s=0.1)
    for max_step_s, longest_s in ((0.4, 0.4), (0.05, 0.05), (NEVER, 0.15)):
        view = IDLE._replace(max_step_s=max_step_s)
        assert GatePolicy(own).longest_step_s(view) == longest_s
        assert GatePolicy(shorter).longest_step_s(view) == min(0.1, longest_s)


@pytest.mark.parametrize(
    ("deployment", "longest_s"),
    [(Deployment.COLLOCATED, 0.15), (Deployment.PREFILL, 0.15), (Deployment.DECODE, 0.075)],
)
def test_what_an_idle_instance_puts_up_with_follows_its_objective(
    deployment: Deployment, longest_s: float
) -> None:
    settings = GateSettings(slo=SLO_600_150, deployment=deployment)
    assert settings.effective_max_step_s == pytest.approx(longest_s)
    assert replace(settings, max_step_s=0.03).effective_max_step_s == 0.03


@pytest.mark.parametrize(
    ("deployment", "mode", "message"),
    [
        (Deployment.PREFILL, GateMode.TPOT_ONLY, "a prefiller makes no tokens that could be late"),
        (Deployment.DECODE, GateMode.TTFT_ONLY, "a decoder has no prompts that could be late"),
    ],
)
def test_a_mode_without_its_objective_is_refused(
    deployment: Deployment, mode: GateMode, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        GateSettings(slo=SLO_600_150, deployment=deployment, mode=mode)


def test_without_a_profile_one_small_step_runs_and_only_when_serving_is_idle() -> None:
    gate = policy()
    on_idle = gate.decide(NOW, IDLE, MIXED, UNPROFILED)
    assert (on_idle.max_tokens, on_idle.max_seqs) == (MIN_STEP_TOKENS // 2, 10)
    prefill = RolloutCandidate(prefill_tokens_waiting=2000, num_decodes=0, context_tokens=0)
    assert gate.decide(NOW, IDLE, prefill, UNPROFILED).max_tokens == MIN_STEP_TOKENS
    assert gate.decide(NOW, busy(0.5), MIXED, UNPROFILED).reason is NO_SLACK


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (ServingView(has_work=True, has_pending_prefill=False, latest_start_s=NEVER, alive=False),
         GateReason.SERVING_LOST),
        (ServingView(has_work=True, has_pending_prefill=False, latest_start_s=NEVER, may_start=False),
         GateReason.NO_GRANT),
        (ServingView(has_work=False, has_pending_prefill=False, latest_start_s=NEVER, alive=False),
         GateReason.SERVING_LOST),
    ],
)  # fmt: skip
def test_each_state_of_the_board_has_its_decision(view: ServingView, reason: GateReason) -> None:
    assert policy().decide(NOW, view, MIXED, MODEL).reason is reason


def test_a_rollout_engine_without_work_is_told_that_it_has_nothing_to_run() -> None:
    empty = RolloutCandidate(prefill_tokens_waiting=0, num_decodes=0, context_tokens=0)
    decision = policy().decide(NOW, IDLE, empty, MODEL)
    assert decision.reason is GateReason.NOTHING_TO_RUN
    assert not decision.is_admitted and decision.retry_at_s > NOW


@pytest.mark.parametrize(
    ("mode", "view", "expected"),
    [
        (GateMode.DUAL, busy(0.1), True),
        (GateMode.DUAL, busy(-0.1), False),
        (GateMode.DUAL, busy(0.1, pending=True), False),
        (GateMode.TTFT_ONLY, busy(0.1, pending=True), True),
        (GateMode.IDLE, busy(0.1), False),
        (GateMode.ALTERNATE, busy(-0.1), True),
        (GateMode.OFF, busy(0.1), False),
    ],
)
def test_serving_offers_turns_by_mode(mode: GateMode, view: ServingView, expected: bool) -> None:
    assert policy(mode).may_yield(NOW, view) is expected


@given(
    mode=st.sampled_from([GateMode.DUAL, GateMode.TTFT_ONLY, GateMode.TPOT_ONLY]),
    slack_s=st.floats(-1, 1),
    prefill=st.integers(0, 5000),
    decodes=st.integers(0, 200),
    context=st.integers(0, 200_000),
    ratio=st.floats(1, 3),
)
def test_an_admitted_step_ends_before_serving_must_start(
    mode: GateMode, slack_s: float, prefill: int, decodes: int, context: int, ratio: float
) -> None:
    model = StepTimeModel(
        base_s=0.01,
        per_prefill_token_s=7e-4,
        per_decode_s=6e-4,
        per_context_token_s=1e-7,
        ratio_q99=ratio,
        margin_s=0.002,
    )
    candidate = RolloutCandidate(
        prefill_tokens_waiting=prefill, num_decodes=decodes, context_tokens=context if decodes else 0
    )
    decision = policy(mode).decide(NOW, busy(slack_s), candidate, model)
    assert decision.max_seqs <= decodes
    assert decision.max_tokens <= max(512, decodes)
    if decision.is_admitted:
        assert NOW + decision.step_s <= NOW + slack_s + 1e-6
        assert decision.max_tokens <= prefill + decodes
    else:
        assert decision.reason is not ADMITTED


def test_step_limits_follow_from_the_slo_where_none_are_set() -> None:
    settings = GateSettings(slo=SLO_600_150)
    assert settings.itl_cap_for(0.075) == pytest.approx(0.15)
    assert settings.itl_cap_for(0.14) == pytest.approx(0.21)
    assert settings.effective_max_step_s == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("step_s", "target_s"),
    [(0.005, 0.04), (0.01, 0.075), (0.02, 0.1), (0.04, 0.1425)],
    ids=["8 steps", "half the SLO", "5 steps", "95% of the SLO"],
)
def test_the_default_target_follows_the_decode_step(step_s: float, target_s: float) -> None:
    assert GateSettings(slo=SLO_600_150).tpot_target_for(step_s) == pytest.approx(target_s)
    assert GateSettings(slo=SLO_600_150, tpot_target_s=0.03).tpot_target_for(step_s) == 0.03


@pytest.mark.parametrize("bad", [{"chunk_tokens": 0}, {"handover_s": 0.0}, {"tpot_target_s": -1.0}])
def test_senseless_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        GateSettings(slo=SLO_600_150, **bad)  # type: ignore[arg-type]


def test_a_grant_covers_whole_decodes_with_their_drafts() -> None:
    drafted = RolloutCandidate(
        prefill_tokens_waiting=0, num_decodes=4, context_tokens=0, draft_tokens=(3, 0, 2, 3), waited_s=9.0
    )
    whole = policy().decide(NOW, IDLE, drafted, MODEL)
    assert (whole.max_seqs, whole.max_tokens) == (4, 4 + 8)
    some = policy().decide(NOW, busy(0.01201), drafted, MODEL)
    assert (some.max_seqs, some.max_tokens) == (2, 2 + 3)
    assert some.step_s == pytest.approx(0.012)


def test_drafts_leave_less_of_a_step_to_prefill() -> None:
    mixed = replace(MIXED, draft_tokens=(4,) * MIXED.num_decodes)
    gate = GatePolicy(GateSettings(slo=SLO_600_150, chunk_tokens=100))
    decision = gate.decide(NOW, IDLE, mixed, MODEL)
    assert (decision.max_seqs, decision.max_tokens) == (10, 100)
    assert decision.step_s == pytest.approx(0.01 + 50 * 1e-4 + 10 * 1e-3)
