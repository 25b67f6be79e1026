"""Model Runner V2, vLLM's default on GPUs: its warm-up touches block 0 alone, and it answers as stock, with
draft tokens too."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import engine_runs
import pytest
from forked_engines import Fork
from probes import prompt
from real_engine import new_folder, runtime_dir
from references import ModelDirs
from speculative_runs import speculation
from test_models_in_slabs import assert_greedy
from tiny_models import SLAB_BYTES, make_eagle3_head, make_mtp_model
from v2_runs import ENV, read_moves

from rose.engine.stock import STOCK_ENV
from rose.memory.daemon.daemon import start_daemon

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [prompt(f"v2-{index}", 60 + 30 * index) for index in range(4)]
TOKENS = 16
TIMEOUT_S = 1200.0


def run_v2(folder: Path, pool: str, num_ranks: int = 1, **given: Any) -> Any:
    """Starts a pool and runs v2_runs.py in it, with the prompts and these arguments."""
    arguments, answers, log = (folder / name for name in ("given.json", "answers.json", "v2.log"))
    arguments.write_text(json.dumps({"pool": pool, "prompts": PROMPTS, "max_tokens": TOKENS, **given}))
    environment = {**os.environ, **STOCK_ENV, **ENV, "ROSE_RUNTIME_DIR": str(runtime_dir(folder))}
    size: dict[str, Any] = {"num_slabs": 24, "slab_bytes": SLAB_BYTES // num_ranks, "headroom_slabs": 6}
    with (
        start_daemon(pool, **size, num_shards=num_ranks, runtime_dir=runtime_dir(folder)),
        log.open("w") as output,
    ):
        argv = [
            *(sys.executable, str(Path(__file__).with_name("v2_runs.py"))),
            *(str(arguments), str(answers)),
        ]
        done = subprocess.run(
            argv, env=environment, stdout=output, stderr=output, timeout=TIMEOUT_S, check=False
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    return json.loads(answers.read_text())


@pytest.fixture(scope="module")
def expected(engines_dir: Path, models: ModelDirs) -> list[list[int]]:
    return stock_answers(engines_dir, models.untied[0])


def stock_answers(folder: Path, model: Path) -> list[list[int]]:
    stock = Fork(folder, engine_runs.stock_answers, model=model, prompts=PROMPTS, max_tokens=TOKENS)
    try:
        answers: list[list[int]] = stock.result()
    finally:
        stock.stop()
    return answers


def test_v2_warms_up_on_block_0_and_answers_as_stock_over_a_cut_and_counts_what_others_generated(
    engines_dir: Path, models: ModelDirs, expected: list[list[int]]
) -> None:
    found = run_v2(new_folder(engines_dir, "v2"), "v2", model=str(models.untied[0]))
    assert found["written"] == [0]
    assert found["told"] == found["whole"] != found["not told"]
    ends = [end for _, end in found["replies"]]
    assert set(ends) == {"length", "abort"}
    for (tokens, _), whole in zip(found["replies"], expected, strict=True):
        assert tokens == whole[: len(tokens)]


def test_v2_answers_as_stock_with_a_draft_model_while_slabs_leave(
    engines_dir: Path, models: ModelDirs, expected: list[list[int]]
) -> None:
    """Most drafts are wrong: the draft model has other weights. Triton's interpreter refuses the kernel with
    which V2 drafts by ngram ("mask has unsupported dtype")."""
    found = run_v2(
        new_folder(engines_dir, "drafted"),
        "v2-drafted",
        model=str(models.untied[0]),
        speculative=speculation("draft_model", models.untied[1]),
        num_rounds=2,
    )
    assert_greedy(read_moves(found["moves"]), expected)
    assert found["num_drafts"] > 0
    assert "standalone_ar.speculator" in found["modules"]


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_v2_drafts_in_the_last_stage_of_a_pipeline_and_answers_as_stock_while_slabs_leave(
    engines_dir: Path, models: ModelDirs, expected: list[list[int]], method: str
) -> None:
    folder = new_folder(engines_dir, method)
    model, layers = models.untied[0], "3,1"
    if method == "mtp":
        model, layers = make_mtp_model(folder / "model", dtype="float32"), "1,1"
        expected = stock_answers(engines_dir, model)
    head = make_eagle3_head(folder / "head") if method == "eagle3" else None
    found = run_v2(
        folder,
        f"v2-{method}",
        num_ranks=2,
        layers=layers,
        model=str(model),
        speculative=speculation(method, head),
        num_rounds=4,
    )
    assert_greedy(read_moves(found["moves"]), expected)
    assert found["num_drafts"] > 0


def test_v2_answers_as_stock_in_a_pipeline_with_async_scheduling_also_behind_a_gate(
    engines_dir: Path, models: ModelDirs, expected: list[list[int]]
) -> None:
    """vLLM then holds a step more than there are stages, and a step's tokens reach the first stage as many
    passes later as there are stages. Behind a gate one step is in flight."""
    model = str(models.untied[0])
    folder = new_folder(engines_dir, "staged")
    found = run_v2(folder, "v2-staged", num_ranks=2, model=model, layers="1,3")
    assert found["queue"] == 3
    assert found["in_flight"] == [2, 1]
    assert {end for _, end in found["replies"]} == {"length", "abort"}
    for (tokens, _), whole in zip(found["replies"], expected, strict=True):
        assert tokens == whole[: len(tokens)]
    assert found["gated"] == expected
