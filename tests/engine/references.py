"""The checkpoints of the tests, and what stock vLLM answers with them."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forked_server import ForkedServer
from probes import (
    NUM_VERSIONS,
    PROBE_TOKENS,
    ROLLOUT_TOKENS,
    SERVING_TOKENS,
    WAVES,
    probes,
    wave_prompts,
)
from real_engine import Answer
from tiny_models import MAX_MODEL_LEN, make_rollout_model, make_serving_model

from rose.engine.stock import STOCK_ENV
from rose.node.processes import ServerProcess
from rose.types import Role, StopReason

REFERENCE_S = 1200.0


class ModelDirs:
    """Checkpoints: one to serve, and the versions 0..NUM_VERSIONS of each rollout model."""

    def __init__(self, root: Path) -> None:
        versions = range(NUM_VERSIONS + 1)
        self.serving = make_serving_model(root / "serving")
        self.untied = [make_rollout_model(root / f"untied-{v}", version=v) for v in versions]
        self.tied = [make_rollout_model(root / f"tied-{v}", version=v, is_tied=True) for v in versions]


class StockAnswers:
    """What stock vLLM answers, computed by a process of its own while the engines under test start."""

    def __init__(self, folder: Path, models: ModelDirs) -> None:
        waves = {role: [p for wave in range(WAVES) for p in wave_prompts(role, wave)] for role in Role}
        self._jobs = {
            "serving": _job(models.serving, waves[Role.SERVING], SERVING_TOKENS, batched=True),
            "rollout": _job(models.untied[0], waves[Role.ROLLOUT], ROLLOUT_TOKENS, batched=True),
            # One by one, as logprobs are compared bit by bit.
            "untied": _job(models.untied[-1], probes(), PROBE_TOKENS, batched=False),
        }
        for version, model in enumerate(models.tied):
            job = _job(model, probes(), PROBE_TOKENS, batched=False, dtype="bfloat16")
            self._jobs[f"tied-{version}"] = job
        jobs, self._answers = folder / "jobs.json", folder / "answers.json"
        jobs.write_text(json.dumps(list(self._jobs.values())))
        argv = [sys.executable, "-m", "rose.engine.stock", str(jobs), str(self._answers)]
        server = ServerProcess(argv, "stock", folder / "stock.log", env=STOCK_ENV)
        self._process = ForkedServer(server).start()

    def of(self, name: str) -> dict[tuple[int, ...], dict[str, Any]]:
        """Returns {tokens, logprobs} for each prompt. Waits until the process has ended."""
        assert self._process.wait(REFERENCE_S) == 0, self._process.log_tail()
        answers = json.loads(self._answers.read_text())[list(self._jobs).index(name)]
        return {tuple(p): one for p, one in zip(self._jobs[name]["prompts"], answers, strict=True)}

    def require_equal(self, answers: Mapping[Role, Iterable[tuple[Sequence[int], Answer]]]) -> None:
        """Asserts that engines' answers to prompts are stock vLLM's. Only rollouts may have been cut."""
        for role, given_and_answers in answers.items():
            expected = self.of(str(role))
            for given, answer in given_and_answers:
                is_whole = answer.finish_reason == "length"
                assert is_whole or (role is Role.ROLLOUT and answer.stop_reason == StopReason.RECLAIMED)
                assert answer.tokens == expected[tuple(given)]["tokens"][: len(answer.tokens)]

    def close(self) -> None:
        self._process.stop()


def _job(
    model: Path, prompts: list[list[int]], max_tokens: int, *, batched: bool, dtype: str = "float32"
) -> dict[str, Any]:
    return {
        "model": str(model),
        "prompts": prompts,
        "max_tokens": [max_tokens] * len(prompts),
        "max_model_len": MAX_MODEL_LEN,
        "batched": batched,
        "dtype": dtype,
    }
