"""The loss of what a node serves, from which training its weights have seen. A model, not a measurement.

Owns: an assumed learning curve, and when which node's weights change. Source: LeMix §V-B: each node that
shares trains its own weights; separate nodes get the last training node's at every 100th training task. The
curve is ours: the paper only draws losses (Figure 10).
"""

from bisect import bisect_right
from collections.abc import Sequence

from rose.scheduler.sim.node_results import NodeResult

SYNC_EVERY = 100
SYNC_S = 5.0
"""Weights of 13 GB over 25 Gbit/s."""
_BEST, _GAIN, _HALF = 2.0, 2.0, 20.0


def loss_after(num_updates: int) -> float:
    """4.0 without training, halfway to 2.0 after 20 training tasks."""
    return _BEST + _GAIN / (1 + num_updates / _HALF)


def mean_loss_shared(result: NodeResult) -> float | None:
    """Returns the mean loss of all requests, each under its own node's weights; None without requests."""
    ends = [
        sorted(each.end_s for each in result.trained if each.node == node)
        for node in range(len(result.busy_s))
    ]
    return _mean([loss_after(bisect_right(ends[each.node], each.first_s)) for each in result.requests])


def mean_loss_separate(result: NodeResult) -> float | None:
    """Returns the mean loss of all requests, under the last weights of the last training node."""
    trained = sorted(result.trained, key=lambda each: each.end_s)
    last_node = max((each.node for each in trained), default=0)
    syncs, counts, seen = [], [0], 0
    for number, each in enumerate(trained, start=1):
        seen += each.node == last_node
        if number % SYNC_EVERY == 0:
            syncs.append(each.end_s + SYNC_S)
            counts.append(seen)
    return _mean([loss_after(counts[bisect_right(syncs, each.first_s)]) for each in result.requests])


def _mean(losses: Sequence[float]) -> float | None:
    return sum(losses) / len(losses) if losses else None
