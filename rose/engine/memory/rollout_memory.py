"""A rollout engine's side of the memory policy (ROSE §4.1): it stays within its budget and keeps prefix
cache on leases.

Owns when a rollout engine acts; rose.memory.policy owns the rules. Promises that an engine begins to give the
slabs of a cut back within one scheduling pass, in the order idle, expired lease, least recently used cache,
abort. Slabs without used or cached blocks go back before their lease ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from vllm.v1.request import Request

from rose.engine.memory.tenant import Tenant
from rose.memory.ledger.ledger_words import LedgerWord
from rose.memory.policy.budget import BudgetPolicy
from rose.memory.policy.victims import choose_victims
from rose.types import Role

logger = logging.getLogger(__name__)

RETURN_RETRY_S = 0.05
"""Pause of an idle engine between two returns of slabs."""


class RolloutMemory:
    """Runs before every rollout step, on the engine core's thread."""

    def __init__(
        self, tenant: Tenant, policy: BudgetPolicy, reclaim: Callable[[Iterable[str]], None]
    ) -> None:
        """``reclaim`` ends requests; their blocks are free when it returns."""
        assert tenant.leases is not None
        self._tenant = tenant
        self._leases = tenant.leases
        self._policy = policy
        self._reclaim = reclaim
        self.share = 1.0
        """How much of the rollout budget this engine may hold, whatever the others leave of it. A request
        that needs more than that to go on keeps what it needs."""
        self._least_slabs = 0
        self.begin_rl_step(tenant.ledger.policy.rl_step)

    def begin_rl_step(self, step: int) -> None:
        """Begins an RL step: computes the budget from serving's recent usage and ends a freeze. Headroom that
        serving has lent stays lent until serving takes it back."""
        ledger = self._tenant.ledger
        budget = ledger.policy.rollout_budget_slabs
        if not self._policy.has_headroom_lent(budget):
            budget = self._policy.begin_step(ledger.serving_reserve_slabs)
        ledger.begin_rl_step(step, budget)
        logger.info("rl step=%d budget=%d", step, budget)

    def tick(
        self,
        now: float,
        running: Sequence[Request],
        waiting: Sequence[Request],
        unfinished: Iterable[Request],
    ) -> float | None:
        """Ends leases, obeys a cut, then acquires or returns slabs. Returns the time at which an idle engine
        must look again, or None.

        ``unfinished`` are all requests that a cut may end. A paused session that waits for its user and holds
        its blocks is one of them.
        """
        self._expire(now)
        requests = list(unfinished)
        self._least_slabs = self._tenant.slabs_of_longest(requests) if self.share < 1 else 0
        self._shrink(now, requests)
        wanted = self._tenant.blocks_wanted(running, waiting)
        missing = self._tenant.missing_slabs(wanted)
        self._grow(missing, has_work=bool(running or waiting))
        if missing:
            return self._leases.next_expiry()
        if self._return_empty(wanted):
            return now + RETURN_RETRY_S
        return self._leases.next_expiry()

    def give_everything_back(self) -> None:
        """Returns every slab but the pinned one, and drops the prefix cache. No request may hold a block."""
        self._tenant.ledger.want(self._tenant.client.slot, 0)
        if idle := self._tenant.idle_positions():
            self._tenant.give_back(idle)
            logger.info("everything given back slabs=%d", len(idle))

    def _expire(self, now: float) -> None:
        expired = self._leases.expired(now)
        if expired:
            self._tenant.give_back(expired)
            self._tenant.ledger.count(LedgerWord.EXPIRED_LEASES, len(expired))

    def _shrink(self, now: float, unfinished: Iterable[Request]) -> None:
        tenant = self._tenant
        num_engines, others_owned = self._rollout_engines()
        share = self._policy.rollout_share(
            budget=tenant.ledger.policy.rollout_budget_slabs,
            num_engines=num_engines,
            others_owned=others_owned,
            part=self.share,
            least=self._least_slabs,
        )
        excess = tenant.num_owned - share
        if excess <= 0:
            return
        plan = choose_victims(needed=excess, uses=tenant.uses(unfinished), now=now)
        if plan.aborted_requests:
            self._reclaim(plan.aborted_requests)
            tenant.ledger.count(LedgerWord.RECLAIMED_REQUESTS, len(plan.aborted_requests))
        # The blocks of an ended request may stay in use, for example while an encoder cache is sent away.
        idle = [position for position in plan.positions if tenant.pool.num_used[position] == 0]
        tenant.give_back(idle)
        logger.info("budget cut slabs=%d aborted=%d", len(idle), len(plan.aborted_requests))

    def _grow(self, missing: int, *, has_work: bool) -> None:
        """Takes the free ones of the missing slabs, and tells serving how many it should give. That is a few
        more than are missing, because a request that finds none free is preempted."""
        tenant, ledger = self._tenant, self._tenant.ledger
        owned = tenant.num_owned
        num_engines, others_owned = self._rollout_engines()
        allowed = self._policy.rollout_growth(
            serving_used=ledger.serving_used_slabs,
            rollout_owned=owned,
            budget=ledger.policy.rollout_budget_slabs,
            num_engines=num_engines,
            others_owned=others_owned,
            part=self.share,
            least=self._least_slabs,
        )
        ahead = self._policy.rollout_spare(owned) - len(tenant.pool.empty_positions()) if has_work else 0
        tenant.grow(min(missing, allowed))
        ledger.want(tenant.client.slot, owned + min(missing + max(0, ahead), allowed))

    def _rollout_engines(self) -> tuple[int, int]:
        """Returns how many rollout engines share the budget, and the slabs of the others."""
        ledger, mine = self._tenant.ledger, self._tenant.client.slot
        others = [slot for slot in ledger.slots_of(Role.ROLLOUT) if slot != mine]
        return 1 + len(others), sum(map(ledger.num_owned, others))

    def _return_empty(self, wanted_blocks: int) -> int:
        """Returns slabs whose last request left no cache, or that a prompt hit in the cache made needless."""
        tenant = self._tenant
        empty = tenant.pool.empty_positions()
        surplus = self._policy.rollout_release(
            owned=tenant.num_owned, empty=len(empty), wanted=tenant.slabs_for(wanted_blocks)
        )
        return tenant.give_back(empty[len(empty) - surplus :])
