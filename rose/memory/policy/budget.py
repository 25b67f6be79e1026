"""How many slabs each engine may hold: serving first (ROSE §4.1, preemptive memory sharing).

This module has the budget formula, the rule of pressure, cut and freeze, and what serving keeps when rollouts
want memory. It is pure: the state lives with the caller, in the ledger's policy words.

A GPU's slabs at the start of an RL step, and serving's growth into them:

    0              recent peak                       headroom                               num_slabs
    | serving used     |             H               |             rollout budget              |
                       |------> eaten ------|        |
                                       watermark*H: pressure, cut the budget in half
"""

import math
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from rose.memory.ledger.policy_word import Pressure

RETURN_PACE_SLABS = 8
"""Slabs that an engine returns or gives per step outside pressure. Unmapping a populated 2 MiB slab takes
70 us, so this takes about 0.6 ms."""

ROLLOUT_SPARE_SHARE = 16
"""Rollout keeps one of this many slabs that it owns empty for the next turn: turns end and begin all the
time, and each slab that leaves and comes back costs an unmap, a map and a zeroing."""


class BudgetEvent(StrEnum):
    """What an observation changed."""

    CUT = "cut"
    FROZEN = "frozen"
    TAKEN_BACK = "taken back"
    """Serving has traffic again, and takes the headroom that it had lent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetDecision:
    """The outcome of one observation."""

    budget: int
    state: Pressure
    event: BudgetEvent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPolicy:
    """The memory policy of one pool. All counts are in slabs."""

    num_slabs: int
    headroom_slabs: int
    high_watermark: float = 0.5
    """Fraction of the headroom that serving may eat before the budget is cut."""
    cut_factor: int = 2
    """The budget is divided by this; the default is the paper's."""
    min_slabs: int = 1
    """The slabs that each engine always keeps: its padding block lives in one."""
    floor_slabs: int = 0
    """The slabs that serving keeps, in use or cached, whatever rollouts want."""

    def __post_init__(self) -> None:
        if not 0 <= self.headroom_slabs < self.num_slabs:
            raise ValueError(f"headroom_slabs must be 0..{self.num_slabs - 1}, got {self.headroom_slabs}")
        if not 0 <= self.high_watermark <= 1:
            raise ValueError(
                f"high_watermark must be 0..1, a fraction of the headroom, got {self.high_watermark}"
            )
        if self.cut_factor < 2:
            raise ValueError(f"cut_factor must be 2 or more, got {self.cut_factor}")
        if not 0 <= self.min_slabs <= self.num_slabs:
            raise ValueError(f"min_slabs must be 0..{self.num_slabs}, got {self.min_slabs}")
        if not 0 <= self.floor_slabs < self.num_slabs:
            raise ValueError(f"floor_slabs must be 0..{self.num_slabs - 1}, got {self.floor_slabs}")

    def reserve(self, recent_peak: int) -> int:
        """Returns the slabs that a rollout budget leaves to serving beside the headroom: its recent peak
        usage, or what its floor is above the headroom."""
        return max(recent_peak, self.floor_slabs - self.headroom_slabs)

    def begin_step(self, serving_reserve: int) -> int:
        """Returns the rollout budget of a new RL step, which also ends a freeze (the state becomes NORMAL).

        Source: ROSE §4.1: recent serving usage and a fixed headroom are set aside. The floor is ours.
        """
        return max(self.num_slabs - self.headroom_slabs - self.reserve(serving_reserve), self.min_slabs)

    def has_headroom_lent(self, budget: int) -> bool:
        """Returns whether ``budget`` contains slabs of the headroom."""
        return budget > self.begin_step(0)

    @property
    def whole_budget(self) -> int:
        """The rollout budget beside a serving engine that is out of service: all slabs but that of its
        padding block. Source: ROSE §4.3, GPUs that autoscaling leaves idle."""
        return self.num_slabs - self.min_slabs

    def pressure_threshold(self, budget: int) -> float:
        """Returns the serving usage above which ``budget`` is cut: the high watermark within the headroom."""
        return self.num_slabs - budget - self.headroom_slabs * (1 - self.high_watermark)

    def observe(
        self, *, serving_used: int, rollout_owned: int, budget: int, state: Pressure
    ) -> BudgetDecision:
        """Decides after one observation of serving's usage.

        PRESSURE lasts until rollout has given up what a cut took. A cut raises the threshold by what it took,
        so the next one comes when serving has used that as well, and only after the last one was obeyed. The
        paper cuts once per RL step; we cut again, because a second burst in a step must not meet a budget
        that is frozen but too large.

        A budget that contains the headroom ends with the first slab that serving uses. That is no cut: the
        headroom may be lent again within the RL step.
        """
        if self.has_headroom_lent(budget):
            if serving_used == 0:
                return BudgetDecision(budget=budget, state=state)
            own = self.begin_step(serving_used)
            next_state = Pressure.PRESSURE if rollout_owned > own else Pressure.NORMAL
            return BudgetDecision(budget=own, state=next_state, event=BudgetEvent.TAKEN_BACK)
        has_landed = rollout_owned <= budget
        if serving_used > self.pressure_threshold(budget) and has_landed and budget > self.min_slabs:
            smaller = max(budget // self.cut_factor, self.min_slabs)
            next_state = Pressure.PRESSURE if rollout_owned > smaller else Pressure.FROZEN
            return BudgetDecision(budget=smaller, state=next_state, event=BudgetEvent.CUT)
        if state is Pressure.PRESSURE and has_landed:
            return BudgetDecision(budget=budget, state=Pressure.FROZEN, event=BudgetEvent.FROZEN)
        return BudgetDecision(budget=budget, state=state)

    def rollout_share(
        self, *, budget: int, num_engines: int, others_owned: int, part: float = 1.0, least: int = 0
    ) -> int:
        """Returns how many slabs one of ``num_engines`` rollout engines may hold of their budget. It gets an
        equal part and what the others leave of theirs, within its ``part`` of the whole, and at least the
        ``least`` that its longest request needs."""
        share = max(budget // num_engines, budget - others_owned)
        return max(min(share, max(int(part * budget), least)), self.min_slabs)

    def rollout_growth(
        self,
        *,
        serving_used: int,
        rollout_owned: int,
        budget: int,
        num_engines: int = 1,
        others_owned: int = 0,
        part: float = 1.0,
        least: int = 0,
    ) -> int:
        """Returns how many more slabs a rollout engine may hold now, within its share of the budget and
        outside the headroom. ``rollout_owned`` are its own slabs, ``others_owned`` the other rollout
        engines'.

        Serving can reach every slab that rollout doesn't hold, and at least the headroom (or the part of it
        that isn't lent) must stay unused among them. Rollout may always grow to ``min_slabs``. It takes what
        is free, and serving gives the rest from its prefix cache.

        Source: ROSE §4.1, second condition of admission.
        """
        headroom = min(self.headroom_slabs, self.num_slabs - budget)
        spare = self.num_slabs - rollout_owned - others_owned - serving_used - headroom
        share = self.rollout_share(
            budget=budget, num_engines=num_engines, others_owned=others_owned, part=part, least=least
        )
        return max(min(share - rollout_owned, spare), self.min_slabs - rollout_owned, 0)

    def rollout_spare(self, owned: int) -> int:
        """Returns how many slabs rollout wants to find free when its requests grow."""
        return math.ceil(owned / ROLLOUT_SPARE_SHARE)

    def rollout_release(self, *, owned: int, empty: int, wanted: int) -> int:
        """Returns how many of rollout's ``empty`` slabs (idle, caching nothing) should go back in this step.

        They give no prefix hit, so holding them for a lease gains nothing. The slabs that the next steps want
        stay, and a few to spare.
        """
        return max(min(empty - wanted - self.rollout_spare(owned), RETURN_PACE_SLABS), 0)

    def serving_growth(self, *, missing: int, must: int, owned: int, free: int, rollout_lacks: int) -> int:
        """Returns how many of the ``free`` slabs serving should take.

        ``missing`` slabs let it keep all of its prefix cache; without ``must`` of them its requests can't
        run, whatever it evicts. Beyond these and its floor, it leaves rollouts what they lack.
        """
        due = max(must, self.floor_slabs - owned)
        return max(min(missing, free, max(due, free - rollout_lacks)), 0)

    def serving_gift(self, *, owned: int, used: int, budget: int, available: int, lacking: int) -> int:
        """Returns how many slabs a serving engine should give in this step to the others, which lack
        ``lacking``. ``available`` slabs are free or about to be. The floor stays, unless ``budget`` says that
        it is lent with the headroom.
        """
        floor = 0 if self.has_headroom_lent(budget) else self.floor_slabs
        surplus = owned - max(used, floor, self.min_slabs)
        return max(min(lacking - available, surplus, RETURN_PACE_SLABS), 0)


class RecentPeak:
    """The maximum of a level over the last ``window_s`` seconds. A level lasts until the next update."""

    def __init__(self, window_s: float) -> None:
        if window_s <= 0:
            raise ValueError(f"window_s must be positive, got {window_s}")
        self._window_s = window_s
        # (level, when it ended) in falling order: a smaller level before a larger one can't be the maximum.
        self._past: deque[tuple[int, float]] = deque()
        self._level = 0

    def update(self, level: int, now: float) -> None:
        """Sets the level from ``now`` on. ``now`` never goes back."""
        if level != self._level:
            while self._past and self._past[-1][0] <= max(level, self._level):
                self._past.pop()
            if self._level > level:
                self._past.append((self._level, now))
            self._level = level

    def peak(self, now: float) -> int:
        """Returns the highest level at any time in (now - window_s, now]."""
        while self._past and self._past[0][1] <= now - self._window_s:
            self._past.popleft()
        return self._past[0][0] if self._past else self._level

    def falls_at_s(self, now: float) -> float | None:
        """Returns when the peak falls next if the level stays as it is; None if it doesn't."""
        return self._past[0][1] + self._window_s if self.peak(now) > self._level else None

    def check_integrity(self) -> None:
        """Checks that levels fall strictly and ends rise. Raises: AssertionError."""
        levels = [level for level, _ in self._past] + [self._level]
        ends = [end for _, end in self._past]
        assert all(a > b for a, b in pairwise(levels)), levels
        assert ends == sorted(ends), ends
