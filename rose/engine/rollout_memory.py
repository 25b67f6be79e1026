"""Rollout's half of the memory policy (ROSE §4.1): stay within the budget, keep prefix cache on a lease.

Owns when rollout acts; the rules are rose.memory's. Promises that what a cut takes is on its way back within
one scheduling pass, in the order idle, expired lease, LRU cached, abort.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from vllm.v1.request import Request

from rose.engine.tenant import Tenant
from rose.memory.ledger import Word
from rose.memory.policy import BudgetPolicy
from rose.memory.victims import choose_victims

logger = logging.getLogger(__name__)


class RolloutMemory:
    """Runs before every rollout step, on the engine core's thread."""

    def __init__(
        self, tenant: Tenant, policy: BudgetPolicy, reclaim: Callable[[Iterable[str]], None]
    ) -> None:
        """``reclaim``: ends requests so that their blocks are free when it returns."""
        assert tenant.leases is not None
        self._tenant = tenant
        self._leases = tenant.leases
        self._policy = policy
        self._reclaim = reclaim
        self.begin_rl_step(tenant.ledger.policy.rl_step)

    def begin_rl_step(self, step: int) -> None:
        """A new RL step: recompute the budget from serving's recent usage, and end a freeze."""
        ledger = self._tenant.ledger
        budget = self._policy.begin_step(ledger.serving_recent_peak_slabs)
        ledger.begin_rl_step(step, budget)
        logger.info("rl step=%d budget=%d", step, budget)

    def tick(self, now: float, running: Sequence[Request], waiting: Sequence[Request]) -> float | None:
        """Expire, shrink, grow; the time at which an idle engine must look again, or None."""
        self._expire(now)
        self._shrink(now, running)
        self._grow(running, waiting)
        return self._leases.next_expiry()

    def give_everything_back(self) -> None:
        """Return every slab but the pinned one, with the prefix cache in it. No request may hold a block."""
        if idle := self._tenant.idle_positions():
            self._tenant.give_back(idle)
            logger.info("everything given back slabs=%d", len(idle))

    def _expire(self, now: float) -> None:
        expired = self._leases.expired(now)
        if expired:
            self._tenant.give_back(expired)
            self._tenant.ledger.count(Word.EXPIRED_LEASES, len(expired))

    def _shrink(self, now: float, running: Sequence[Request]) -> None:
        tenant = self._tenant
        excess = tenant.num_owned - max(tenant.ledger.policy.rollout_budget_slabs, self._policy.min_slabs)
        if excess <= 0:
            return
        plan = choose_victims(needed=excess, num_pool_free=0, uses=tenant.uses(running), now=now)
        if plan.aborted_requests:
            self._reclaim(plan.aborted_requests)
            tenant.ledger.count(Word.RECLAIMED_REQUESTS, len(plan.aborted_requests))
        tenant.give_back(plan.slabs)
        logger.info("budget cut slabs=%d aborted=%d", len(plan.slabs), len(plan.aborted_requests))

    def _grow(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        tenant, ledger = self._tenant, self._tenant.ledger
        missing = tenant.missing_slabs(tenant.blocks_wanted(running, waiting))
        if missing == 0:
            return
        allowed = self._policy.rollout_growth(
            free=ledger.num_free,
            serving_used=ledger.serving_used_slabs,
            rollout_owned=tenant.num_owned,
            budget=ledger.policy.rollout_budget_slabs,
        )
        tenant.grow(min(missing, allowed))
