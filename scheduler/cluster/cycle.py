"""The longest iteration of each member under a group's order, also for jobs on several rollout nodes.

No schedule that follows the order exceeds it while phases keep to their worst-case times.

Round-robin with every job on one rollout node: the longer of T_cycle and T_load (WEAVE Theorem 1). With a
job on several nodes that is too short (three jobs: bound 76, optimum 78), and so it is with a job that spends
time outside of phases. Then the period of the order itself is computed: phases are nodes of a graph, "not
before the end of" its edges, an edge into the next cycle has height 1, and the period is the largest sum of
times over heights among the graph's cycles.
"""

from rose.scheduler.cluster.model import Group

_Edge = tuple[int, int, float, int]
"""An edge: from a phase, to a phase, the seconds and the cycles between their starts."""


def promised_s(group: Group) -> tuple[float, ...]:
    """The longest iteration of each member, in the members' order: its period where it has one (rates.py)."""
    return group.periods_s or (round_robin_s(group),) * len(group.members)


def round_robin_s(group: Group) -> float:
    """The length of one cycle in the members' order."""
    return _order_s(group) if depends_on_order(group) else group.round_robin_s


def depends_on_order(group: Group) -> bool:
    """Whether the length of a cycle may depend on the order of the members."""
    return any(len(member.rollout_nodes) > 1 or member.job.outside_s for member in group.members)


def starts_s(group: Group) -> tuple[tuple[float, float], ...]:
    """When each member's rollout and training start in a round-robin cycle, in the members' order."""
    period_s = round_robin_s(group)
    start_s = [0.0] * (2 * len(group.members))
    for _ in start_s:
        for source, target, time_s, height in _edges(group):
            start_s[target] = max(start_s[target], start_s[source] + time_s - height * period_s)
    return tuple(zip(start_s[::2], start_s[1::2], strict=True))


def _order_s(group: Group) -> float:
    edges = _edges(group)
    period_s = group.round_robin_s
    while (cycle := _late_cycle(2 * len(group.members), edges, period_s)) is not None:
        period_s = sum(edge[2] for edge in cycle) / sum(edge[3] for edge in cycle)
    return period_s


def _edges(group: Group) -> list[_Edge]:
    """Phase 2k is the rollout of member k, phase 2k + 1 its training."""
    edges: list[_Edge] = []
    train_s = [member.job.train_s_on(group.num_train_nodes) for member in group.members]
    for k, member in enumerate(group.members):
        edges.append((2 * k, 2 * k + 1, member.job.rollout_s + member.job.after_rollout_s, 0))
        edges.append((2 * k + 1, 2 * k, train_s[k] + member.job.after_train_s, 1))
    everyone = range(len(group.members))
    users = [
        [k for k in everyone if n in group.members[k].rollout_nodes] for n in range(group.num_rollout_nodes)
    ]
    for phase, order in [(1, list(everyone)), *((0, jobs) for jobs in users)]:
        for here, there in zip(order, order[1:] + order[:1], strict=True):
            if here != there:
                time_s = train_s[here] if phase else group.members[here].job.rollout_s
                edges.append((2 * here + phase, 2 * there + phase, time_s, int(there < here)))
    return edges


def _late_cycle(num_phases: int, edges: list[_Edge], period_s: float) -> list[_Edge] | None:
    """Edges around which a cycle of this period can't be kept; None where it can (Bellman-Ford)."""
    start_s = [0.0] * num_phases
    came_by: list[_Edge | None] = [None] * num_phases
    changed = 0
    for _ in range(num_phases + 1):
        changed = -1
        for edge in edges:
            source, target, time_s, height = edge
            earliest_s = start_s[source] + time_s - height * period_s
            # A billionth: sums of times in another order differ in their last bits.
            if earliest_s > start_s[target] + 1e-9 * period_s:
                start_s[target] = earliest_s
                came_by[target] = edge
                changed = target
        if changed < 0:
            return None
    phase = changed
    for _ in range(num_phases):
        phase = _source(came_by, phase)
    cycle, end = [], phase
    while True:
        edge_in = came_by[phase]
        assert edge_in is not None
        cycle.append(edge_in)
        phase = edge_in[0]
        if phase == end:
            return cycle


def _source(came_by: list[_Edge | None], phase: int) -> int:
    edge = came_by[phase]
    assert edge is not None, f"phase {phase} is late and nothing came before it"
    return edge[0]
