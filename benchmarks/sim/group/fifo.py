"""A group whose nodes serve phases first come, first served: what the certified order is compared with.

Owns: that queueing rule alone, as WEAVE §5.1 words it (a FIFO queue for each node), and what it does to two
rollout-heavy jobs that nobody has certified. Never: is shipped.
"""

import heapq
import itertools
import random

from rose.scheduler.group.model import Group
from rose.scheduler.group.order import TRAIN_POOL
from rose.scheduler.sim.workloads import TABLE_6, Workload
from sim.group.scenario import group_of


def longest_iteration_s(group: Group, num_iterations: int = 30) -> float:
    """The longest time between two rollouts of a job, all phases worst, after the first third has passed.

    A phase on several nodes starts when it is the oldest request on each.
    """
    waiting: list[tuple[int, str, tuple[int, ...], float]] = []
    busy: set[int] = set()
    events: list[tuple[float, int, str, tuple[int, ...]]] = []
    ticket = itertools.count()
    members = {member.job.name: member for member in group.members}
    starts: dict[str, list[float]] = {name: [] for name in members}

    def request(name: str, is_rollout: bool) -> None:
        job = members[name].job
        length_s = job.rollout_s if is_rollout else job.train_s_on(group.num_train_nodes)
        resources = members[name].rollout_nodes if is_rollout else (TRAIN_POOL,)
        waiting.append((next(ticket), name, resources, length_s))

    for name in members:
        request(name, is_rollout=True)
    now = 0.0
    while min(len(times) for times in starts.values()) < num_iterations:
        claimed = set(busy)
        for entry in list(waiting):
            _, name, resources, length_s = entry
            if claimed.isdisjoint(resources):
                waiting.remove(entry)
                busy.update(resources)
                heapq.heappush(events, (now + length_s, next(ticket), name, resources))
                if resources != (TRAIN_POOL,):
                    starts[name].append(now)
            claimed.update(resources)  # nobody overtakes
        now, _, name, resources = heapq.heappop(events)
        busy.difference_update(resources)
        request(name, is_rollout=resources == (TRAIN_POOL,))
    skipped = num_iterations // 3
    return max(
        after - before for times in starts.values() for before, after in itertools.pairwise(times[skipped:])
    )


def naive_slowdowns(rng: random.Random) -> tuple[float, float]:
    """Two rollout-heavy jobs of Table 6 on one rollout and one training node: the iterations of the longer
    one and of the shorter one, over those alone. Source: WEAVE §3.2, Figure 3."""
    drawn = [rng.choice(TABLE_6[Workload.ROLLOUT_HEAVY]) for _ in range(2)]
    group = group_of([(rng.uniform(*rollout), rng.uniform(*train), (0,)) for rollout, train in drawn])
    together_s = longest_iteration_s(group)
    alone_s = sorted((member.job.solo_s for member in group.members), reverse=True)
    return together_s / alone_s[0], together_s / alone_s[1]
