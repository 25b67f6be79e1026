"""What a real engine takes for a stall."""

from pathlib import Path

import engine_runs
import pytest
from forked_engines import Fork
from probes import prompt
from references import ModelDirs

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_a_request_that_waits_behind_anothers_prefill_does_not_stall(
    tmp_path: Path, models: ModelDirs
) -> None:
    prompts = [prompt("long", 3 * engine_runs.STEP_TOKENS), prompt("short", 20)]
    run = Fork(tmp_path, engine_runs.wait_behind_a_prefill, model=models.untied[0], prompts=prompts)
    try:
        replies = run.result()
    finally:
        run.stop()
    assert [(reply.finish_reason, len(reply.tokens)) for reply in replies] == [("length", 4), ("length", 4)]
