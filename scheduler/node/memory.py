"""Whether a pass has the memory it needs: run it, wait, or first move something to the host.

Owns the rule. Promises that a task which waited long enough is tried again once memory was moved; the printed
algorithm skips its stage instead. Never moves anything itself. Source: LeMix §IV-D, Algorithm 2.
"""

from dataclasses import dataclass
from enum import StrEnum


class MemoryVerdict(StrEnum):
    """What a task that needs memory does next."""

    RUN = "run"
    WAIT = "wait"
    OFFLOAD = "offload"
    """Move KV or activations of another task to host memory, then ask again."""
    REFUSE = "refuse"
    """The device could not hold the task even if it were empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitOrDrop:
    """`max_wait_s`: the profiled longest wait, T_max. `threshold`: the share of memory that may be in use."""

    max_wait_s: float
    threshold: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1 or self.max_wait_s < 0:
            raise ValueError(f"threshold in (0, 1] and max_wait_s of at least 0, got {self}")

    def decide(self, *, need_bytes: int, used_bytes: int, total_bytes: int, waited_s: float) -> MemoryVerdict:
        """Returns what to do with a task. `need_bytes`: what it adds on the stage; `waited_s`: since it was
        ready."""
        allowed = self.threshold * total_bytes
        if need_bytes > allowed:
            return MemoryVerdict.REFUSE
        if used_bytes + need_bytes <= allowed:
            return MemoryVerdict.RUN
        return MemoryVerdict.OFFLOAD if waited_s >= self.max_wait_s else MemoryVerdict.WAIT
