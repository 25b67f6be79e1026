import io
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console

from rose.config import Settings
from rose.engine.status import Field, StatusPage, page_path
from rose.messages import HarmEstimate, HarmHistory, HarmWindow, Harvest, TenantHarm
from rose.node.control import urls_on_this_host
from rose.node.harm import BROKEN_STATUS, NAMES, harm_line, harm_page, harm_sentence, main
from rose.types import GateMode


def status(value: float, half_width: float, *, closed_share: float = 0.05, earlier: int = 1) -> HarmHistory:
    estimate = HarmEstimate(value=value, low=value - half_width, high=value + half_width)
    window = HarmWindow(
        gate=GateMode.IDLE,
        ended_at_s=1_800_000_000,
        seconds=2520,
        num_requests=3810,
        requests_s=2520,
        num_closed_slices=620,
        slowdown=estimate,
        latencies={name: estimate for name in NAMES},
        with_rollouts_ms={"ttft_p50": 41.3, "ttft_p99": 214, "tpot_p50": 11.2, "tpot_p99": 14.9},
        without_rollouts_ms={"ttft_p50": 41.2, "ttft_p99": 212, "tpot_p50": 11.2, "tpot_p99": 14.8},
        seconds_until_known=5400,
        harvest=Harvest(seconds=2520, tokens=412_000, rollout_s=1260, serving_s=840),
    )
    return HarmHistory(
        gate=GateMode.IDLE,
        allow_harm=0.02,
        is_bounded=True,
        closed_share=closed_share,
        is_retreating=closed_share > 0.05,
        slo_ttft_ms=500,
        slo_tpot_ms=100,
        recent=window,
        hour=window,
        hours=[window] * (1 + earlier),
    )


def shown(report: HarmHistory, *, all_hours: bool = False) -> str:
    terminal = io.StringIO()
    page = harm_page("http://127.0.0.1:8000", report, all_hours=all_hours)
    Console(width=80, file=terminal).print(page)
    assert max(map(len, terminal.getvalue().splitlines())) <= 80
    return terminal.getvalue()


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
    unknown = status(0.0, 1.0).model_copy(update={"note": "no rollout engine is attached"})
    assert harm_sentence(unknown) == "Nothing is known now: no rollout engine is attached."


def test_an_hour_without_estimates_is_unknown() -> None:
    unknown = status(0.0, 1.0)
    assert unknown.hour is not None
    unknown.hour.latencies.clear()
    assert harm_sentence(unknown) == "Nothing is known now: no P99 is estimated yet."


def test_one_screen_says_what_serving_had_what_it_has_and_what_rollouts_earned() -> None:
    page = shown(status(0.01, 0.005))
    lines = [" ".join(line.split()) for line in page.splitlines()]
    assert "serving had it has slower with rollouts SLO" in lines
    assert "TTFT P99 212 ms 214 ms +1.0% (+0.5% +1.5%) 500 ms" in lines
    assert "TPOT P50 11.2 ms 11.2 ms +1.0% (+0.5% +1.5%)" in lines
    text = " ".join(lines)
    assert "3,810 requests (all of it) and 620 slices of time without rollouts" in text
    assert "earned 412,000 tokens (163 a second) in 21 min of steps: 75% of what serving left idle" in text
    assert "Within the bound: no P99 is more than 2% slower with rollouts." in text
    assert len(page.splitlines()) <= 24 and "…" not in page


def test_tenants_are_shown_by_hour() -> None:
    report = status(0.01, 0.005, earlier=5)
    few = report.hours[0].model_copy(
        update={"num_requests": 3, "latencies": {}, "with_rollouts_ms": {}, "harvest": None}
    )
    tenants = {"search": report.hours[0], "[beta]" + 26 * "#": few}
    report.hours = [each.model_copy(update={"tenants": tenants}) for each in report.hours]
    page = shown(report)
    assert page.count("#") == 26  # a long name takes several lines, and loses nothing
    assert page.count("[beta]") == 1 and "2 more hours: rose harm --hours" in page
    whole = shown(report, all_hours=True)
    assert whole.count("[beta]") == 6 and "more hours" not in whole
    assert "214 ms +1.0% (+0.5% +1.5%)" in " ".join(whole.split())


def test_a_busy_hour_says_how_much_of_it_the_requests_are_from() -> None:
    report = status(0.01, 0.005)
    report.hours[0] = report.hours[0].model_copy(update={"requests_s": 300})
    assert "requests (the last 5 min alone)" in " ".join(shown(report).split())


def test_a_mode_that_spends_slack_says_that_the_bound_is_not_kept() -> None:
    spent = {"gate": GateMode.DUAL, "is_bounded": False}
    report = status(1.5, 0.1).model_copy(update=spent)
    text = harm_sentence(report)
    assert text.startswith(
        "The bound of 2% is not kept: gate dual spends slack. The worst P99 differs by +150"
    )
    nothing = report.model_copy(update={"note": "3 requests ended"})
    assert harm_sentence(nothing).startswith("The bound of 2% is not kept: gate dual spends slack. Nothing")


def test_a_bound_that_a_day_does_not_show_is_told_with_one_that_it_does() -> None:
    report = status(0.001, 0.05)
    noisy = {"seconds_until_known": 1e6, "shown_in_a_day": 0.0043}
    assert report.hour is not None
    report.hour = report.hour.model_copy(update=noisy)
    assert "a day shows 0.43% at best: set allow_harm to at least that" in harm_sentence(report)


def test_an_slo_that_serving_alone_misses_is_on_the_screen_and_in_the_short_form() -> None:
    report = status(0.01, 0.005).model_copy(update={"slo_problem": "the TTFT P99 is 812 ms"})
    assert "SLO: the TTFT P99 is 812 ms." in shown(report)
    line = harm_line(report)
    assert line.startswith(
        "TTFT P99 was 212 ms, is 214 ms; TPOT P99 was 14.8 ms, is 14.9 ms; rollouts earned"
    )
    assert line.endswith("SLO: the TTFT P99 is 812 ms.")


def test_the_short_form_names_the_tenant_that_is_slowed_most() -> None:
    worst = TenantHarm(
        tenant="search", latency="tpot_p99", harm=HarmEstimate(value=0.04, low=0.031, high=0.05)
    )
    report = status(0.01, 0.005).model_copy(update={"worst_tenant": worst})
    assert harm_line(report).endswith("Worst tenant: search, TPOT P99 +4.0% (+3.1% +5.0%).")


def test_engines_of_this_host_are_found_by_their_pages(runtime_dir: Path) -> None:
    up, starting = (StatusPage(page_path(runtime_dir, name), create=True) for name in ("a", "b"))
    up.put_url("http://127.0.0.1:8000")
    page_path(runtime_dir, "empty").touch()
    dead = StatusPage(page_path(runtime_dir, "dead"), create=True)
    dead.put_url("http://127.0.0.1:8001")
    dead.put(Field.PID, 2**22 + 1)
    assert urls_on_this_host(Settings.from_environment()) == ["http://127.0.0.1:8000"]
    starting.close()


def test_no_engine_on_this_host_is_one_line(runtime_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "no serving engine with a pool in" in capsys.readouterr().err


def test_an_engine_that_is_gone_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from rose.arguments import run_command

    assert run_command("harm", main, ["--worker", "http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_an_engine_that_is_gone_hides_no_other_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = status(0.08, 0.01).model_dump_json().encode()

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

    with HTTPServer(("127.0.0.1", 0), Engine) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        there = ["--worker", f"http://127.0.0.1:{server.server_port}"]
        assert main(there) == BROKEN_STATUS
        assert main(["--worker", "http://127.0.0.1:9", *there]) == 1
        server.shutdown()
    shown, told = capsys.readouterr()
    assert shown.count("Above the bound") == 2 and told.count("rose: error: harm: http://127.0.0.1:9/") == 1


def test_a_report_without_a_folder_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--json", str(tmp_path / "no" / "x.json")])
    assert ended.value.code == 2 and "there is no folder" in capsys.readouterr().err


def test_a_certain_violation_is_told_beside_a_larger_uncertain_one() -> None:
    report = status(0.08, 0.03)
    assert report.hour is not None
    report.hour.latencies["ttft_p99"] = HarmEstimate(value=0.3, low=-0.1, high=0.7)
    assert harm_sentence(report).startswith("Above the bound of 2%: a P99 is 8.0% slower")
