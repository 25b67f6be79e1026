import io

import pytest
from rich.console import Console

from rose.messages import HarmEstimate, HarmStatus, HarmWindow
from rose.node.harm import NAMES, harm_page, harm_sentence, main


def status(value: float, half_width: float, *, closed_share: float = 0.05) -> HarmStatus:
    estimate = HarmEstimate(value=value, low=value - half_width, high=value + half_width)
    window = HarmWindow(
        seconds=600,
        num_requests=1200,
        num_closed_slices=90,
        slowdown=estimate,
        latencies={name: estimate for name in NAMES},
        seconds_until_known=5400,
    )
    return HarmStatus(
        allow_harm=0.02,
        closed_share=closed_share,
        is_retreating=closed_share > 0.05,
        recent=window,
        hours=[window, window],
    )


@pytest.mark.parametrize(
    ("value", "half_width", "expected"),
    [
        (0.01, 0.005, "Within the bound: no P99 is more than 2% slower with rollouts."),
        (0.08, 0.01, "Above the bound of 2%: a P99 is 8.0% slower with rollouts."),
        (
            0.01,
            0.05,
            "The worst P99 differs by +1.0% (-4.0% to +6.0%). Knowing it to 2% takes about 90 min more.",
        ),
    ],
)
def test_one_sentence_says_what_the_figures_mean(value: float, half_width: float, expected: str) -> None:
    assert harm_sentence(status(value, half_width)).startswith(expected)


def test_rollouts_that_are_shut_out_are_told() -> None:
    assert "shut out for 5% of the time, to measure." in harm_sentence(status(0.01, 0.005))
    assert "shut out for 60% of the time, because" in harm_sentence(status(0.05, 0.005, closed_share=0.6))


def test_what_is_not_known_is_told_with_its_reason() -> None:
    unknown = HarmStatus(
        allow_harm=0.02, closed_share=0.0, is_retreating=False, note="no rollout engine is attached"
    )
    assert harm_sentence(unknown) == "Nothing is known now: no rollout engine is attached."


def test_the_page_fits_eighty_columns() -> None:
    terminal = io.StringIO()
    report = status(0.01, 0.005)
    few = HarmWindow(seconds=9, num_requests=3, num_closed_slices=0)
    report.tenants = {"search": report.hours[0], "support [beta]": few}
    Console(width=80, file=terminal).print(harm_page("http://127.0.0.1:8000", report))
    assert "support [beta]" in terminal.getvalue()
    page = terminal.getvalue()
    assert all(name in page for name in ("lately", "this hour", "hours before", "TPOT P99"))
    assert "+1.0%" in page and "…" not in page


def test_an_engine_that_is_gone_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from rose.arguments import run_command

    assert run_command("harm", main, ["--worker", "http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_a_certain_violation_is_told_beside_a_larger_uncertain_one() -> None:
    report = status(0.08, 0.03)
    report.hours[0].latencies["ttft_p99"] = HarmEstimate(value=0.3, low=-0.1, high=0.7)
    assert harm_sentence(report).startswith("Above the bound of 2%: a P99 is 8.0% slower")
