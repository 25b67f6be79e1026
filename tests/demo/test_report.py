import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from rose.demo import charts
from rose.demo.figures import compute_figures
from rose.demo.live import LiveState, LiveView, line
from rose.demo.records import (
    DemoResult,
    PhaseName,
    RewardPoint,
    SlabEvent,
    SlabEventKind,
    SlabSample,
    SyncPoint,
)
from rose.demo.report import print_summary, write_report
from rose.demo.run import main
from rose.errors import ConfigError
from rose.measure.environment import Environment
from rose.measure.records import RequestRecord, Window
from rose.types import SLO

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
    names = (PhaseName.SERVING_ALONE, PhaseName.ROLLOUT_ALONE, PhaseName.NAIVE, PhaseName.ROSE)
    return DemoResult(
        slo=SLO(ttft_s=0.6, tpot_s=0.15),
        seed=0,
        is_quick=False,
        phases=tuple(
            Window(name=name, start_s=0.0, duration_s=10.0, requests=(request,), rollout_tokens=500)
            for name in names
        ),
        rewards=tuple(RewardPoint(step=i, reward_mean=i / 10, success=i / 10) for i in range(10)),
        syncs=(SyncPoint(version="r/1", dense_bytes=900, coo_bytes=60, wire_bytes=13, num_changed=10),),
        slab_samples=tuple(
            SlabSample(t_s=float(t), serving=4, rollout=2, free=2, budget=3) for t in range(5)
        ),
        slab_events=(SlabEvent(t_s=2.0, kind=SlabEventKind.CUT, count=2),),
        notes=notes,
    )


def write(result: DemoResult, path: Path) -> None:
    write_report(result, compute_figures(result, ENV), path)


@pytest.fixture
def _matplotlib() -> None:
    pytest.importorskip("matplotlib")


@pytest.mark.usefixtures("_matplotlib")
def test_report_is_one_file_that_fetches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.html"
    write(some_result(), path)
    page = path.read_text()
    assert page.count("<svg") == 6
    assert "<script" not in page
    addresses = [a for a in re.findall(r'(?:https?:)?//[^\s"\']+', page) if "www.w3.org" not in a]
    assert addresses == []


@pytest.mark.usefixtures("_matplotlib")
def test_charts_take_every_colour_from_the_page(tmp_path: Path) -> None:
    write(some_result(), tmp_path / "report.html")
    drawings = re.findall(r"<svg.*?</svg>", (tmp_path / "report.html").read_text(), flags=re.DOTALL)
    for drawing in drawings:
        assert re.findall(r"(?:fill|stroke): #[0-9a-f]+", drawing) == []


@pytest.mark.usefixtures("_matplotlib")
def test_report_marks_cuts_and_escapes_notes(tmp_path: Path) -> None:
    write(some_result(notes=("<b>not bold</b>",)), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "cuts (2)" in page
    assert "&lt;b&gt;not bold&lt;/b&gt;" in page


def test_report_of_a_run_that_measured_nothing_says_so(tmp_path: Path) -> None:
    empty = DemoResult(slo=SLO(ttft_s=0.6, tpot_s=0.15), seed=0, is_quick=True, phases=())
    write(empty, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("not judged") == 6
    assert "<svg" not in page


def test_summary_names_every_criterion_and_keeps_bracketed_names() -> None:
    out = io.StringIO()
    print_summary(some_result(), compute_figures(some_result(), ENV), Console(file=out, width=100))
    text = out.getvalue()
    for part in ("TTFT within 600 ms", "TPOT within 150 ms", "Reward rises", "rollout_tokens_per_s"):
        assert part in text


def test_human_bytes_are_decimal() -> None:
    assert charts.human_bytes(999) == "999 B"
    assert charts.human_bytes(1_500_000) == "1.5 MB"


def test_live_view_prints_lines_when_there_is_no_terminal() -> None:
    out, clock = io.StringIO(), [0.0]
    state = LiveState(phase="rose", elapsed_s=61.0, events=["cut 3 slabs"])
    with LiveView(Console(file=out), now=lambda: clock[0]) as view:
        view.update(state)
        view.update(state)
        clock[0] = 11.0
        view.update(state)
    assert out.getvalue().splitlines() == ["[1:01] cut 3 slabs", "[1:01] rose"]


def test_live_view_redraws_a_terminal() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, force_terminal=True, width=100), now=lambda: 0.0) as view:
        view.update(LiveState(phase="naive", slabs_serving=3, slabs_free=1))
    assert "naive" in out.getvalue()
    assert "serving 3, rollout 0, free 1" in out.getvalue()


def test_line_leaves_out_what_is_unknown() -> None:
    assert line(LiveState()) == ""
    assert line(LiveState(rewards=[0.1, 0.25], weight_version="demo/2")) == (
        "reward 0.25 after 2 steps | weights demo/2"
    )


def test_a_folder_that_holds_an_earlier_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with pytest.raises(ConfigError, match="holds an earlier run; name another folder"):
        main(["--out", str(tmp_path)])
