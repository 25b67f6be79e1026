"""The operator's page explains what the code can answer."""

from pathlib import Path

import pytest

from rose.admission.gate import GateReason
from rose.config import Settings
from rose.scheduler.rollout.turn.attempt.endings import EndKind
from rose.types import GateMode

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "values"),
    [
        ("operations.md", [kind.value for kind in EndKind if kind is not EndKind.FINISHED]),
        ("operations.md", [reason.value for reason in GateReason]),
        ("gate.md", [mode.value for mode in GateMode]),
    ],
    ids=["causes of a reroute", "reasons of the gate", "modes of the gate"],
)
def test_every_value_that_users_see_has_a_row_in_a_table_of_the_docs(page: str, values: list[str]) -> None:
    text = (DOCS / page).read_text()
    assert [value for value in values if f"\n| `{value}` |" not in text] == []


def test_every_key_in_the_environment_is_explained() -> None:
    names = Settings.from_environment(
        {
            "ROSE_KEY": "a",
            "ROSE_ROUTER_ADMIN_KEY": "b",
            "ROSE_ROUTER_API_KEY": "c",
            "ROSE_WORKER_API_KEY": "d",
        }
    ).key_variables()
    text = (DOCS / "operations.md").read_text()
    assert len(names) == 4
    assert [name for name in names if f"\n| `{name}` |" not in text] == []
