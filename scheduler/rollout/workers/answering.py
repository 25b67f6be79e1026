"""What the router learns of a worker from the answers to its turns.

Owns: its speed, the trust in its prefix cache, its probation, when it last made a token. Promises: whenever
something that policies see changes, the worker's old view is dropped. Never does: take in heartbeats, decide
who may use it (worker.py).
"""

import math
from collections.abc import Callable

from yarl import URL

from rose.scheduler.rollout.placing.views import WorkerKind, WorkerView
from rose.scheduler.rollout.router_config import RouterConfig, WorkerSpec
from rose.scheduler.rollout.workers.speed import ModelSpeeds, WorkerSpeed

_INTERVALS_PER_STALL = 4
"""A chunk has to arrive well within the stall time, even when the gate slows the worker's steps."""
_OWN_REPORT_S = 0.5
"""An engine that reports its own stalls needs this long. With a stall time of 2 s, a turn on a stopped worker
still goes on elsewhere within 3 s."""
_SMOOTHING = 0.2
"""The weight of the newest value in running means."""


class AnsweringWorker:
    """A worker, as far as its answers tell. Lives on the router's event loop."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.id = spec.id
        self.url = URL(spec.url)
        self._is_dedicated = spec.kind is WorkerKind.DEDICATED
        self._share: float | None = 1.0 if self._is_dedicated else None
        self.last_seen: float | None = None
        self.last_token_at = -math.inf
        self.num_errors = 0
        """The turns in a row that it answered with an error, since one got its first token here."""
        self.is_on_probation = False
        self.cooldown_until = 0.0
        self.has_rose_routes = True
        self.in_flight = 0
        self.num_tokens = 0
        self.seconds_per_token: float | None = None
        self.speed = WorkerSpeed()
        self._model_speeds = ModelSpeeds()
        self.cache_trust = 1.0
        """The fraction of the prompt tokens expected in its prefix cache that were found there."""
        self.dividing: set[Callable[[str, int, float], None]] = set()
        """Those that are told how many routers use the GPU whenever it is known, with the worker's id and the
        time."""
        self._view: WorkerView | None = None
        self._changed: set[str] = set()

    def _change(self) -> None:
        self._view = None
        self._changed.add(self.id)

    def learn_beside(self, speeds: ModelSpeeds) -> None:
        """Compares its speed with that of other workers, which share these."""
        self._model_speeds = speeds
        self.serves(None)

    def serves(self, model: str | None) -> None:
        """Compares its speed with that of the workers with this model; None: those that don't say theirs."""
        self.speed.is_of(self._model_speeds.of(model))

    def stream_interval(self, config: RouterConfig) -> int:
        """Returns the tokens to ask for per chunk, few enough that slow steps don't look like a stall."""
        if self.seconds_per_token is None:
            return 1
        fitting = int(config.stall_s / _INTERVALS_PER_STALL / max(self.seconds_per_token, 1e-6))
        return max(1, min(config.stream_interval, fitting))

    def stall_allowance_s(self, config: RouterConfig) -> float:
        """Returns the time without a token that counts as a stall. ROSE's engines may report theirs first."""
        return config.stall_s + (_OWN_REPORT_S if self.has_rose_routes else 0.0)

    def made_tokens(self, num_tokens: int, now: float, took_s: float | None) -> None:
        """Notes progress, which ends a probation.

        `took_s`: the time since the previous tokens; None for the first tokens of an attempt, which include
        the prefill.
        """
        self.num_tokens += num_tokens
        self.last_seen = self.last_token_at = now
        if self.is_on_probation:
            self._change()
            self.is_on_probation = False
        if took_s is None:
            return
        per_token = took_s / num_tokens
        self._change()
        share = self._share if self._share is not None else 1.0
        self.speed.saw_decode(per_token, self.in_flight, share, now)
        known = self.seconds_per_token
        self.seconds_per_token = (
            per_token if known is None else (1 - _SMOOTHING) * known + _SMOOTHING * per_token
        )

    def prefilled(self, first_token_s: float, tokens: float) -> None:
        """Notes a first token, before which `tokens` had to be prefilled, those of turns ahead included."""
        self._change()
        self.num_errors = 0
        self.speed.saw_prefill(first_token_s, tokens, self._share if self._share is not None else 1.0)

    def found_cached(self, expected_tokens: float, cached_tokens: int) -> None:
        """Compares how much of a prompt was cached with what was expected."""
        if expected_tokens > 0:
            found = min(1.0, cached_tokens / expected_tokens)
            self.cache_trust = (1 - _SMOOTHING) * self.cache_trust + _SMOOTHING * found

    def suspect(self, now: float, config: RouterConfig) -> None:
        """Notes a failed or stalled turn: no new turns for a moment, then one at a time."""
        self._change()
        self.cooldown_until = now + config.avoid_s
        self.is_on_probation = True
