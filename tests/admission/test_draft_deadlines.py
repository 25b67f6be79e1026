"""Serving's books where a step gives a decode several tokens: due times, targets, and what is expected."""

import pytest
from test_deadlines import MODEL, SLO_500_200, books, latest

from rose.admission.deadlines import ServingDeadlines
from rose.admission.gate import GateSettings
from rose.types import SLO, GateMode


def test_a_step_with_several_tokens_moves_the_due_time_by_all_of_them() -> None:
    serving = books(GateMode.TPOT_ONLY)
    serving.arrived("a", 0.9, 10)
    serving.produced({"a": 1}, 1.0, {"a": 1})
    serving.produced({"a": 3}, 1.02, {"a": 3})
    assert latest(serving) == pytest.approx(
        min(1.02 + 0.2, 1.0 + 3 * 0.095) - 0.011
    )  # the ITL cap comes first
    serving.produced({"a": 4}, 1.04, {"a": 4})
    serving.finished(["a"])
    assert serving.ended[0].tpot_s == pytest.approx(0.04 / 7)


def test_accepted_drafts_bring_the_default_target_down() -> None:
    """The target is a number of serving's steps, and of a step with four tokens each token has a fourth."""
    targets = []
    for num_tokens in (1, 4):
        serving = books(GateMode.TPOT_ONLY, tpot_target_s=None)
        serving.arrived("a", 0.0, 10)
        for step in range(200):
            serving.produced({"a": num_tokens}, 0.01 * step, {"a": num_tokens})
        serving.view(2.0, MODEL, has_work=True)
        targets.append(serving._target_and_cap()[0])
    assert targets[1] == pytest.approx(targets[0] / 4, rel=0.01)


def drafting(num_tokens: int, step_s: float, tpot_target_s: float | None = None) -> ServingDeadlines:
    """A decode that has got so many tokens in each of 200 steps."""
    slo = SLO(ttft_s=8.0, tpot_s=2.0)
    settings = GateSettings(slo=slo, mode=GateMode.TPOT_ONLY, tpot_target_s=tpot_target_s)
    serving = ServingDeadlines(settings, chunk_tokens=512, decode_tokens=num_tokens)
    serving.arrived("a", 0.0, 10)
    for step in range(200):
        latest(serving)
        serving.produced({"a": num_tokens}, step_s * step, {"a": num_tokens})
    latest(serving)
    return serving


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_step_in_flight_is_expected_to_give_as_many_tokens_as_the_last_ones(num_tokens: int) -> None:
    step_s = 0.03 * num_tokens
    serving = drafting(num_tokens, step_s, tpot_target_s=0.02)  # so slow that the pace counts, not the limit
    end_s = 200 * step_s
    expected_s = serving.view_after(end_s, MODEL).latest_start_s
    serving.produced({"a": num_tokens}, end_s, {"a": num_tokens})
    assert latest(serving) == pytest.approx(expected_s, abs=1e-4)


def test_drafts_leave_the_slack_of_a_step_as_long_as_without_them() -> None:
    """The default target is a number of serving's steps, and so is the credit that one gap may take."""
    slack_s = [latest(drafting(num_tokens, 0.01)) - 1.99 for num_tokens in (1, 4)]
    step_s = MODEL.predict(0, 1)
    assert slack_s[0] == pytest.approx((3 * 8 - 1) * step_s, rel=0.01)
    assert slack_s[1] == pytest.approx(((2 + 1 / 4) * 8 - 1) * step_s, rel=0.01)


def test_decodes_with_drafts_leave_less_of_a_step_to_prefill() -> None:
    """A prompt may need more steps then. A single step may be as long as without drafts."""
    for mode, lost_s in ((GateMode.TTFT_ONLY, 5 * 0.011), (GateMode.TPOT_ONLY, 0.0)):
        latest_s = []
        for decode_tokens in (1, 101):
            gate = GateSettings(slo=SLO_500_200, mode=mode, tpot_target_s=0.1)
            serving = ServingDeadlines(gate, chunk_tokens=200, decode_tokens=decode_tokens)
            serving.arrived("a", 0.5, 10)
            serving.produced(["a"], 1.0)
            serving.arrived("b", 1.0, 1000)
            latest_s.append(latest(serving))
        assert latest_s[0] - latest_s[1] == pytest.approx(lost_s)
