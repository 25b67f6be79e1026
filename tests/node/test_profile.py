"""`rose profile`: the page it prints, what it refuses. An engine measures itself in test_agent.py."""

import io
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from rose.admission.step_time import StepTimeModel
from rose.errors import ConfigError
from rose.messages import Profile
from rose.node.profile import draw, main, profile_page

MODEL = {
    "base_s": 0.0115,
    "per_prefill_token_s": 0.00069,
    "per_decode_s": 0.00056,
    "per_context_token_s": 0.0,
    "per_prefill_pair_s": 2e-8,
    "ratio_q99": 1.16,
    "margin_s": 0.0098,
}


@pytest.mark.parametrize("figure", ["11.5000 ms", "0.6900 ms", "0.0200 ms", "0.5600 ms", "1.16", "9.80 ms"])
def test_the_page_shows_every_part_of_the_model(figure: str) -> None:
    terminal = io.StringIO()
    Console(width=80, file=terminal).print(profile_page(MODEL))
    assert figure in terminal.getvalue()


def test_every_profile_is_drawn(tmp_path: Path) -> None:
    model = StepTimeModel.from_json(MODEL)
    shapes = [(tokens, 0, 0, 0.0) for tokens in (16, 64, 256)]
    shapes += [(0, count, 100 * count, 0.0) for count in (1, 4, 16)]
    observations = [(*shape, model.predict(*shape)) for shape in shapes * 8]
    terminal = io.StringIO()
    draw(
        Profile(file="m.json", model=MODEL, observations=observations),
        tmp_path / "m.png",
        Console(file=terminal),
    )
    if find_spec("matplotlib") is None:
        assert "no plot without matplotlib" in terminal.getvalue()
    else:
        assert (tmp_path / "m.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("path", "problem"), [("x.docx", "ends with .png, .svg, .pdf"), ("nowhere/x.png", "no such folder")]
)
def test_a_plot_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, path: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        main(["model", "--plot", str(tmp_path / path)])
