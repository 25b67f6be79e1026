"""Which slabs new blocks come from: rollout keeps requests apart, serving keeps slabs full."""

import numpy as np
import pytest

from rose.memory.policy.spread import Spread, preferred_positions

# Position:       0  1  2  3  4  5  6
USED = np.array([2, 4, 0, 0, 3, 0, 1], dtype=np.int32)
HASHED = np.array([0, 0, 0, 2, 1, 4, 4], dtype=np.int32)
SPARE = np.array([2, 0, 4, 2, 1, 0, 0], dtype=np.int32)


@pytest.mark.parametrize(
    ("spread", "beside", "order"),
    [
        (Spread.AFFINE, None, [2, 3, 0, 4]),
        (Spread.AFFINE, 4, [4, 2, 3, 0]),
        (Spread.DENSE, None, [4, 0, 2, 3]),
        (Spread.DENSE, 0, [0, 4, 2, 3]),
        (Spread.DENSE, 1, [4, 0, 2, 3]),
    ],
)
def test_positions_are_preferred_by_what_their_slabs_hold(
    spread: Spread, beside: int | None, order: list[int]
) -> None:
    """Full slabs (1 in use, 5 with cache, 6 with both) are never among them."""
    positions = preferred_positions(spread, num_spare=SPARE, num_used=USED, num_hashed=HASHED, beside=beside)
    assert list(positions) == order
