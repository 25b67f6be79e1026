"""Which slabs new blocks come from: rollout keeps requests apart, serving keeps slabs full."""

import numpy as np
import pytest

from rose.memory.policy.placement import Placement, preferred_positions

# Position:                     0  1  2  3  4  5
USED = np.array([2, 4, 0, 0, 3, 0], dtype=np.int32)
HASHED = np.array([0, 0, 0, 2, 1, 4], dtype=np.int32)


@pytest.mark.parametrize(
    ("placement", "beside", "order"),
    [
        (Placement.AFFINE, None, [2, 3, 0, 4]),
        (Placement.AFFINE, 4, [4, 2, 3, 0]),
        (Placement.DENSE, None, [4, 0, 2, 3]),
        (Placement.DENSE, 0, [0, 4, 2, 3]),
    ],
)
def test_order_of_preference(placement: Placement, beside: int | None, order: list[int]) -> None:
    """Full slabs (1 in use, 5 with cache) are never among them."""
    positions = preferred_positions(
        placement, num_used=USED, num_hashed=HASHED, blocks_per_slab=4, beside=beside
    )
    assert list(positions) == order
