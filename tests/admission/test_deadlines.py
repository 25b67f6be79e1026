"""Serving's books: what is published after arrivals, chunks, tokens and ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.admission.deadlines import CLASS_MEMORY_S, MIN_PREFILL_TOKENS, ServingDeadlines, monotonic_arrival
from rose.admission.gate import GateSettings
from rose.admission.slack import NEVER
from rose.admission.step_time import StepTimeModel
from rose.types import SLO, Deployment, GateMode

MODEL = StepTimeModel(base_s=0.01, per_prefill_token_s=1e-4, per_decode_s=1e-3, margin_s=0.0)
SLO_500_200 = SLO(ttft_s=0.5, tpot_s=0.2)


def books(
    mode: GateMode = GateMode.DUAL,
    tpot_target_s: float | None = 0.1,
    deployment: Deployment = Deployment.COLLOCATED,
) -> ServingDeadlines:
    gate = GateSettings(slo=SLO_500_200, mode=mode, tpot_target_s=tpot_target_s, deployment=deployment)
    return ServingDeadlines(gate, chunk_tokens=512)


def latest(deadlines: ServingDeadlines, now: float = 0.0) -> float:
    return deadlines.view(now, MODEL, has_work=True).latest_start_s


def test_a_request_is_pending_until_its_first_token() -> None:
    serving = books()
    seen = [serving.has_pending_prefill]
    serving.arrived("a", 1.0, 500)
    serving.prefilled("a", 100)
    seen.append(serving.has_pending_prefill)
    serving.produced(["a"], 1.2)
    seen.append(serving.has_pending_prefill)
    assert (seen, serving.num_decodes) == ([False, True, False], 1)
    serving.finished(["a", "unknown"])
    assert latest(serving) == NEVER


def test_decode_deadline_is_the_due_minus_the_next_mixed_step() -> None:
    serving = books(GateMode.TPOT_ONLY)
    serving.arrived("a", 0.5, 10)
    serving.produced(["a"], 1.0)
    assert latest(serving) == pytest.approx(1.1 - 0.011)
    serving.arrived("b", 1.0, 200)  # its prefill rides in the same step
    assert latest(serving) == pytest.approx(1.1 - 0.031)


def test_each_mode_publishes_its_own_deadline() -> None:
    expected = {
        GateMode.DUAL: 1.0,  # prefill first: now
        GateMode.TPOT_ONLY: 1.1 - 0.031,
        GateMode.TTFT_ONLY: 1.5 - 0.031,
        GateMode.EQUATIONS: 1.2 - 0.011,
        GateMode.IDLE: NEVER,
        GateMode.ALTERNATE: NEVER,
    }
    for mode, when in expected.items():
        serving = books(mode)
        serving.arrived("a", 0.5, 10)
        serving.produced(["a"], 1.0)
        serving.arrived("b", 1.0, 200)
        assert latest(serving, now=1.0) == pytest.approx(when), mode


def test_the_least_due_time_is_kept_through_ends_and_preemptions() -> None:
    serving = books()
    for at_s, request_id in enumerate("abc"):
        serving.arrived(request_id, 0.0, 10)
        serving.produced([request_id], float(at_s))
    assert latest(serving) == pytest.approx(0.1 - 0.013)
    serving.produced(["b", "c"], 3.0)  # "a" made no token: its due time is the older one
    assert latest(serving) == pytest.approx(0.1 - 0.013)
    serving.finished(["a"])
    assert latest(serving) > 1.0
    serving.check_integrity()


def test_a_request_may_have_its_own_slo() -> None:
    serving = books(GateMode.TPOT_ONLY)
    serving.arrived("a", 0.5, 10, own_slo=SLO(ttft_s=0.5, tpot_s=0.03))
    serving.arrived("b", 0.5, 10, own_slo=SLO(ttft_s=0.1, tpot_s=0.2))
    serving.produced(["a", "b"], 1.0)
    assert latest(serving) == pytest.approx(1.0 + 0.95 * 0.03 - 0.012)
    serving.finished(["a"])
    assert latest(serving) == pytest.approx(1.1 - 0.011)  # its TTFT alone is its own
    serving = books(GateMode.TTFT_ONLY)
    serving.arrived("a", 0.5, 10)
    serving.arrived("b", 0.5, 10, own_slo=SLO(ttft_s=0.1, tpot_s=0.2))
    assert latest(serving) == pytest.approx(0.6 - 0.012)  # both prompts are in one step


def test_the_target_of_a_request_with_its_own_slo_is_kept_apart_from_it_and_shrinks_under_load() -> None:
    for tpot_s, target_s in ((0.1, 0.05), (0.2, 0.08), (5.0, 0.08)):
        for load, part in ((0.0, 1.0), (0.75, 0.5)):
            serving = books(tpot_target_s=None)
            serving.view(0.0, MODEL, has_work=True)  # a step of 10 ms
            serving.set_load(load)
            serving.arrived("a", 0.5, 10, own_slo=SLO(ttft_s=0.5, tpot_s=tpot_s))
            serving.produced(["a"], 1.0)
            assert latest(serving) == pytest.approx(1.0 + part * target_s - 0.011)


def test_rollout_steps_on_an_idle_gpu_are_as_short_as_the_tightest_class_seen_lately_needs() -> None:
    serving = books()  # a quarter of 500 ms
    longest_s = [serving.max_idle_step_s(0.0)]
    serving.expect_more_like(SLO(ttft_s=0.1, tpot_s=0.2), 1.0)
    serving.expect_more_like(SLO(ttft_s=0.2, tpot_s=0.2), 2.0)
    longest_s += [serving.max_idle_step_s(now) for now in (CLASS_MEMORY_S, CLASS_MEMORY_S + 1.0)]
    serving.expect_more_like(SLO(ttft_s=0.2, tpot_s=0.2), 1000.0)
    serving.expect_more_like(SLO(ttft_s=5.0, tpot_s=0.2), 1000.0)
    assert [*longest_s, serving.max_idle_step_s(1000.0)] == [0.125, 0.025, 0.125, 0.05]


def test_the_itl_cap_of_a_request_with_its_own_slo_follows_it() -> None:
    serving = books()
    serving.arrived("a", 0.5, 10, own_slo=SLO(ttft_s=0.5, tpot_s=0.1))
    for token in range(20):  # far ahead of its pace
        serving.produced(["a"], 1.0 + 0.001 * token)
    assert latest(serving) == pytest.approx(1.019 + 1.5 * 0.095 - 0.011)
    # A whole chunk and one decode take 62.2 ms.
    assert serving.may_join(1.019 + 0.1425 - 0.063, MODEL)
    assert not serving.may_join(1.019 + 0.1425 - 0.062, MODEL)


def test_load_shrinks_the_target() -> None:
    serving = books()
    serving.set_load(0.75)
    serving.produced(["a"], 1.0)
    assert latest(serving) == pytest.approx(1.05 - 0.011)


def test_the_default_target_rests_on_the_published_step() -> None:
    serving = books(tpot_target_s=None)
    serving.arrived("a", 0.5, 10)
    assert latest(serving) < 1.0
    serving.produced(["a"], 1.0)
    assert latest(serving) == pytest.approx(1.0 + 8 * 0.01 - 0.011)  # the step without decodes took 10 ms


@pytest.mark.parametrize(
    ("wall_arrival", "arrival_s"),
    [(999.8, 99.8), (1000.3, 100.0), (1000.0 - 3600, 100.0), (1000.0 + 3600, 100.0)],
    ids=[
        "in the front end for 0.2 s",
        "clocks of two cores",
        "set forward by an hour",
        "set back by an hour",
    ],
)
def test_a_jump_of_the_wall_clock_moves_no_deadline(wall_arrival: float, arrival_s: float) -> None:
    assert monotonic_arrival(100.0, 1000.0, wall_arrival) == pytest.approx(arrival_s)


def test_a_decoder_has_no_first_token_to_wait_for() -> None:
    serving = books()
    serving.arrived_prefilled("a", 1.0)
    assert not serving.has_pending_prefill
    assert latest(serving) == pytest.approx(1.1 - 0.011)
    serving.produced(["a"], 1.05)
    assert latest(serving) == pytest.approx(1.0 + 0.095 + 0.1 - 0.011)
    serving.check_integrity()


def test_a_prefiller_reckons_with_ttft_alone() -> None:
    expected = {
        GateMode.DUAL: (1.0, NEVER),  # prefill first; then nothing is due
        GateMode.TTFT_ONLY: (1.5 - 0.031, NEVER),
        GateMode.EQUATIONS: (1.5 - 0.03, NEVER),
    }
    for mode, (with_prompt, without) in expected.items():
        serving = books(mode, deployment=Deployment.PREFILL)
        serving.arrived("a", 0.5, 10)
        serving.produced(["a"], 1.0)  # and goes on: such a request has no objective here
        assert latest(serving, now=1.0) == without, mode
        serving.arrived("b", 1.0, 200)
        assert latest(serving, now=1.0) == pytest.approx(with_prompt), mode


def test_a_decoder_reckons_with_tpot_alone_from_the_arrival_on() -> None:
    expected = {
        GateMode.DUAL: 1.1 - 0.011,
        GateMode.TPOT_ONLY: 1.1 - 0.011,
        GateMode.EQUATIONS: 1.2 - 0.011,
    }
    for mode, when in expected.items():
        serving = books(mode, deployment=Deployment.DECODE)
        serving.arrived("a", 1.0, 200)
        assert not serving.has_pending_prefill
        assert latest(serving, now=1.0) == pytest.approx(when), mode
        serving.check_integrity()


def test_a_newcomer_brings_no_prefill_to_a_decoder() -> None:
    serving = books(deployment=Deployment.DECODE)  # one token and one decode take 11.1 ms, the cap is 200 ms
    serving.produced(["a"], 1.0)
    assert serving.may_join(1.188, MODEL)
    assert not serving.may_join(1.19, MODEL)


def test_a_newcomer_joins_a_step_only_within_the_itl_cap() -> None:
    serving = books()  # a whole chunk and one decode take 62.2 ms, the cap is 200 ms
    assert serving.may_join(5.0, MODEL)
    serving.produced(["a"], 1.0)
    assert serving.may_join(1.137, MODEL)
    assert not serving.may_join(1.139, MODEL)


def test_prefill_that_piled_up_during_a_rollout_step_is_split_for_the_decodes_beside_it() -> None:
    serving = books()  # a step with a decode takes 11 ms and 0.1 ms a prompt token, the cap is 200 ms
    assert serving.prefill_room(5.0, MODEL) == 512
    serving.produced(["a"], 1.0)
    serving.waited(0.1, 1.1)
    serving.arrived("b", 1.05, 512)
    assert serving.prefill_room(1.137, MODEL) == 512
    assert serving.prefill_room(1.16, MODEL) == pytest.approx(290, abs=1)
    assert serving.prefill_room(1.3, MODEL) == MIN_PREFILL_TOKENS  # it is late anyway
    serving.arrived("c", 1.2, 512)  # behind the rest of "b"
    assert serving.prefill_room(1.3, MODEL) == MIN_PREFILL_TOKENS
    serving.finished(["a"])
    assert serving.prefill_room(1.3, MODEL) == 512


@pytest.mark.parametrize("waited_s", [0.0, 0.05], ids=["without rollouts", "after a rollout step"])
def test_a_burst_that_no_rollout_step_delayed_is_prefilled_whole(waited_s: float) -> None:
    serving = books()
    serving.produced(["a"], 1.0)
    serving.waited(waited_s, 1.05)
    serving.arrived("b", 1.06, 512)
    assert serving.prefill_room(1.16, MODEL) == 512
    serving.produced(["a", "b"], 1.2)
    serving.waited(0.1, 1.3)
    serving.arrived("c", 1.25, 512)
    serving.produced(["a", "b", "c"], 1.4)
    serving.arrived("d", 1.41, 512)  # the prompts that a rollout step delayed have their first tokens
    assert serving.prefill_room(1.6, MODEL) == 512


def test_a_queue_that_never_empties_is_prefilled_whole_again_once_what_piled_up_is_through() -> None:
    serving = books()
    serving.produced(["a"], 1.0)
    serving.waited(0.1, 1.1)
    serving.arrived("b", 1.05, 512)
    serving.arrived("c", 1.15, 512)  # and so the queue does not empty
    assert serving.prefill_room(1.16, MODEL) < 512
    serving.produced(["a", "b"], 1.3)
    assert serving.prefill_room(1.48, MODEL) == 512


def test_a_burst_that_comes_to_an_idle_gpu_is_prefilled_whole_beside_its_first_decodes() -> None:
    serving = books()
    serving.arrived("a", 1.0, 100)
    serving.arrived("b", 1.01, 512)
    serving.waited(0.05, 1.05)
    serving.arrived("c", 1.02, 512)
    serving.produced(["a"], 1.1)
    assert serving.prefill_room(1.28, MODEL) == 512


def test_other_modes_take_prefill_along_as_vllm_does() -> None:
    serving = books(GateMode.TTFT_ONLY)
    serving.produced(["a"], 1.0)
    serving.waited(0.1, 1.1)
    serving.arrived("b", 1.05, 512)
    assert serving.prefill_room(1.3, MODEL) == 512


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 8)), min_size=1, max_size=30),
    st.sampled_from([GateMode.DUAL, GateMode.TPOT_ONLY]),
    st.floats(0, 0.7),
)
def test_the_view_after_a_step_in_flight_promises_no_more_slack_than_there_will_be(
    tokens: list[tuple[str, int]], mode: GateMode, load: float
) -> None:
    serving = books(mode)
    for name, tpot_ms in (("a", None), ("b", 150), ("c", 50)):
        own = SLO(ttft_s=1.0, tpot_s=tpot_ms / 1000) if tpot_ms is not None else None
        serving.arrived(name, 0.0, 10, own)
    serving.set_load(load)
    now = 0.0
    for name, gap in tokens:
        now += gap / 100
        serving.produced([name], now)
    serving.finished(name for name in "abc" if name not in {made for made, _ in tokens})
    promised = serving.view_after(now + 0.02, MODEL)
    serving.produced({made for made, _ in tokens}, now + 0.02)
    there_is = serving.view(now + 0.02, MODEL, has_work=True)
    assert promised.latest_start_s <= there_is.latest_start_s + 1e-9
    if promised.latest_start_s > now + 0.02:
        assert promised.has_pending_prefill == there_is.has_pending_prefill


@pytest.mark.parametrize("mode", list(GateMode))
def test_every_mode_has_a_view_after_the_steps_in_flight(mode: GateMode) -> None:
    serving = books(mode)
    assert serving.view_after(1.0, MODEL).latest_start_s == NEVER
    serving.produced(["a", "b"], 1.0)
    serving.finished(["a"])  # whose due time was the least
    assert serving.view_after(1.02, MODEL).latest_start_s >= latest(serving, 1.02)
    serving.produced(["b"], 1.1)
    serving.finished(["b"])
    assert serving.view_after(1.2, MODEL).latest_start_s == NEVER


def test_no_slack_is_expected_behind_a_step_while_a_request_waits_for_its_first_token() -> None:
    serving = books()
    serving.produced(["a"], 1.0)
    assert serving.view_after(1.02, MODEL).latest_start_s == pytest.approx(1.0 + 0.1 + 0.095 - 0.011)
    serving.arrived("b", 1.0, 100)
    assert serving.view_after(1.02, MODEL).has_pending_prefill


def test_no_work_means_no_deadline() -> None:
    serving = books()
    serving.produced(["a"], 1.0)
    assert serving.view(1.0, MODEL, has_work=False).latest_start_s == NEVER


@given(
    st.lists(st.tuples(st.sampled_from(["arrive", "chunk", "token", "end"]), st.integers(0, 5)), max_size=60)
)
def test_books_agree_after_any_history(events: list[tuple[str, int]]) -> None:
    serving = books()
    seen: set[str] = set()
    for now, (kind, number) in enumerate(events):
        name = f"r{number}"
        if kind == "arrive" and name not in seen:
            seen.add(name)
            serving.arrived(name, float(now), 100)
        elif kind == "chunk":
            serving.prefilled(name, 50)
        elif kind == "token" and name in seen:
            serving.produced([name], float(now))
        elif kind == "end":
            seen.discard(name)
            serving.finished([name])
        serving.check_integrity()
        assert serving.num_decodes + serving.has_pending_prefill <= len(seen)


def test_the_wait_for_a_rollout_step_is_taken_off_the_request_that_met_it() -> None:
    serving = books()
    serving.arrived("a", 1.0, 100)
    serving.waited(0.1, 1.1)
    serving.produced(["a"], 1.3)
    serving.waited(0.05, 1.4)
    serving.produced(["a"], 1.5)
    serving.finished(["a"])
    (delay,) = serving.ended
    assert (delay.ttft_s, delay.ttft_waited_s) == pytest.approx((0.3, 0.1))
    assert (delay.tpot_s, delay.tpot_waited_s) == pytest.approx((0.2, 0.05))


def test_a_request_that_came_during_a_wait_is_charged_what_was_left_of_it() -> None:
    serving = books()
    serving.arrived("a", 1.0, 100)
    serving.waited(0.1, 1.1)
    serving.produced(["a"], 1.2)
    serving.arrived("b", 1.04, 100)  # taken in after the step
    serving.produced(["b"], 1.4)
    serving.finished(["b"])
    (delay,) = serving.ended
    assert (delay.ttft_s, delay.ttft_waited_s) == pytest.approx((0.36, 0.06))


def test_whoever_joins_a_delayed_queue_of_prefills_is_delayed_as_well() -> None:
    serving = books()
    serving.arrived("a", 1.0, 5000)
    serving.waited(0.1, 1.1)
    serving.arrived("b", 1.2, 100)
    serving.produced(["a", "b"], 1.5)
    serving.finished(["b"])
    assert serving.ended[0].ttft_waited_s == pytest.approx(0.1)


def test_a_decoders_requests_have_a_tpot_and_no_ttft() -> None:
    serving = books(deployment=Deployment.DECODE)
    serving.waited(9.0, 0.5)
    serving.arrived("a", 1.0, 100)
    serving.produced(["a"], 1.1)
    serving.finished(["a"])
    (delay,) = serving.ended
    assert (delay.ttft_s, delay.tpot_waited_s) == (0.0, 0.0)
    assert delay.tpot_s == pytest.approx(0.1)


def test_requests_that_are_older_than_the_books_are_not_measured() -> None:
    serving = books()
    for name in ("waiting", "decoding"):
        serving.arrived(name, 1.0, 100)
    serving.produced(["decoding"], 1.1)
    serving.leave_out_present()
    serving.produced(["waiting", "decoding"], 1.2)
    serving.check_integrity()
    serving.finished(["waiting", "decoding"])
    assert serving.ended == []
