"""Which of serving's idle slabs hold the prefix cache that is worth least.

A slab is idle while no request uses a block of it. Serving gives up idle slabs in two cases. For its own
requests it evicts in the order of last use, as vLLM's free queue does, but whole slabs. For rollouts it gives
slabs up by value, which is the cost to compute again what is cached, times how often and how recently it was
used. In both orders the end of a context goes before its beginning, because the end can't be found in the
cache without the beginning. Pure.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice

NUM_HITS = 3
"""The hits that count beside the last use. A prefix that is shared all the time is then worth four times as
much as a context of the same age that was used once. With more hits, once popular prefixes would outlive
those in use now."""

_SHORTEST_AGE_S = 1e-3


def recompute_cost(num_blocks: int, end_tokens: float, tokens_per_pair: float) -> float:
    """Returns what it costs to compute cached blocks again, in blocks at the beginning of a context.

    Attention grows with depth, so a block far into a context costs more. ``end_tokens`` is the sum, over the
    blocks, of the context's tokens up to each block's end. ``tokens_per_pair`` is the time to attend one
    token, in units of what a prefill token takes besides.
    """
    return num_blocks + tokens_per_pair * end_tokens


class CacheTable:
    """The idle positions of a serving engine and their last uses. ``now`` never goes back."""

    def __init__(self) -> None:
        # Position -> (context, when it fell idle), in the order of last use, the end of a context first.
        self._idle: dict[int, tuple[int, float]] = {}
        self._hits: dict[int, deque[float]] = {}
        self._num_contexts = 0
        self._ranking: Iterator[int] = iter(())
        self._num_draws = 0

    def __len__(self) -> int:
        return len(self._idle)

    def fell_idle(self, positions: Sequence[int], now: float) -> None:
        """One request left these positions idle, the end of its context first."""
        self._num_contexts += 1
        for position in positions:
            self._idle.pop(position, None)
            self._idle[position] = (self._num_contexts, now)

    def hit(self, position: int, now: float) -> None:
        """A request found a prefix in the cache at this position."""
        self._hits.setdefault(position, deque(maxlen=NUM_HITS)).append(now)

    def fell_busy(self, position: int) -> None:
        """A request uses the position again."""
        self._idle.pop(position, None)

    def cleared(self, position: int) -> None:
        """The position holds no cache any more; what comes there next has had no hits."""
        self._hits.pop(position, None)

    def forget(self, position: int) -> None:
        """The position has no slab any more."""
        self._idle.pop(position, None)
        self._hits.pop(position, None)

    def oldest(self) -> Iterator[int]:
        """Yields the idle positions in the order of last use."""
        yield from self._idle

    def draw_least_valuable(
        self, count: int, cost: Callable[[int], float], now: float, keep: AbstractSet[int]
    ) -> list[int]:
        """Returns up to ``count`` positions, the least valuable first and none of ``keep``, for the caller to
        give up.

        A ranking takes time in proportion to the idle positions, so it is kept until half of it was drawn.
        Positions that fell idle meanwhile have been used more recently than all that are left in it.
        """
        drawn = self._draw(min(count, self._num_draws), keep)
        if len(drawn) < count:
            self._ranking = self.least_valuable(cost, now)
            self._num_draws = max(count, len(self._idle) // 2)
            drawn += self._draw(count - len(drawn), keep | set(drawn))
        return drawn

    def _draw(self, count: int, keep: AbstractSet[int]) -> list[int]:
        drawn = list(islice((position for position in self._ranking if position not in keep), count))
        self._num_draws -= len(drawn)
        return drawn

    def least_valuable(self, cost: Callable[[int], float], now: float) -> Iterator[int]:
        """Yields the idle positions that cache anything, the least valuable first.

        ``cost`` returns what it takes to compute a position's cache again; 0 if it caches nothing. Between
        two positions others may be used: they are left out then.
        """
        contexts: dict[int, deque[int]] = {}
        for position, (context, _) in self._idle.items():
            if cost(position):
                contexts.setdefault(context, deque()).append(position)

        def worth(position: int) -> float:
            return cost(position) * self._use_rate(position, now)

        def is_left(position: int, context: int) -> bool:
            entry = self._idle.get(position)
            return entry is not None and entry[0] == context and cost(position) > 0

        # Only the end of each context competes; once it has gone, the slab before it does.
        heap = [(worth(positions[0]), positions[0], context) for context, positions in contexts.items()]
        heapq.heapify(heap)
        while heap:
            _, position, context = heap[0]
            if is_left(position, context):
                yield position
            before = contexts[context]
            before.popleft()
            while before and not is_left(before[0], context):
                before.popleft()
            if before:
                heapq.heapreplace(heap, (worth(before[0]), before[0], context))
            else:
                heapq.heappop(heap)

    def _use_rate(self, position: int, now: float) -> float:
        """Returns an estimate of uses per second, from the ages of the last ones."""
        uses = (self._idle[position][1], *self._hits.get(position, ()))
        return math.fsum(1 / max(now - used_s, _SHORTEST_AGE_S) for used_s in uses)

    def check_integrity(self) -> None:
        """Contexts and times never fall along the order of last use. Raises: AssertionError."""
        entries = list(self._idle.values())
        assert entries == sorted(entries), entries
        for position, hits in self._hits.items():
            assert list(hits) == sorted(hits) and len(hits) <= NUM_HITS, (position, hits)
