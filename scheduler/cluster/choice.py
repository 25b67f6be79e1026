"""The policies by their names. OR-tools is imported only when `exact` is used."""

import random
from collections.abc import Callable

from rose.scheduler.cluster.exact import Exact
from rose.scheduler.cluster.lifetime import Lifetime
from rose.scheduler.cluster.policies import ClusterPolicy, Greedy, Random, Solo, Weave

MULTI_RATE = "lifetime-multirate"
"""The policy whose groups may let jobs run more often than others."""
POLICIES: dict[str, Callable[[int], ClusterPolicy]] = {
    "lifetime": lambda seed: Lifetime(),
    "lifetime-static": lambda seed: Lifetime(max_moves=0),
    MULTI_RATE: lambda seed: Lifetime(multi_rate=True),
    "weave": lambda seed: Weave(),
    "weave-unpruned": lambda seed: Weave(prune_saturated=False),
    "solo": lambda seed: Solo(),
    "random": lambda seed: Random(random.Random(seed)),
    "greedy": lambda seed: Greedy(),
    "exact": lambda seed: Exact(),
}
"""Each entry makes a new policy from a seed, which only `random` needs."""
