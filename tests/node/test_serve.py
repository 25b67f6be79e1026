"""What `rose serve` says about its flags."""

import pytest

from rose.engine.settings import EngineSettings
from rose.node import serve
from rose.types import Deployment, GateMode, Role


def shown_help(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        serve.main(["--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "shown",
    [
        f"--role {{{','.join(Role)}}}",
        f"--gate {'|'.join(GateMode)} The test that a rollout step must pass",
        "(default: 0.02)",
        f"--deployment {'|'.join(Deployment)}",
        "--slo-ttft-ms MS The time to first token that serving keeps (default: 500.0)",
        "--poison-slabs true|false",
        "The default is the TPOT SLO, or 1.5 TPOT targets",
    ],
)
def test_the_help_shows_choices_defaults_and_units(capsys: pytest.CaptureFixture[str], shown: str) -> None:
    assert shown in shown_help(capsys)


def test_every_setting_of_the_plugin_is_explained() -> None:
    assert [name for name, field in EngineSettings.model_fields.items() if not field.description] == []
