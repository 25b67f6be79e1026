"""Greedy equality: the same prompts to stock vLLM and to the engines under ROSE.

Owns the reference run, the rollout probe and the comparison. Serving is compared on the replay's own
requests, the rollout engine on a probe of fixed prompts, taken while slabs move between the engines.
"""

import json
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rose.demo.plan import DemoPlan
from rose.demo.processes import ENGINE_DTYPE, MAX_MODEL_LEN, Cluster, ModelDirs
from rose.demo.records import UNDER_ROSE
from rose.engine.stock import STOCK_ENV
from rose.errors import WorkerError
from rose.measure.records import Window
from rose.measure.trace import ReplayRequest
from rose.measure.windows import replayed_requests
from rose.node.control import EngineControl
from rose.node.processes import ServerProcess

PROBE_PROMPTS = 12
PROBE_PROMPT_TOKENS = 200
PROBE_TOKENS = 48
STOCK_TIMEOUT_S = 1200.0
POLL_S = 0.2


class GreedyCheck:
    """Starts the reference run, takes the probe, compares."""

    def __init__(self, plan: DemoPlan, cluster: Cluster, models: ModelDirs) -> None:
        self._plan = plan
        self._cluster = cluster
        self._models = models
        self._dir = plan.options.out_dir
        self._requests: list[ReplayRequest] = []
        self._serving: dict[str, list[int]] = {}
        self._rollout: list[list[int]] = []
        self._probed: list[list[int]] = []
        self.compared = 0
        self.equal = 0

    def start_reference(self, samples: Sequence[tuple[int, float]]) -> ServerProcess:
        """Stock vLLM on the replay samples (index, seconds) that will run under ROSE, and on the probe."""
        self._requests = [
            r for index, seconds in samples for r in replayed_requests(self._plan.traffic, index, seconds)
        ]
        serving = {
            "model": str(self._models.serving),
            "prompts": [r.prompt_token_ids for r in self._requests],
            "max_tokens": [r.max_tokens for r in self._requests],
        }
        probe = {
            "model": str(self._models.rollout),
            "prompts": self._probe_prompts(),
            "max_tokens": [PROBE_TOKENS] * PROBE_PROMPTS,
        }
        common: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "batched": True, "dtype": ENGINE_DTYPE}
        jobs = self._dir / "stock-jobs.json"
        jobs.write_text(json.dumps([{**serving, **common}, {**probe, **common}]))
        argv = ["-m", "rose.engine.stock", str(jobs), str(self._dir / "stock-answers.json")]
        return self._cluster.run(argv, "stock", env=STOCK_ENV, is_pinned=False)

    def finish_reference(self, process: ServerProcess, tick: Callable[[], None]) -> None:
        """Wait for the reference answers. Raises: WorkerError."""
        process.wait_until(lambda: self._is_answered(tick), "answers of stock vLLM", STOCK_TIMEOUT_S)
        serving, rollout = json.loads((self._dir / "stock-answers.json").read_text())
        if len(serving) != len(self._requests):
            raise WorkerError(f"stock vLLM answered {len(serving)} of {len(self._requests)} requests")
        for request, answer in zip(self._requests, serving, strict=True):
            self._serving[request.request_id] = answer["tokens"]
        self._rollout = [answer["tokens"] for answer in rollout]

    def probe(self, rollout: EngineControl) -> threading.Thread:
        """Sends the probe to the co-located engine, in a thread of its own; join it before ``compare``."""

        def run() -> None:
            for prompt in self._probe_prompts():
                self._probed += [tokens for tokens, _ in rollout.complete([prompt], PROBE_TOKENS)]

        thread = threading.Thread(target=run, name="greedy-probe", daemon=True)
        thread.start()
        return thread

    def compare(self, phases: Sequence[Window]) -> None:
        """Counts equal answers; a probe that ROSE ended early is compared as far as it got."""
        tested = [request for phase in phases if phase.name in UNDER_ROSE for request in phase.requests]
        for request in tested:
            if request.is_complete:
                self.compared += 1
                self.equal += request.token_ids == self._serving[request.request_id]
        for expected, got in zip(self._rollout, self._probed, strict=True):
            self.compared += 1
            self.equal += got == expected[: len(got)]

    def _is_answered(self, tick: Callable[[], None]) -> bool:
        tick()
        return (self._dir / "stock-answers.json").exists()

    def _probe_prompts(self) -> list[list[int]]:
        rng = random.Random(self._plan.options.seed)
        vocab = self._plan.rollout.vocab_size
        return [[rng.randrange(vocab) for _ in range(PROBE_PROMPT_TOKENS)] for _ in range(PROBE_PROMPTS)]
