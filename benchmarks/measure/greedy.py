"""Greedy equality: the same prompts to stock vLLM and to the engines under ROSE.

Owns the rollout probe, the reference run and the comparison. Serving is compared on the replay's own
requests, the rollout engine on a probe of fixed prompts, taken while slabs move between the engines.
"""

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rose.engine.stock import STOCK_ENV
from rose.measure.models import ROLLOUT_SPEC
from rose.measure.records import RequestRecord
from rose.measure.rig import ENGINE_DTYPE, MAX_MODEL_LEN, Rig
from rose.measure.windows import wait_ended
from rose.node.control import EngineControl
from rose.types import Role

PROBE_PROMPTS = 12
PROBE_PROMPT_TOKENS = 200
PROBE_TOKENS = 48
MOST_REQUESTS = 96
"""Serving requests that stock vLLM answers as well, evenly spread. All would take a minute more."""
STOCK_TIMEOUT_S = 1200.0


class GreedyCheck:
    """Takes the probe, then compares."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self._rig = rig
        rng = random.Random(seed)
        self._prompts = [
            [rng.randrange(ROLLOUT_SPEC.vocab_size) for _ in range(PROBE_PROMPT_TOKENS)]
            for _ in range(PROBE_PROMPTS)
        ]
        self._probed: list[list[int]] = []

    @contextmanager
    def probing(self, rollout: EngineControl) -> Iterator[None]:
        """Sends the probe to the co-located engine while the block runs, and waits for its end."""

        def run() -> None:
            for prompt in self._prompts:
                self._probed += [tokens for tokens, _ in rollout.complete([prompt], PROBE_TOKENS)]

        thread = threading.Thread(target=run, name="greedy-probe", daemon=True)
        thread.start()
        yield
        thread.join()

    def compare(self, requests: Sequence[RequestRecord], tick: Callable[[], None]) -> tuple[int, int]:
        """Returns how many answers were compared with stock vLLM's, and how many of them equal these.

        A probe that ROSE ended early is compared as far as it got. Raises: WorkerError.
        """
        done = [request for request in requests if request.is_complete]
        done = done[:: -(-len(done) // MOST_REQUESTS)] if done else []
        serving, rollout = self._stock_answers(done, tick)
        pairs = [(request.token_ids, expected) for request, expected in zip(done, serving, strict=True)]
        pairs += [(got, expected[: len(got)]) for got, expected in zip(self._probed, rollout, strict=True)]
        return len(pairs), sum(got == expected for got, expected in pairs)

    def _stock_answers(
        self, requests: Sequence[RequestRecord], tick: Callable[[], None]
    ) -> list[list[list[int]]]:
        jobs = [
            (Role.SERVING, [list(each.prompt) for each in requests], [each.max_tokens for each in requests]),
            (Role.ROLLOUT, self._prompts, [PROBE_TOKENS] * PROBE_PROMPTS),
        ]
        common = {"max_model_len": MAX_MODEL_LEN, "batched": True, "dtype": ENGINE_DTYPE}
        asked, answered = self._rig.folder / "stock-jobs.json", self._rig.folder / "stock-answers.json"
        asked.write_text(
            json.dumps(
                [
                    {"model": str(self._rig.model(role)), "prompts": prompts, "max_tokens": limits, **common}
                    for role, prompts, limits in jobs
                ]
            )
        )

        stock = self._rig.run(["-m", "rose.engine.stock", str(asked), str(answered)], "stock", env=STOCK_ENV)
        wait_ended(stock, STOCK_TIMEOUT_S, tick)
        return [[answer["tokens"] for answer in job] for job in json.loads(answered.read_text())]
