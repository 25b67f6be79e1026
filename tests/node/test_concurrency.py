"""`rose profile --concurrency`: the cap that is picked, the page, the flags, a real engine."""

import io
from pathlib import Path

import pytest
from forked_server import forking
from rich.console import Console
from tiny_models import make_serving_model

from rose.messages import ConcurrencyPoint, ConcurrencyProfile
from rose.node.concurrency import levels, pick_cap, store
from rose.node.profile import concurrency_page, main

POINTS = {1: 100.0, 2: 190.0, 4: 350.0, 8: 610.0, 16: 960.0, 32: 990.0, 64: 870.0}
"""The shape of ROSE Figure 12."""


def points(rates: dict[int, float]) -> list[ConcurrencyPoint]:
    return [ConcurrencyPoint(concurrency=c, tokens_per_s=rate) for c, rate in rates.items()]


@pytest.mark.parametrize(
    ("rates", "cap"),
    [
        (POINTS, 16),
        ({1: 100.0}, 1),
        ({1: 100.0, 2: 101.0, 4: 60.0}, 1),
        ({1: 100.0, 2: 200.0, 4: 400.0}, 4),
        ({8: 0.0, 4: 0.0}, 4),
    ],
)
def test_the_cap_is_where_throughput_stops_growing(rates: dict[int, float], cap: int) -> None:
    assert pick_cap(points(rates)) == cap


def test_without_measurements_there_is_no_cap() -> None:
    with pytest.raises(ValueError, match="no throughput"):
        pick_cap([])


@pytest.mark.parametrize(("most", "found"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_concurrency_is_measured_at_powers_of_two_and_at_the_most(most: int, found: list[int]) -> None:
    assert levels(most) == found


def test_the_page_shows_every_point_and_the_cap_per_gpu() -> None:
    profile = ConcurrencyProfile(
        model="m",
        context_tokens=512,
        new_tokens=64,
        gpus=2,
        points=tuple(points(POINTS)),
        cap=16,
        turns_per_gpu=8,
    )
    terminal = io.StringIO()
    Console(width=80, file=terminal).print(concurrency_page(profile))
    lines = terminal.getvalue().splitlines()
    assert [line for line in lines if "990.0" in line]
    assert [line.split()[0] for line in lines if "8 per GPU" in line] == ["16"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--concurrency", "0"], "--concurrency: '0' is not a whole number of at least 1"),
        (["--concurrency", "--role", "serving"], "about rollouts"),
        (["--concurrency", "4", "--plot", "x.png"], "no plot"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["model", *flags])
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


def test_a_stored_profile_reads_back(tmp_path: Path) -> None:
    profile = ConcurrencyProfile(
        model="m",
        context_tokens=8,
        new_tokens=4,
        gpus=1,
        points=tuple(points(POINTS)),
        cap=16,
        turns_per_gpu=16,
    )
    store(profile, tmp_path / "new" / "c.json")
    assert ConcurrencyProfile.model_validate_json((tmp_path / "new" / "c.json").read_bytes()) == profile


@pytest.mark.vllm
def test_a_real_engines_cap_is_measured_and_stored(
    tmp_path: Path,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))
    model = make_serving_model(tmp_path / "model")
    flags = ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4"]
    with forking("vllm.entrypoints.openai.api_server"):
        assert main([str(model), "--concurrency", "4", *flags]) == 0
    (stored,) = (tmp_path / "cache" / "profiles").glob("concurrency-*.json")
    profile = ConcurrencyProfile.model_validate_json(stored.read_bytes())
    assert [point.concurrency for point in profile.points] == [1, 2, 4]
    assert all(point.tokens_per_s > 0 for point in profile.points)
    assert profile.cap in (1, 2, 4) and profile.context_tokens == 128
    assert str(stored) in capsys.readouterr().out.replace("\n", "")
    assert list(runtime_dir.glob("engine-*.page")) == []
