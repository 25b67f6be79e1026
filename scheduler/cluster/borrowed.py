"""The third pool: serving GPUs that rollouts may borrow.

Owns: who gets how many. Promises: no GPU goes to two jobs, no more than the pool has; nothing else depends on
the answer, so all of them can be taken back at any time: candidates are certified without them, and they cost
nothing. Never: talks to the serving side (scheduler/rollout does).
"""

from collections.abc import Iterable

from rose.scheduler.cluster.model import Group
from rose.scheduler.cluster.pools import Pools


def lend(groups: Iterable[Group], pools: Pools) -> dict[str, int]:
    """Serving GPUs by job: the jobs that spend most of their iteration in rollouts come first, each gets at
    most as many GPUs as it has rollout nodes for, as its rollout is at best halved then."""
    jobs = [member.job for group in groups for member in group.members]
    left, lent = pools.num_serving_gpus, {}
    for job in sorted(jobs, key=lambda job: (-job.rollout_s / job.solo_s, job.name)):
        num = min(left, job.num_rollout_nodes * pools.rollout.gpus_per_node)
        if num == 0:
            break
        lent[job.name] = num
        left -= num
    return lent
