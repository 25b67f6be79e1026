"""The engines that a job's rollouts may use, and when: its own, rented ones, and lent serving engines.

Owns the timetables. Pure: a supply is a function of time.
"""

import bisect
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rose.scheduler.rollout.placing.views import WorkerKind
from sim.e2e.calibration import COLD_START_S, LEASE_RECOVERY_S, LEASE_S, SPOT_OVERHEAD

SPOT_PERIOD_S = 7200.0
"""ROSE §6: a window of two hours, which repeats here."""


class Away(StrEnum):
    """Why an engine runs nothing."""

    GONE = "gone"
    STARTING = "starting"
    """It is held and paid for, and its engine does not answer yet."""
    SYNCING = "syncing"
    """It waits for the phase's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """One engine that is there for good. Supplies hold only values, so they travel to other processes."""

    kind: WorkerKind = WorkerKind.DEDICATED
    keeps_tokens: bool = True
    """Whether a turn that loses its engine goes on from its tokens, and does not begin anew."""

    def at(self, time_s: float) -> float | Away:
        """Returns the share of the GPU that rollouts get at this time."""
        return 1.0

    def steps_at(self, time_s: float) -> int | None:
        """Returns the rollout steps that serving's gate admits in this second; None without a gate."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGpu(Supply):
    """A serving engine's GPU, second by second, as its gate shares it."""

    kind: WorkerKind = WorkerKind.SERVING
    shares: tuple[float, ...]
    steps: tuple[int, ...]

    def at(self, time_s: float) -> float | Away:
        return self.shares[int(time_s) % len(self.shares)]

    def steps_at(self, time_s: float) -> int | None:
        return self.steps[int(time_s) % len(self.steps)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented(Supply):
    """An engine that is there from `starts_s[i]` to `ends_s[i]` of every period, answering after `cold_s`."""

    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    period_s: float
    cold_s: float = COLD_START_S

    def at(self, time_s: float) -> float | Away:
        within_s = time_s % self.period_s
        index = bisect.bisect_right(self.starts_s, within_s) - 1
        if index < 0 or within_s >= self.ends_s[index]:
            return Away.GONE
        return 1.0 if within_s >= self.starts_s[index] + self.cold_s else Away.STARTING


@dataclass(frozen=True, slots=True, kw_only=True)
class From(Supply):
    """Another supply from `ready_s` on."""

    inner: Supply
    ready_s: float
    until_then: Away = Away.SYNCING

    def at(self, time_s: float) -> float | Away:
        return self.inner.at(time_s) if time_s >= self.ready_s else self.until_then

    def steps_at(self, time_s: float) -> int | None:
        return self.inner.steps_at(time_s)


def serverless(num_engines: int, *, recovery_s: float = LEASE_RECOVERY_S) -> list[Supply]:
    """Functions that end after their timeout and are started again at once, evenly staggered.

    What runs on one that ends begins anew elsewhere, as a request to a function that timed out does.
    """
    supplies: list[Supply] = []
    for index in range(num_engines):
        first_s = LEASE_S * index / num_engines
        starts = (first_s - LEASE_S, first_s)
        supplies.append(
            Rented(
                starts_s=starts,
                ends_s=(first_s, first_s + LEASE_S),
                period_s=LEASE_S,
                cold_s=recovery_s,
                keeps_tokens=False,
            )
        )
    return supplies


def spot(num_engines: int, *, gpus_per_engine: int, own_gpus: int, seed: int) -> list[Supply]:
    """Spot instances: their number jumps at random moments. Turns keep their tokens when one is taken away.

    Of `m` engines, a jump between two uniform numbers takes (m + 2) m / (6 (m + 1)) away in the mean. Jumps
    come so often that these, times the cold start, are SPOT_OVERHEAD of the time of all GPUs.
    """
    taken = (num_engines + 2) * num_engines / (6 * (num_engines + 1))
    mean_gpus = own_gpus + gpus_per_engine * num_engines / 2
    every_s = taken * gpus_per_engine * COLD_START_S / (SPOT_OVERHEAD * mean_gpus)
    chance = random.Random(f"spot-{seed}")
    jumps_s = [0.0]
    while (next_s := jumps_s[-1] + chance.expovariate(1.0 / every_s)) < SPOT_PERIOD_S:
        jumps_s.append(next_s)
    levels = [chance.randint(0, num_engines) for _ in jumps_s]
    return list(from_levels(jumps_s, levels, num_engines, SPOT_PERIOD_S, COLD_START_S))


def from_levels(
    jumps_s: Sequence[float], levels: Sequence[int], num_engines: int, period_s: float, cold_s: float
) -> list[Rented]:
    """The first `levels[i]` of the engines are there from `jumps_s[i]` until the next jump."""
    ends_s = [*jumps_s[1:], period_s]
    supplies = []
    for index in range(num_engines):
        starts: list[float] = []
        ends: list[float] = []
        for from_s, to_s, level in zip(jumps_s, ends_s, levels, strict=True):
            if level <= index:
                continue
            if ends and ends[-1] == from_s:
                ends[-1] = to_s
            else:
                starts.append(from_s)
                ends.append(to_s)
        supplies.append(Rented(starts_s=tuple(starts), ends_s=tuple(ends), period_s=period_s, cold_s=cold_s))
    return supplies
