"""Short slices of time in which rollouts are shut out, so that what they cost serving can be measured.

A slice is chosen by a hash of its number, so every process that knows the share agrees on which slices are
closed, without a message. Pure: a function of the time.
"""

from dataclasses import dataclass
from functools import lru_cache

SLICE_S = 0.1
"""The length of a slice: several serving steps, and short against the drift of the traffic."""
GROUP_SLICES = 40
"""The number of consecutive slices in a group. All groups have the same number of closed slices, at random
places."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ClosedSlices:
    """The slices of CLOCK_MONOTONIC that are closed to rollouts."""

    share: float
    """The part of all slices that is closed, 0 to 1, in steps of 1 / GROUP_SLICES."""

    def is_closed(self, now: float) -> bool:
        """Whether ``now`` (seconds) lies in a closed slice. A larger share closes these slices and more."""
        if self.share <= 0:
            return False
        num_closed = round(self.share * GROUP_SLICES)
        if self.share < 1:
            num_closed = min(num_closed, GROUP_SLICES - 1)
        group, place = divmod(slice_number(now), GROUP_SLICES)
        return _ranks(group)[place] < num_closed


def slice_number(now: float) -> int:
    """Returns the number of the slice that holds ``now``."""
    return int(now / SLICE_S)


@lru_cache(maxsize=4)
def _ranks(group: int) -> tuple[int, ...]:
    """Returns each slice's rank in the order in which the slices of a group are closed."""
    hashes = [_mixed(group * GROUP_SLICES + place) for place in range(GROUP_SLICES)]
    order = sorted(hashes)
    return tuple(order.index(each) for each in hashes)


def _mixed(number: int) -> int:
    """Hashes 64 bits. Source: the finalizer of SplitMix64 (Steele et al., OOPSLA 2014)."""
    mixed = (number * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
