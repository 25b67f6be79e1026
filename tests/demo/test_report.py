import io
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from measured import training_step
from rich.console import Console

from rose.demo.figures import compute_figures
from rose.demo.live import DemoPart, LiveView
from rose.demo.records import DemoResult, PhaseName
from rose.demo.report import disturbance, print_summary, write_report
from rose.demo.run import main
from rose.errors import ConfigError
from rose.measure.environment import Environment
from rose.measure.records import RequestRecord, Window
from rose.measure.slabs import SlabEvent, SlabEventKind, SlabSample

ENV = Environment(commit="abc", cpu="test", gpu=None, versions={}, seed=0, quick=True)


def some_result(notes: tuple[str, ...] = ()) -> DemoResult:
    request = RequestRecord(
        request_id="r0",
        scheduled_s=0.0,
        sent_s=0.0,
        prompt=[1, 2, 3, 4],
        max_tokens=3,
        token_times_s=[0.1, 0.2, 0.3],
        token_ids=[1, 2, 3],
        status=200,
        finish_reason="length",
    )
    return DemoResult(
        is_quick=False,
        phases=tuple(
            Window(name=name, start_s=0.0, duration_s=10.0, requests=(request,), rollout_tokens=500)
            for name in PhaseName
        ),
        steps=tuple(training_step(i, i / 10) for i in range(10)),
        slab_samples=tuple(
            SlabSample(t_s=float(t), serving=4, rollout=2, free=2, budget=3) for t in range(5)
        ),
        slab_events=(SlabEvent(t_s=2.0, kind=SlabEventKind.CUT, count=2),),
        notes=notes,
    )


def write(result: DemoResult, path: Path) -> None:
    write_report(result, compute_figures(result), ENV, path)


@pytest.fixture
def _matplotlib() -> None:
    pytest.importorskip("matplotlib")


@pytest.mark.usefixtures("_matplotlib")
def test_report_is_one_file_that_fetches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.html"
    write(some_result(), path)
    page = path.read_text()
    assert page.count("<svg") == 3
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "<script" not in page
    addresses = [a for a in re.findall(r'(?:https?:)?//[^\s"\']+', page) if "www.w3.org" not in a]
    assert addresses == []


@pytest.mark.usefixtures("_matplotlib")
def test_the_first_sentence_is_the_result_and_all_ways_of_sharing_are_shown(tmp_path: Path) -> None:
    write(some_result(), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    first = page[page.index("<main>") :].split("</h1>")[0]
    assert "Under ROSE, 100.0% of the serving requests met" in first
    for way in (
        "serving alone",
        "naive co-location",
        "strict alternation",
        "static split",
        "ROSE, full load",
    ):
        assert page.count(way) >= 2  # in the chart and in the table


@pytest.mark.usefixtures("_matplotlib")
def test_report_marks_cuts_and_escapes_notes(tmp_path: Path) -> None:
    write(some_result(notes=("<b>not bold</b>",)), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "cuts (2)" in page
    assert "&lt;b&gt;not bold&lt;/b&gt;" in page


def test_report_of_a_run_that_measured_nothing_says_so(tmp_path: Path) -> None:
    empty = DemoResult(is_quick=True, phases=())
    write(empty, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("not judged") == 6
    assert "<svg" not in page


def test_summary_names_every_criterion_and_keeps_bracketed_names() -> None:
    out = io.StringIO()
    print_summary(some_result(), compute_figures(some_result()), ENV, Console(file=out, width=100))
    text = out.getvalue()
    for part in ("TTFT of 3 medians", "TPOT of 2 medians", "mean reward", "static split"):
        assert part in text


def test_each_part_is_named_once_with_its_time_and_what_comes_next() -> None:
    out, times = io.StringIO(), iter([0.0, 0.0, 1.0, 61.0, 62.0])
    parts = (DemoPart("engines start", 60.0), DemoPart("rollouts run", 30.0))
    with LiveView(Console(file=out, width=100), parts, now=lambda: next(times)) as view:
        for _ in parts:
            view.begin()
            view.update("nothing is shown without a terminal")
    assert out.getvalue().splitlines() == [
        "[0:00] 2 parts follow; together they take about 2 minutes",
        "[0:01] 1 of 2: engines start, about 60 s; then rollouts run",
        "[1:01] 2 of 2: rollouts run, about 30 s",
    ]


def test_live_view_redraws_a_terminal() -> None:
    out, times = io.StringIO(), itertools.count()
    with LiveView(Console(file=out, force_terminal=True), (), now=lambda: float(next(times))) as view:
        view.update("slabs: serving 3, rollout 0, free 1")
    assert "serving 3, rollout 0, free 1" in out.getvalue()


def test_a_folder_that_holds_an_earlier_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with pytest.raises(ConfigError, match="holds an earlier run; name another folder"):
        main(["--out", str(tmp_path)])


@pytest.mark.usefixtures("_matplotlib")
def test_a_run_beside_other_work_is_marked_in_the_summary_and_in_the_report(tmp_path: Path) -> None:
    quiet = some_result()
    first, *others = quiet.phases
    busy = replace(quiet, phases=(replace(first, foreign_cpu_share=0.43), *others))
    assert disturbance(quiet) == ""
    out = io.StringIO()
    print_summary(busy, compute_figures(busy), ENV, Console(file=out, width=1000))
    assert "DISTURBED" in out.getvalue() and "43% in serving alone" in out.getvalue()
    write(busy, tmp_path / "report.html")
    assert "DISTURBED" in (tmp_path / "report.html").read_text()
