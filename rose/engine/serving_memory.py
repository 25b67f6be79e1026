"""Serving's half of the memory policy (ROSE §4.1): take what it needs, cut rollout's budget under pressure,
return what it no longer needs.

Owns when serving acts; the rules are rose.memory.policy's. Never touches a rollout request: it changes the
budget in the ledger, and the rollout engine obeys at its next step boundary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from vllm.v1.request import Request

from rose.engine.tenant import Tenant
from rose.memory.ledger_words import Word
from rose.memory.policy import BudgetEvent, BudgetPolicy, RecentPeak
from rose.types import Role

logger = logging.getLogger(__name__)

RETURN_RETRY_S = 0.05
"""Pause between two paced returns of an idle engine."""


class ServingMemory:
    """Runs before every serving step, on the engine core's thread."""

    def __init__(self, tenant: Tenant, policy: BudgetPolicy, *, window_s: float, keep_s: float) -> None:
        """``window_s``: of the peak that rollout budgets set aside; ``keep_s``: of the peak kept mapped. The
        first protects a burst that comes back: slabs that are free are there for it, mapped or not."""
        self._tenant = tenant
        self._policy = policy
        self._window_s = window_s
        self._keep_s = min(keep_s, window_s)
        self.forget_peak()

    def forget_peak(self) -> None:
        """Traffic so far says nothing about traffic to come (it was a profiling run)."""
        self._peak = RecentPeak(self._window_s)
        self._kept = RecentPeak(self._keep_s)

    def tick(self, now: float, running: Sequence[Request], waiting: Sequence[Request]) -> float | None:
        """Grow, watch for pressure, return; the time of the next look an idle engine needs, or None."""
        tenant = self._tenant
        missing = tenant.missing_slabs(tenant.blocks_wanted(running, waiting))
        used = tenant.pool.num_positions_in_use() + missing
        self._publish(used, now)
        self._watch_pressure(used)
        if missing:
            tenant.grow(missing)
            return None
        return self._return_surplus(used, now)

    def _publish(self, used: int, now: float) -> None:
        self._peak.update(used, now)
        self._kept.update(used, now)
        ledger = self._tenant.ledger
        ledger.serving_used_slabs = used
        ledger.serving_recent_peak_slabs = self._peak.peak(now)

    def _watch_pressure(self, used: int) -> None:
        ledger = self._tenant.ledger
        while True:
            seen = ledger.policy
            decision = self._policy.observe(
                serving_used=used,
                rollout_owned=self._tenant.ledger.num_held(Role.ROLLOUT),
                budget=seen.rollout_budget_slabs,
                state=seen.pressure,
            )
            wanted = replace(seen, rollout_budget_slabs=decision.budget, pressure=decision.state)
            # A new RL step may begin in between: decide again on its budget.
            if wanted == seen or ledger.swap_policy(seen, wanted):
                break
        if decision.event is BudgetEvent.CUT:
            ledger.count(Word.CUTS)
            logger.info(
                "emergency cut budget=%d->%d serving_used=%d",
                seen.rollout_budget_slabs,
                decision.budget,
                used,
            )

    def _return_surplus(self, used: int, now: float) -> float | None:
        tenant = self._tenant
        surplus = self._policy.serving_release(
            owned=tenant.num_owned, used=used, recent_peak=self._kept.peak(now)
        )
        idle = tenant.idle_positions()
        idle.sort(key=tenant.pool.is_caching)
        returned = tenant.give_back(idle[:surplus])
        has_more_later = tenant.num_owned > max(used, self._policy.min_slabs)
        return now + RETURN_RETRY_S if returned or has_more_later else None
