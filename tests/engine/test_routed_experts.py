"""A mixture's engine in slabs says which experts processed each token, also of a request that a cut ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from probes import prompt
from real_engine import new_folder, runtime_dir
from tiny_models import SLAB_BYTES, make_moe_model
from v2_runs import ENV

from rose.engine.stock import STOCK_ENV
from rose.memory.daemon.daemon import start_daemon

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_SLABS = 24
TIMEOUT_S = 600.0
TOKENS = 12
PROMPTS = [prompt(f"routed-{index}", 60 + 30 * index) for index in range(4)]


def test_the_rows_before_and_behind_a_cut_are_those_of_the_uncut_request(engines_dir: Path) -> None:
    folder = new_folder(engines_dir, "routed")
    model, given, answers = make_moe_model(folder / "model"), folder / "given.json", folder / "answers.json"
    asked = {"model": str(model), "pool": "routed", "prompts": PROMPTS, "max_tokens": TOKENS}
    given.write_text(json.dumps({**asked, "num_slabs": NUM_SLABS}))
    its_dir = runtime_dir(folder)
    environment = {**os.environ, **STOCK_ENV, **ENV, "ROSE_RUNTIME_DIR": str(its_dir)}
    argv = [sys.executable, str(Path(__file__).with_name("routed_runs.py")), str(given), str(answers)]
    with (
        start_daemon(
            "routed", num_slabs=NUM_SLABS, slab_bytes=SLAB_BYTES, headroom_slabs=6, runtime_dir=its_dir
        ),
        (folder / "log").open("w") as log,
    ):
        done = subprocess.run(argv, env=environment, stdout=log, stderr=log, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, (folder / "log").read_text()[-3000:]
    found = json.loads(answers.read_text())
    stops = [each["stop_reason"] for each in found["cut"]]
    assert set(stops) == {None, "rose_reclaimed"}
    for ids, whole, cut, rest in zip(PROMPTS, found["whole"], found["cut"], found["rest"], strict=True):
        assert len(whole["rows"]) == len(ids) + TOKENS - 1
        assert {len(layers) for layers in whole["rows"]} == {4}
        assert [*cut["tokens"], *rest["tokens"]] == whole["tokens"]
        assert len(cut["rows"]) == len(ids) + len(cut["tokens"]) - 1
        assert [*cut["rows"], *rest["rows"]] == whole["rows"]
