"""What a group will cost until its last member leaves.

Walks from one departure to the next. Members leave when their work is done at the pace that the remaining
group promises, nodes are returned when nobody is pinned to them, and no newcomer is expected. Where it can,
it computes with numbers instead of groups, because a decision walks several of them.
"""

from collections.abc import Sequence

from rose.scheduler.cluster.groups import without
from rose.scheduler.cluster.pools import Pools
from rose.scheduler.cluster.residents import Resident
from rose.scheduler.group.cycle import promised_s
from rose.scheduler.group.model import Group


def lifetime_dollars(group: Group, residents: Sequence[Resident], now_s: float, pools: Pools) -> float:
    """Returns the cost from `now_s` on. `residents` stand as the group's members, not yet at the group's
    pace."""
    if not residents:
        return 0.0
    if residents[0].keeps_end:
        ends_s = [resident.end_s for resident in residents]
    elif all(len(member.rollout_nodes) == 1 for member in group.members):
        ends_s = _ends_s(group, residents, now_s)
    else:
        ends_s = _ends_by_group_s(group, residents, now_s)
    node_end_s = [now_s] * group.num_rollout_nodes
    for member, end_s in zip(group.members, ends_s, strict=True):
        for node in member.rollout_nodes:
            node_end_s[node] = max(node_end_s[node], end_s)
    rollout_s = sum(node_end_s) - now_s * len(node_end_s)
    train_s = (max(ends_s) - now_s) * group.num_train_nodes
    cost = rollout_s * pools.rollout.dollars_per_node_hour + train_s * pools.train.dollars_per_node_hour
    return cost / 3600


def _ends_s(group: Group, residents: Sequence[Resident], now_s: float) -> list[float]:
    """The ends of jobs that are pinned to one rollout node each."""
    size = len(residents)
    train_s = [member.job.train_s_on(group.num_train_nodes) for member in group.members]
    rollout_s = [member.job.rollout_s for member in group.members]
    outside_s = [member.job.outside_s for member in group.members]
    node = [member.rollout_nodes[0] for member in group.members]
    solo_s = [member.job.solo_s for member in group.members]
    left_s = [_left_s(resident, now_s) for resident in residents]
    multi_rate_s = promised_s(group) if group.iterations else ()
    ends_s = [now_s] * size
    there, time_s = list(range(size)), now_s
    while there:
        if multi_rate_s and len(there) > 1:
            pace = {k: multi_rate_s[k] / solo_s[k] for k in there}
        else:
            load_s = [0.0] * group.num_rollout_nodes
            for k in there:
                load_s[node[k]] += rollout_s[k]
            longest_s = max(train_s[k] + rollout_s[k] + outside_s[k] for k in there)
            cycle_s = max(longest_s, sum(train_s[k] for k in there), *load_s)
            pace = {k: cycle_s / solo_s[k] for k in there}
        first = min(there, key=lambda k: left_s[k] * pace[k])
        passed_s = left_s[first] * pace[first]
        time_s += passed_s
        for k in there:
            left_s[k] -= passed_s / pace[k]
        ends_s[first] = time_s
        there.remove(first)
    return ends_s


def _ends_by_group_s(group: Group, residents: Sequence[Resident], now_s: float) -> list[float]:
    """The ends where only the group itself knows its promises."""
    left_s = {resident.job.name: _left_s(resident, now_s) for resident in residents}
    end_s: dict[str, float] = {}
    time_s = now_s
    while group.members:
        pace = {
            member.job.name: promise / member.job.solo_s
            for member, promise in zip(group.members, promised_s(group), strict=True)
        }
        first = min(pace, key=lambda name: left_s[name] * pace[name])
        passed_s = left_s[first] * pace[first]
        time_s += passed_s
        for name in pace:
            left_s[name] -= passed_s / pace[name]
        end_s[first] = time_s
        group = without(group, first)
    return [end_s[resident.job.name] for resident in residents]


def _left_s(resident: Resident, now_s: float) -> float:
    """Work, and the pause before it where there is one."""
    later = resident.at(now_s)
    return later.work_s + (later.since_s - now_s)
