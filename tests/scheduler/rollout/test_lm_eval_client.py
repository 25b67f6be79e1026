"""lm-eval, unmodified, finds the same through the router as at the engine itself."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.lm_eval_runs import lm_eval_results
from tests.scheduler.rollout.stock_worker import SERVED_MODEL, StockWorker

pytestmark = [pytest.mark.vllm, pytest.mark.clients]
QUESTIONS = [
    {"asked": f"w{number} w7 w11", "answer": "?", "choices": ["w1 w2", "w9 w3"]} for number in (3, 5, 8)
]
DOCS = {"generated": QUESTIONS, "scored": QUESTIONS}


def scores(results: dict[str, dict[str, Any]]) -> list[float]:
    """The log-probability of each choice."""
    return [float(choice[0][0]) for sample in results["scored"]["samples"] for choice in sample]


async def test_lm_eval_finds_the_same_completions_and_scores_as_at_the_engine_itself(
    engine: StockWorker, tmp_path: Path
) -> None:
    async with running_router(engine.url) as router:
        own, through = [
            await asyncio.to_thread(
                lm_eval_results, f"{url}/v1/completions", SERVED_MODEL, engine.model, tmp_path / name, DOCS
            )
            for name, url in (("own", engine.url), ("through", router.url))
        ]
    assert through["generated"]["samples"] == own["generated"]["samples"]
    assert scores(through) == pytest.approx(scores(own), abs=1e-2)
    assert (
        len(scores(own)) == len(QUESTIONS) * 2 and through["scored"]["acc,none"] == own["scored"]["acc,none"]
    )
