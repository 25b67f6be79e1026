"""The third pool: serving GPUs that rollouts may borrow.

No GPU goes to two jobs. Candidates are certified without borrowed GPUs, which cost nothing, so all of them
can be taken back at any time. scheduler/rollout talks to the serving side.
"""

from collections.abc import Iterable

from rose.scheduler.cluster.pools import Pools
from rose.scheduler.group.model import Group


def lend(groups: Iterable[Group], pools: Pools) -> dict[str, int]:
    """Returns the borrowed serving GPUs of each job.

    Jobs that spend most of their iteration in rollouts come first. A job gets at most
    as many GPUs as its rollout nodes have, which at best halves its rollout, and at most as many as its file
    allows. A job that is being moved is a member of two groups, and borrows once.
    """
    jobs = {member.job.name: member.job for group in groups for member in group.members}
    left, lent = pools.num_serving_gpus, {}
    for job in sorted(jobs.values(), key=lambda job: (-job.rollout_s / job.solo_s, job.name)):
        most = job.num_rollout_nodes * pools.rollout.gpus_per_node
        num = min(left, most, job.max_serving_gpus if job.max_serving_gpus is not None else most)
        if num:
            lent[job.name] = num
            left -= num
    return lent
