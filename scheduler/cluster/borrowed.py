"""The third pool: serving GPUs that rollouts may borrow.

No GPU goes to two jobs. Candidates are certified without borrowed GPUs, so all of these GPUs can be taken
back at any time. scheduler/rollout talks to the serving side.
"""

from collections.abc import Iterable

from rose.scheduler.cluster.pools import Pools
from rose.scheduler.group.model import Group, Job


def lend(groups: Iterable[Group], pools: Pools) -> dict[str, int]:
    """Returns the borrowed serving GPUs of each job.

    Jobs that spend most of their iteration in rollouts come first. A job gets at most as many GPUs as its
    file allows, or as its rollout nodes have, which at best halves its rollout. A job that is being moved is
    a member of two groups, and borrows once. Jobs whose iterations would cost more with borrowed GPUs get
    none (`is_worth_it`).
    """
    jobs = {member.job.name: member.job for group in groups for member in group.members}
    left, lent = pools.num_serving_gpus, {}
    for job in sorted(jobs.values(), key=lambda job: (-job.rollout_s / job.solo_s, job.name)):
        if not is_worth_it(job, pools):
            continue
        most = job.max_serving_gpus
        num = min(left, most if most is not None else job.num_rollout_nodes * pools.rollout.gpus_per_node)
        if num:
            lent[job.name] = num
            left -= num
    return lent


def is_worth_it(job: Job, pools: Pools) -> bool:
    """Returns whether an iteration costs no more with borrowed GPUs than without them.

    With k borrowed GPUs beside n own ones, R seconds of rollout become R n / (n + k). An iteration thus needs
    its own nodes, which cost C dollars an hour, for R k / (n + k) seconds less, and pays k GPUs for R n /
    (n + k) seconds. It costs no more if a GPU's price is at most C / n, however many are borrowed.
    """
    own_dollars = pools.price(job.num_rollout_nodes, job.num_train_nodes)
    num_own = job.num_rollout_nodes * pools.rollout.gpus_per_node
    return pools.serving_dollars_per_gpu_hour * num_own <= own_dollars
