"""`rose profile`: the page it prints, and a real engine that measures itself."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tiny_models import make_serving_model

from rose.errors import ConfigError
from rose.node.profile import main, profile_page

MODEL = {
    "base_s": 0.0115,
    "per_prefill_token_s": 0.00069,
    "per_decode_s": 0.00056,
    "per_context_token_s": 0.0,
    "ratio_q99": 1.16,
    "margin_s": 0.0098,
}


@pytest.mark.parametrize("figure", ["11.5000 ms", "0.6900 ms", "0.5600 ms", "1.16", "9.80 ms"])
def test_the_page_shows_every_part_of_the_model(figure: str) -> None:
    terminal = io.StringIO()
    Console(width=80, file=terminal).print(profile_page(MODEL))
    assert figure in terminal.getvalue()


@pytest.mark.parametrize(
    ("path", "problem"), [("x.docx", "ends with .png, .svg, .pdf"), ("nowhere/x.png", "no such folder")]
)
def test_a_plot_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, path: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        main(["model", "--plot", str(tmp_path / path)])


@pytest.mark.vllm
def test_an_engine_profiles_itself_and_the_profile_stays(
    tmp_path: Path,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))
    model = make_serving_model(tmp_path / "model")
    flags = ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"]
    plot = tmp_path / "profile.png"
    assert main([str(model), "--role", "serving", "--plot", str(plot), *flags]) == 0
    assert plot.stat().st_size > 1000
    (stored,) = (tmp_path / "cache" / "profiles").glob("*.json")
    profile = json.loads(stored.read_text())
    assert profile["model"]["base_s"] >= 0
    assert len(profile["observations"]) > 32
    assert str(stored) in capsys.readouterr().out
    assert list(runtime_dir.glob("engine-*.page")) == []
