"""A serving engine's side of the memory policy (ROSE §4.1): it takes the slabs it needs, and cuts the rollout
budget under pressure. When rollouts want memory, it gives them its least valuable prefix cache, and while it
is out of service, it lends them its headroom.

Owns when a serving engine acts; rose.memory.policy.budget owns the rules. Never touches a rollout request: it
changes the budget in the ledger, and the rollout engine obeys at its next step boundary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from vllm.v1.request import Request

from rose.engine.memory.block_pool import PINNED_POSITION
from rose.engine.memory.tenant import Shortage, Tenant
from rose.memory.ledger.ledger_words import LedgerWord
from rose.memory.ledger.policy_word import Pressure
from rose.memory.policy.budget import BudgetEvent, BudgetPolicy, RecentPeak
from rose.types import Role

logger = logging.getLogger(__name__)


class ServingMemory:
    """Runs before every serving step, on the engine core's thread."""

    def __init__(
        self,
        tenant: Tenant,
        policy: BudgetPolicy,
        *,
        window_s: float,
        lend_idle_s: float | None,
        tokens_per_pair: Callable[[], float],
        now: float,
    ) -> None:
        """``window_s`` is the window of the peak usage that rollout budgets set aside for the next burst.
        ``lend_idle_s`` is the time without a slab in use after which the headroom is lent; None never lends
        it. ``tokens_per_pair`` returns the present step-time model's."""
        self._tenant = tenant
        self._policy = policy
        self._window_s = window_s
        self._lend_idle_s = lend_idle_s
        self._tokens_per_pair = tokens_per_pair
        self._busy_at_s = now
        self.is_short = False
        """Whether requests waited for slabs at the last look."""
        self.forget_peak()

    @property
    def lends_at_s(self) -> float | None:
        """When the headroom is lent if no request comes until then, or None for never."""
        return None if self._lend_idle_s is None else self._busy_at_s + self._lend_idle_s

    def forget_peak(self) -> None:
        """Forgets the usage so far, as after a profiling run, whose traffic says nothing about users'."""
        self._peak = RecentPeak(self._window_s)

    def tick(self, now: float, running: Sequence[Request], waiting: Sequence[Request]) -> float | None:
        """Watches for pressure, then takes slabs or gives some. Returns the time at which an idle engine must
        look again, or None."""
        tenant = self._tenant
        shortage = tenant.shortage(running, waiting)
        used = tenant.pool.num_positions_in_use() + len(shortage.hit_positions) + shortage.keeping_cache
        # Who lacks slabs needs those that are empty as well, and a request that waits for more uses none yet.
        self._publish(used + (len(tenant.pool.empty_positions()) if shortage.keeping_cache else 0), now)
        self._watch_pressure()
        if tenant.ledger.serving_used_slabs:
            self._busy_at_s = now
        grown = self._grow(shortage) if shortage.keeping_cache else 0
        self.is_short = shortage.evicting_cache > grown
        # Another serving engine may give of its prefix cache.
        lacking = shortage.evicting_cache - grown
        tenant.ledger.want(tenant.client.slot, tenant.num_owned + lacking if self.is_short else 0)
        # The next steps also take free blocks that it has, and the pinned slab can't be given.
        kept = used + shortage.from_uncached + int(tenant.pool.num_used[PINNED_POSITION] == 0)
        if self._give(kept, shortage.hit_positions, now):
            return now
        held_until_s = tenant.holds.next_end_s(now) if tenant.holds is not None else None
        next_looks = (self._peak.falls_at_s(now), self._lend_headroom(now), held_until_s)
        return min((at_s for at_s in next_looks if at_s is not None), default=None)

    def _grow(self, shortage: Shortage) -> int:
        tenant, ledger = self._tenant, self._tenant.ledger
        growth = self._policy.serving_growth(
            missing=shortage.keeping_cache,
            must=shortage.evicting_cache,
            owned=tenant.num_owned,
            free=ledger.num_free,
            rollout_lacks=ledger.rollout_lacks,
        )
        return tenant.grow(growth)

    def _give(self, used: int, keep: AbstractSet[int], now: float) -> int:
        """Gives other engines slabs that they lack, those that cost serving least first, none of ``keep`` and
        none that a KV connector may still use; returns how many."""
        tenant, ledger = self._tenant, self._tenant.ledger
        count = self._policy.serving_gift(
            owned=tenant.num_owned,
            used=used,
            budget=ledger.policy.rollout_budget_slabs,
            available=ledger.num_free + ledger.num_draining,
            lacking=ledger.others_lack(tenant.client.slot),
        )
        if not count:
            return 0
        held = tenant.holds.positions(now) if tenant.holds is not None else frozenset()
        given = tenant.least_valuable(count, keep | held, now, self._tokens_per_pair())
        return tenant.give_back(given)

    def _lend_headroom(self, now: float) -> float | None:
        """Raises the budget to the whole pool once serving has been idle for long enough. Returns the time at
        which to look again, or None."""
        lends_at_s, ledger = self.lends_at_s, self._tenant.ledger
        if lends_at_s is None or now < lends_at_s:
            return lends_at_s
        whole = self._policy.whole_budget
        # An RL step may begin in between and set its own budget.
        while (seen := ledger.policy).rollout_budget_slabs < whole:
            lent = replace(seen, rollout_budget_slabs=whole, pressure=Pressure.NORMAL)
            if ledger.swap_policy(seen, lent):
                logger.info("headroom lent budget=%d->%d", seen.rollout_budget_slabs, whole)
        return None

    def _publish(self, used: int, now: float) -> None:
        self._peak.update(used, now)
        reserved = self._policy.reserve(self._peak.peak(now))
        self._tenant.ledger.set_serving_use(self._tenant.client.slot, used=used, reserved=reserved)

    def _watch_pressure(self) -> None:
        ledger = self._tenant.ledger
        used = ledger.serving_used_slabs
        while True:
            seen = ledger.policy
            decision = self._policy.observe(
                serving_used=used,
                rollout_owned=ledger.num_held(Role.ROLLOUT),
                budget=seen.rollout_budget_slabs,
                state=seen.pressure,
            )
            wanted = replace(seen, rollout_budget_slabs=decision.budget, pressure=decision.state)
            # An RL step may begin in between and set its own budget; then decide again.
            if wanted == seen or ledger.swap_policy(seen, wanted):
                break
        if decision.event is BudgetEvent.CUT:
            ledger.count(LedgerWord.CUTS)
        if decision.event in (BudgetEvent.CUT, BudgetEvent.TAKEN_BACK):
            logger.info(
                "%s budget=%d->%d serving_used=%d",
                "emergency cut" if decision.event is BudgetEvent.CUT else "headroom taken back",
                seen.rollout_budget_slabs,
                decision.budget,
                used,
            )
