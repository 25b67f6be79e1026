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
    num_spare: npt.NDArray[np.int32],
    num_used: npt.NDArray[np.int32],
    num_hashed: npt.NDArray[np.int32],
    beside: int | None,
) -> Iterator[int]:
    """Yields the positions that have spare blocks, best first, each once.

    The arrays count each position's spare blocks, those in use and those with prefix cache. ``beside`` is the
    position of the request's last block.
    """
    if beside is not None and num_spare[beside]:
        yield beside
    # Most positions of a full pool have no spare blocks.
    spare = np.flatnonzero(num_spare)
    is_idle, is_caching = num_used[spare] == 0, num_hashed[spare] > 0
    clean = spare[is_idle & ~is_caching]
    caching = spare[is_idle & is_caching]
    shared = spare[~is_idle]
    by_use = shared[np.argsort(num_used[shared], kind="stable")]
    # For rollout a slab that only caches is next best: in a slab in use, two requests would end together.
    is_affine = spread is Spread.AFFINE
    order = (clean, caching, by_use) if is_affine else (by_use[::-1], clean, caching)
    for positions in order:
        for position in map(int, positions):
            if position != beside:
                yield position
