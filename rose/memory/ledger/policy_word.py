"""The memory policy's word in the ledger, and what it means.

The encoding is rl_step << 32 | rollout_budget_slabs << 8 | pressure. rose/memory/policy/budget.py makes the
decisions.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache


class Pressure(IntEnum):
    """The state of the memory policy (ROSE §4.1); see rose/memory/policy/budget.py."""

    NORMAL = 0
    PRESSURE = 1
    FROZEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """What the memory policy decided last. It is read and written as one word, so no part of it is stale."""

    rl_step: int = 0
    rollout_budget_slabs: int = 0
    pressure: Pressure = Pressure.NORMAL

    def encode(self) -> int:
        if not 0 <= self.rl_step < 1 << 31 or not 0 <= self.rollout_budget_slabs < 1 << 24:
            raise ValueError(
                f"rl_step {self.rl_step} and rollout_budget_slabs {self.rollout_budget_slabs} must be >= 0 "
                f"and below 2**31 and 2**24"
            )
        return self.rl_step << 32 | self.rollout_budget_slabs << 8 | self.pressure

    @classmethod
    @lru_cache(maxsize=64)  # each step reads the word several times, and it seldom changes
    def decode(cls, word: int) -> "PolicyState":
        return cls(
            rl_step=word >> 32, rollout_budget_slabs=word >> 8 & 0xFF_FFFF, pressure=Pressure(word & 0xFF)
        )
