"""What a group's order promises its members when no SLO is asked of it: what policies compare.

The constraints are those of a certificate (certificate.py), without SLOs. For round-robin with every job on
one rollout node and no time outside of phases, the cycle is the longer of T_cycle and T_load (WEAVE Theorem
1), which needs no search. That bound is too short if a job has several nodes (three jobs: bound 76, optimum
78) or spends time outside of phases.
"""

from rose.scheduler.group.certificate import shortest_s
from rose.scheduler.group.model import Group
from rose.scheduler.group.order import round_robin

EPSILON = 1e-9
"""Relative: sums of times in another order differ in their last bits."""


def promised_s(group: Group) -> tuple[float, ...]:
    """Returns the mean iteration of each member over a pass, in the members' order."""
    if not group.iterations:
        return (round_robin_s(group),) * len(group.members)
    return tuple(group.pass_s / group.iterations.count(member.job.name) for member in group.members)


def round_robin_s(group: Group) -> float:
    """Returns the length of one cycle in which every member runs once, in the members' order."""
    return shortest_s(group, round_robin(group)) if depends_on_order(group) else group.round_robin_s


def depends_on_order(group: Group) -> bool:
    """Returns whether the length of a cycle may depend on the order of the members."""
    return any(len(member.rollout_nodes) > 1 or member.job.outside_s for member in group.members)
