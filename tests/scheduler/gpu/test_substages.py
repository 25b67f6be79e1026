"""Sub-stages from an engine's steps."""

import pytest

from rose.scheduler.gpu.substages import (
    DecodeCost,
    Steps,
    SubStageKind,
    decode_cost,
    iteration,
    read_steps,
    substages,
)

COST = DecodeCost(step_s=0.01, sample_s=0.001, prefill_token_s=1e-5)


def steps(tokens: int, count: int = 1, **more: float) -> Steps:
    return Steps(
        tokens=tokens, num_running=int(more.pop("num_running", tokens)), seconds=0.01, count=count, **more
    )


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        (0, SubStageKind.ROLLOUT_SMALL),
        (127, SubStageKind.ROLLOUT_SMALL),
        (128, SubStageKind.ROLLOUT_MEDIUM),
        (1023, SubStageKind.ROLLOUT_MEDIUM),
        (1024, SubStageKind.ROLLOUT_LARGE),
    ],
)
def test_buckets_are_the_papers(tokens: int, kind: SubStageKind) -> None:
    assert steps(tokens).kind is kind


def test_a_sub_stage_changes_after_ten_steps_in_another_bucket() -> None:
    fluctuating = [steps(200, 20), steps(100, 9), steps(200, 5)]
    assert [each.kind for each in substages(fluctuating)] == [SubStageKind.ROLLOUT_MEDIUM]
    falling = [steps(200, 20), steps(100, 10)]
    found = substages(falling)
    assert [each.kind for each in found] == [SubStageKind.ROLLOUT_MEDIUM, SubStageKind.ROLLOUT_SMALL]
    assert [each.seconds for each in found] == pytest.approx([0.2, 0.1])


def test_steps_in_two_other_buckets_do_not_add_up_to_a_change() -> None:
    found = substages([steps(2000, 5), steps(200, 6), steps(100, 6), steps(2000, 5)])
    assert [each.kind for each in found] == [SubStageKind.ROLLOUT_LARGE]


def test_a_pause_between_steps_is_a_tools_sub_stage() -> None:
    found = substages([steps(4, 3), steps(4, 3, idle_s=5.0)])
    assert [each.kind for each in found] == [
        SubStageKind.ROLLOUT_SMALL,
        SubStageKind.TOOL,
        SubStageKind.ROLLOUT_SMALL,
    ]
    assert found[1].seconds == 5.0


def test_only_the_last_decoding_has_a_tail_with_each_samples_tokens() -> None:
    found = substages([steps(1500, 10, num_running=0), steps(3, 20), steps(2, 10), steps(1, 5)])
    assert found[0].left == ()
    assert found[-1].left == (20, 30, 35)


def test_decoding_takes_longer_for_more_samples() -> None:
    # Two samples for 10 tokens, then one for 5.
    assert COST.seconds([10, 15]) == pytest.approx(10 * 0.012 + 5 * 0.011)
    assert COST.reached([10, 15], 10 * 0.012 + 2.5 * 0.011) == 12
    assert COST.reached([10, 15], 99.0) == 15


def test_costs_are_fitted_to_the_steps() -> None:
    decodes = [Steps(tokens=n, num_running=n, seconds=0.01 + 0.001 * n, count=10) for n in (1, 4, 16)]
    prefill = Steps(tokens=1000, num_running=0, seconds=0.01 + 1000 * 1e-5)
    cost = decode_cost([*decodes, prefill])
    assert cost.step_s == pytest.approx(0.01)
    assert cost.sample_s == pytest.approx(0.001)
    assert cost.prefill_token_s == pytest.approx(1e-5)


def test_vllms_log_lines_are_read_and_others_skipped() -> None:
    line = (
        "(APIServer pid=7) INFO 11-23 14:00:{second} [loggers.py:199] Engine 000: Iteration({number}): "
        "{prefills} context requests, {context} context tokens, {running} generation requests, {running} "
        "generation tokens, iteration elapsed time: 20.00 ms{dummy}, GPU KV cache usage: 1.0%"
    )
    lines = [
        "INFO 11-23 14:00:00 [core.py:1] something else",
        line.format(second="01", number=0, prefills=2, context=300, running=1, dummy=""),
        line.format(second="01", number=1, prefills=0, context=0, running=3, dummy=""),
        line.format(second="02", number=2, prefills=0, context=0, running=0, dummy=" (dummy)"),
        line.format(second="09", number=3, prefills=0, context=0, running=3, dummy=""),
    ]
    found = read_steps(lines)
    assert [(each.tokens, each.num_running) for each in found] == [(301, 1), (3, 3), (3, 3)]
    assert [each.idle_s for each in found] == [0.0, 0.0, pytest.approx(7.98)]


def test_a_rollout_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="without samples"):
        iteration([[], []], reference_s=1.0, train_s=1.0)


def test_stages_without_time_are_left_out() -> None:
    graph = iteration([[steps(4, 100)], [steps(4, 50)]], reference_s=0.0, train_s=2.0)
    assert [phase.is_elastic for phase in graph.phases] == [False, True]
    assert graph.seconds == pytest.approx(1.0 + 2.0)
