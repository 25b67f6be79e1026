"""One simulated engine: turns prefill one after the other and decode together.

Owns: the fluid model of an engine (chunked prefill mixed with decodes, one speed for all turns in the batch),
its prefix cache.
Promises: between two changes all rates are constant, so the next moment something ends is exact.
Never does: place turns, draw random numbers.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass, field

from rose.scheduler.rollout.turn.place import Place
from sim.rollout.scenario import Scenario, TrajectoryStep


@dataclass(slots=True, eq=False)
class RunningTurn:
    """A turn on an engine."""

    trajectory: int
    step: TrajectoryStep
    place: Place
    started_s: float
    missing_tokens: float
    prompt_tokens: int
    first_token_s: float = 0.0
    ends_at_tokens: float = 0.0


@dataclass(slots=True)
class SimulatedEngine:
    """`advance` to a time before anything is changed at that time."""

    scenario: Scenario
    is_serving: bool
    share: float = 1.0
    now_s: float = 0.0
    version: int = 0
    """Grows with every change, so that events foreseen before it can be told apart."""
    _tokens: float = 0.0
    """Tokens per decoding turn since the beginning."""
    _prefills: list[RunningTurn] = field(default_factory=list)
    _decodes: list[tuple[float, int, RunningTurn]] = field(default_factory=list)
    _cache: OrderedDict[int, tuple[int, float]] = field(default_factory=OrderedDict)
    _cached_tokens: int = 0
    _running_tokens: int = 0
    """KV of the turns that run, at their ends: it leaves that much less to the cache."""
    _serial: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def num_turns(self) -> int:
        return len(self._prefills) + len(self._decodes)

    def start(self, run: RunningTurn) -> None:
        self._prefills.append(run)
        self._running_tokens += run.prompt_tokens + run.step.generated_tokens
        self._cached_tokens -= self._cache.pop(run.trajectory, (0, 0.0))[0]  # it is in use now
        self._evict()
        self.version += 1

    def set_share(self, share: float) -> None:
        self.share = share
        self.version += 1

    def advance(self, now_s: float) -> None:
        """Let the rates so far run until `now_s`; nothing may end before."""
        passed_s, self.now_s = now_s - self.now_s, now_s
        if not self.num_turns or passed_s <= 0:
            return
        step_s = self._step_s()
        if self._prefills:
            head = self._prefills[0]
            head.missing_tokens -= self.scenario.chunk_tokens * passed_s / step_s
        self._tokens += passed_s / step_s

    def next_end_s(self) -> float:
        """When the next prefill or turn ends if nothing changes; infinity if nothing runs."""
        ends = [float("inf")]
        if not self.num_turns:
            return ends[0]
        step_s = self._step_s()
        if self._prefills:
            ends.append(max(0.0, self._prefills[0].missing_tokens) / self.scenario.chunk_tokens * step_s)
        if self._decodes:
            ends.append(max(0.0, self._decodes[0][0] - self._tokens) * step_s)
        return self.now_s + min(ends)

    def take_ended(self) -> tuple[list[RunningTurn], list[RunningTurn]]:
        """(turns whose prefill just ended, turns that just ended)."""
        prefilled, ended = [], []
        while self._prefills and self._prefills[0].missing_tokens <= 1e-6:
            run = self._prefills.pop(0)
            run.first_token_s = self.now_s
            run.ends_at_tokens = self._tokens + run.step.generated_tokens
            heapq.heappush(self._decodes, (run.ends_at_tokens, next(self._serial), run))
            prefilled.append(run)
        while self._decodes and self._decodes[0][0] - self._tokens <= 1e-6:
            run = heapq.heappop(self._decodes)[2]
            self._running_tokens -= run.prompt_tokens + run.step.generated_tokens
            ended.append(run)
        if prefilled or ended:
            self.version += 1
        return prefilled, ended

    def stop(self) -> list[tuple[RunningTurn, int]]:
        """Ends every turn, with the tokens that it has generated, and drops the cache."""
        stopped = [(run, 0) for run in self._prefills]
        for ends_at_tokens, _, run in sorted(self._decodes, key=lambda entry: entry[:2]):
            left = max(1, math.ceil(ends_at_tokens - self._tokens - 1e-6))
            stopped.append((run, max(0, run.step.generated_tokens - left)))
        self._prefills, self._decodes, self._running_tokens = [], [], 0
        self.drop_cache()
        self.version += 1
        return stopped

    def _step_s(self) -> float:
        """Wall time of a step of the present batch."""
        speed = self.scenario.speed
        step_s = speed.decode_s(len(self._decodes))
        if self._prefills:
            step_s += speed.prefill_s_per_token * self.scenario.chunk_tokens
        return step_s / self.share

    # The prefix cache ---------------------------------------------------------------------------------

    def cached_tokens(self, trajectory: int) -> int:
        tokens, until_s = self._cache.get(trajectory, (0, 0.0))
        return tokens if until_s > self.now_s else 0

    def keep(self, trajectory: int, tokens: int) -> None:
        """Keep a finished turn's KV: on a lease on serving GPUs, until others push it out."""
        self._cached_tokens += tokens - self._cache.pop(trajectory, (0, 0.0))[0]
        lease_s = self.scenario.lease_s if self.is_serving else float("inf")
        self._cache[trajectory] = (tokens, self.now_s + lease_s)
        self._evict()

    def drop_cache(self) -> None:
        """Forgets all prefixes, as new weights or a lost GPU make it."""
        self._cache.clear()
        self._cached_tokens = 0

    def _evict(self) -> None:
        """The least recently used leave first."""
        limit = self.scenario.serving_kv_tokens if self.is_serving else self.scenario.kv_tokens
        while self._cached_tokens > max(0, limit - self._running_tokens) and self._cache:
            _, (dropped, _) = self._cache.popitem(last=False)
            self._cached_tokens -= dropped
