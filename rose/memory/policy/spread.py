"""Which slab a new KV block comes from.

Slabs with spare blocks (free, and without prefix cache) come in an order of preference. Rollout keeps a
request's blocks together (*affine*), so that a cut which ends a request frees whole slabs. Serving fills
slabs that it uses anyway (*dense*), so that the others can go back to the pool. Source: ours; ROSE §4.1
leaves the order open. vLLM's own LRU order aborted 22 of 24 requests where 10 to 11 suffice
(benchmarks/bench_cut.py).
"""

from collections.abc import Iterator
from enum import StrEnum

import numpy as np
import numpy.typing as npt


class Spread(StrEnum):
    """How an engine spreads its blocks."""

    AFFINE = "affine"
    DENSE = "dense"


def preferred_positions(
    spread: Spread,
    *,
    num_used: npt.NDArray[np.int32],
    num_hashed: npt.NDArray[np.int32],
    blocks_per_slab: int,
    beside: int | None,
) -> Iterator[int]:
    """Yields positions that may have spare blocks, best first, each at most once.

    ``num_used`` and ``num_hashed`` count each position's blocks in use and with prefix cache. ``beside`` is
    the position of the request's last block. Positions without memory may be among them: they have no spare
    blocks.
    """
    if beside is not None:
        yield beside
    is_idle = num_used == 0
    clean = np.flatnonzero(is_idle & (num_hashed == 0))
    caching = np.flatnonzero(is_idle & (num_hashed > 0) & (num_hashed < blocks_per_slab))
    shared = np.flatnonzero(~is_idle & (num_used < blocks_per_slab))
    by_use = shared[np.argsort(num_used[shared], kind="stable")]
    # For rollout a slab that only caches is next best: in a slab in use, two requests would end together.
    is_affine = spread is Spread.AFFINE
    order = (clean, caching, by_use) if is_affine else (by_use[::-1], clean, caching)
    for positions in order:
        for position in positions.tolist():
            if position != beside:
                yield position
