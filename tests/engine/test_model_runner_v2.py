"""Model Runner V2, vLLM's default on GPUs: its warm-up touches block 0 alone, and it answers as stock."""

import json
import os
import subprocess
import sys
from pathlib import Path

import engine_runs
import pytest
from forked_engines import Fork
from probes import prompt
from real_engine import runtime_dir
from references import ModelDirs
from tiny_models import SLAB_BYTES
from v2_runs import ENV

from rose.engine.stock import STOCK_ENV
from rose.memory.daemon.daemon import start_daemon

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [prompt(f"v2-{index}", 60 + 30 * index) for index in range(4)]
TOKENS = 16
TIMEOUT_S = 1200.0


def test_v2_warms_up_on_block_0_and_answers_as_stock_over_a_cut_and_counts_what_others_generated(
    engines_dir: Path, models: ModelDirs
) -> None:
    folder = engines_dir / "v2"
    folder.mkdir()
    model = models.untied[0]
    given, answers = folder / "given.json", folder / "answers.json"
    given.write_text(
        json.dumps({"model": str(model), "pool": "v2", "prompts": PROMPTS, "max_tokens": TOKENS})
    )
    environment = {**os.environ, **STOCK_ENV, **ENV, "ROSE_RUNTIME_DIR": str(runtime_dir(folder))}
    stock = Fork(folder, engine_runs.stock_answers, model=model, prompts=PROMPTS, max_tokens=TOKENS)
    with (
        start_daemon(
            "v2", num_slabs=24, slab_bytes=SLAB_BYTES, headroom_slabs=6, runtime_dir=runtime_dir(folder)
        ),
        (folder / "v2.log").open("w") as log,
    ):
        argv = [sys.executable, str(Path(__file__).with_name("v2_runs.py")), str(given), str(answers)]
        done = subprocess.run(argv, env=environment, stdout=log, stderr=log, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, (folder / "v2.log").read_text()[-3000:]
    found = json.loads(answers.read_text())
    assert found["written"] == [0]
    assert found["told"] == found["whole"] != found["not told"]
    ends = [end for _, end in found["replies"]]
    assert set(ends) == {"length", "abort"}
    try:
        for (tokens, _), expected in zip(found["replies"], stock.result(), strict=True):
            assert tokens == expected[: len(tokens)]
    finally:
        stock.stop()
