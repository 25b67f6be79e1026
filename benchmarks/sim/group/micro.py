"""The groups of WEAVE's micro-benchmarks (§6.2), in the paper's seconds.

Owns: their jobs, nodes and lengths. Never: runs or schedules them.
"""

from rose.scheduler.group.model import Group, Job, Member


def micro_groups() -> tuple[Group, ...]:
    """Lengths of one iteration from Table 4 (a: 257.7 s, b: 525.4 s, c: 574.6 s), split as §6.2 says: A in
    halves, D 2.5:1, E 6:1. The paper gives no split of C: 200 s of rollout leave its nodes to both D."""
    temporal = (_member("a1", 128.8, 128.8, (0,)), _member("a2", 128.8, 128.8, (0,)))
    train = (
        _member("d1", 375.3, 150.1, (0,)),
        _member("d2", 375.3, 150.1, (1,)),
        _member("e", 450.3, 75.1, (2,)),
    )
    spatial = (
        _member("c", 200.0, 374.6, (0, 1), 2),
        _member("d1", 375.3, 75.1, (0,), 2),
        _member("d2", 375.3, 75.1, (1,), 2),
    )
    return (
        Group(name="temporal", num_rollout_nodes=1, num_train_nodes=1, members=temporal),
        Group(name="train", num_rollout_nodes=3, num_train_nodes=1, members=train),
        Group(name="spatial", num_rollout_nodes=2, num_train_nodes=2, members=spatial),
    )


def _member(
    name: str, rollout_s: float, train_s: float, nodes: tuple[int, ...], num_train_nodes: int = 1
) -> Member:
    job = Job(
        name=name,
        rollout_s=rollout_s,
        train_s=train_s,
        num_rollout_nodes=len(nodes),
        num_train_nodes=num_train_nodes,
    )
    return Member(job=job, rollout_nodes=nodes)
