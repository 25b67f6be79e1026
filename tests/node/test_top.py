"""The page of `rose top`, from statuses as engines send them."""

import io

import pytest
from rich.console import Console

from rose.messages import WorkerStatus
from rose.node.top import Sample, status_page

STATUS = WorkerStatus.model_validate(
    {name: 0 for name in WorkerStatus.model_fields}
    | {
        "role": "rollout",
        "model": "/models/policy",
        "engine_id": "e",
        "weight_version": "lake/7",
        "num_running": 3,
        "num_waiting": 2,
        "kv_slabs_owned": 40,
        "kv_slabs_budget": 64,
        "pressure": "pressure",
        "gate": {"mode": "dual", "admitted_steps": 1, "declined_steps": 3},
        "reclaimed_requests": 4,
        "stalled_requests": 1,
        "generated_tokens": 1000,
    }
)


def render(samples: list[Sample], before: dict[str, Sample]) -> str:
    terminal = io.StringIO()
    Console(width=80, file=terminal).print(status_page(samples, before))
    return terminal.getvalue()


def sample(taken_at_s: float, tokens: int) -> Sample:
    status = STATUS.model_copy(update={"generated_tokens": tokens})
    return Sample(worker="http://127.0.0.1:8001", taken_at_s=taken_at_s, status=status)


@pytest.mark.parametrize(
    "cell",
    ["127.0.0.1:8001", "rollout", "lake/7", "3+2", "40/64", "pressure", "dual 25%", " 5 ", " 300"],
)
def test_a_row_shows_what_the_engine_says(cell: str) -> None:
    earlier = sample(taken_at_s=10.0, tokens=1000)
    assert cell in render([sample(taken_at_s=12.0, tokens=1600)], {earlier.worker: earlier})


def test_slabs_in_quarantine_are_told_of() -> None:
    status = STATUS.model_copy(update={"pool_slabs_quarantined": 7})
    page = render([Sample(worker="http://x:1", taken_at_s=0.0, status=status)], {})
    assert "http://x:1: 7 slabs of its pool in quarantine" in page
    assert "quarantine" not in render([sample(0.0, 0)], {})


def test_a_restarted_engine_has_no_rate() -> None:
    earlier = sample(taken_at_s=10.0, tokens=1000)
    assert render([sample(taken_at_s=12.0, tokens=5)], {earlier.worker: earlier}).rstrip().endswith(" -")


def test_a_worker_without_answer_leaves_the_others_visible() -> None:
    page = render([Sample(worker="http://x:1", taken_at_s=0.0, error="refused"), sample(0.0, 0)], {})
    assert "http://x:1: refused" in page and "lake/7" in page
