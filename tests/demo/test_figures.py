import json
from collections.abc import Sequence

import pytest
from measured import record, training_step

from rose.demo.figures import CRITERIA, compute_figures, judge, reward_ends
from rose.demo.records import DemoResult, PhaseName
from rose.measure.environment import Environment
from rose.measure.figures import to_json
from rose.measure.records import RequestRecord, Window

ENV = Environment(commit="abc", cpu="test", gpu=None, versions={}, seed=0, quick=True)


def phase(
    name: PhaseName, *, requests: Sequence[RequestRecord] = (), tokens: int = 0, busy_s: float = 0.0
) -> Window:
    return Window(
        name=name,
        start_s=0.0,
        duration_s=10.0,
        requests=tuple(requests),
        rollout_tokens=tokens,
        serving_busy_s=busy_s,
    )


def full_result() -> DemoResult:
    return DemoResult(
        is_quick=True,
        phases=(
            phase(PhaseName.SERVING_ALONE, requests=[record(ttft_s=0.1, tpot_s=0.02)], busy_s=3.0),
            phase(PhaseName.ROLLOUT_ALONE, tokens=10_000),
            phase(PhaseName.NAIVE, requests=[record(ttft_s=0.7, tpot_s=0.1)], tokens=7_000),
            phase(PhaseName.STATIC, requests=[record(ttft_s=0.2, tpot_s=0.03)], tokens=5_000),
            phase(PhaseName.ROSE, requests=[record(ttft_s=0.2, tpot_s=0.03)], tokens=8_500, busy_s=4.0),
        ),
        steps=tuple(training_step(i, i / 20) for i in range(20)),
        greedy_compared=4,
        greedy_equal=4,
    )


def test_figures_of_a_worked_run() -> None:
    figures = compute_figures(full_result())
    expected = {
        "greedy_equal": 1.0,
        "checksum_mismatches": 0,
        "slo_attainment[ttft]": 1.0,
        "slo_attainment[tpot]": 1.0,
        "demo_naive_attainment": 0.0,
        "demo_rose_attainment": 1.0,
        "harvested_fraction": 0.85,
        "serving_busy_share": 0.3,
        "rollout_tokens_per_s": 850.0,
        "reward_rise": 0.75,
        "wire_bytes_per_changed_element": 1.25,
    }
    assert {figure.name: figure.value for figure in figures.values()} == pytest.approx(expected)
    assert figures["harvested_fraction"].peers["static_split"] == pytest.approx(0.5)
    assert figures["slo_attainment[ttft]"].peers["naive"] == 0.0
    limits = [figures[f"slo_attainment[{name}]"].peers["objective, s"] for name in ("ttft", "tpot")]
    assert limits == pytest.approx([0.3, 0.04])


def test_an_engine_with_other_weights_than_the_trainer_is_counted() -> None:
    steps = (training_step(0, 0.0), training_step(1, 0.0, engine_hashes=("other", "hash-1")))
    figure = compute_figures(DemoResult(is_quick=True, phases=(), steps=steps))["checksum_mismatches"]
    assert (figure.value, figure.peers) == (1, {"checksums compared": 4})


def test_json_has_the_benchmark_format() -> None:
    body = json.loads(json.dumps(to_json(ENV, compute_figures(full_result()).values())))
    assert set(body) == {"env", "figures"}
    assert set(body["env"]) == {"commit", "cpu", "gpu", "versions", "seed", "quick"}
    for figure in body["figures"]:
        assert set(figure) == {"name", "value", "unit", "target", "kind", "peers", "spread"}
        assert figure["kind"] == "measured"


def test_what_was_not_measured_is_null_and_not_judged() -> None:
    empty = DemoResult(is_quick=True, phases=())
    figures = compute_figures(empty)
    assert {figure.value for figure in figures.values()} == {None}
    assert judge(empty, figures) == dict.fromkeys(CRITERIA)


def test_all_criteria_of_the_worked_run_are_met() -> None:
    result = full_result()
    assert judge(result, compute_figures(result)) == dict.fromkeys(CRITERIA, True)


def test_low_harvest_under_a_heavy_load_is_not_judged_but_under_a_light_one_falls_short() -> None:
    for busy_s, expected in ((3.0, False), (6.0, None)):
        result = DemoResult(
            is_quick=True,
            phases=(
                phase(PhaseName.SERVING_ALONE, requests=[record()], busy_s=busy_s),
                phase(PhaseName.ROLLOUT_ALONE, tokens=10_000),
                phase(PhaseName.ROSE, tokens=4_000),
            ),
        )
        assert judge(result, compute_figures(result))["harvested_fraction"] is expected


@pytest.mark.parametrize(("num_steps", "expected"), [(16, None), (60, False)])
def test_a_reward_that_had_too_few_steps_to_rise_is_not_judged(num_steps: int, expected: bool | None) -> None:
    steps = tuple(training_step(i, 0.05) for i in range(num_steps))
    result = DemoResult(is_quick=True, phases=(), steps=steps)
    figures = compute_figures(result)
    assert judge(result, figures)["reward_rise"] is expected
    assert figures["reward_rise"].peers["steps"] == num_steps


def test_reward_windows_never_overlap() -> None:
    steps = tuple(training_step(i, float(i)) for i in range(3))
    result = DemoResult(is_quick=True, phases=(), steps=steps)
    assert reward_ends(result) == (0.0, 2.0)
