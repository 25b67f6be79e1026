"""What `rose sched serve` and `rose sched submit` read: the nodes of a cluster, and a job that runs on them.

Owns: the two YAML files' shape, and whether a job fits beside those that run. Promises: a job that can't run
as asked raises JobRefused with the constraint and the numbers. Never: chooses a group; a job names its own.
"""

import re
from collections.abc import Collection, Mapping

from pydantic import Field, field_validator, model_validator

from rose.config import Section
from rose.errors import JobRefused
from rose.scheduler.cluster.model import Group, Job, Member, SloKind

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


class JobSpec(Section):
    """A job's YAML: what to run, and its phases as profiled at its longest responses."""

    name: str
    command: tuple[str, ...] = Field(min_length=1)
    """Run in the folder that the job was submitted from, once per attempt."""
    group: str = "main"
    rollout_nodes: tuple[int, ...] = (0,)
    """The group's rollout nodes that the job is pinned to."""
    rollout_s: float = Field(gt=0)
    train_s: float = Field(gt=0)
    sync_s: float = Field(default=0.0, ge=0)
    num_train_nodes: int = Field(default=1, ge=1)
    slo: float = Field(default=2.0, gt=1)
    slo_kind: SloKind = SloKind.ITERATION
    num_iterations: int = Field(ge=1)
    rollout_bytes: int = Field(default=0, ge=0)
    train_bytes: int = Field(default=0, ge=0)
    max_restarts: int = Field(default=3, ge=0)
    """After crashes with no iteration in between; then the job has failed."""
    folder: str = "."

    @field_validator("name", "group")
    @classmethod
    def _is_plain(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name: 1 to 63 letters, digits, '_', '.', '-'")
        return name

    @field_validator("rollout_nodes")
    @classmethod
    def _are_nodes(cls, nodes: tuple[int, ...]) -> tuple[int, ...]:
        if not nodes or len(set(nodes)) != len(nodes) or min(nodes) < 0:
            raise ValueError(f"{list(nodes)}: expected one or more different node numbers from 0")
        return nodes

    def job(self) -> Job:
        """The job as policies see it."""
        return Job(
            name=self.name,
            rollout_s=self.rollout_s,
            train_s=self.train_s,
            sync_s=self.sync_s,
            num_rollout_nodes=len(self.rollout_nodes),
            num_train_nodes=self.num_train_nodes,
            slo=self.slo,
            slo_kind=self.slo_kind,
            num_iterations=self.num_iterations,
            rollout_bytes=self.rollout_bytes,
            train_bytes=self.train_bytes,
        )


class GroupSpec(Section):
    """Nodes that a group's jobs share."""

    num_rollout_nodes: int = Field(default=1, ge=1)
    num_train_nodes: int = Field(default=1, ge=1)


class ClusterSpec(Section):
    """The YAML of `rose sched serve`."""

    groups: dict[str, GroupSpec] = Field(default_factory=lambda: {"main": GroupSpec()})
    host_memory_bytes: int = Field(default=1 << 40, ge=1)
    """Of each node, for the suspended phases of all its jobs."""
    max_residents: int = Field(default=5, ge=1)
    """Jobs in one group. Source: WEAVE §4.2."""
    lease_s: float = Field(default=10.0, gt=0)
    """A permit without a heartbeat for this long is taken back. A dead process is noticed at once instead."""

    @model_validator(mode="after")
    def _has_groups(self) -> "ClusterSpec":
        if not self.groups:
            raise ValueError("groups: none; a cluster needs one")
        return self


def admit(
    cluster: ClusterSpec, spec: JobSpec, beside: Collection[JobSpec], drained: Collection[str]
) -> Group:
    """The job's group with the job in it; whether its order can be certified is not looked at.

    beside: the jobs that run in that group. drained: its nodes that take no more jobs.
    Raises: JobRefused.
    """
    if spec.group not in cluster.groups:
        raise JobRefused(f"{spec.name}: no group {spec.group!r}; there are {', '.join(cluster.groups)}")
    nodes = cluster.groups[spec.group]
    missing = [node for node in spec.rollout_nodes if node >= nodes.num_rollout_nodes]
    if missing:
        raise JobRefused(
            f"{spec.name}: rollout nodes {missing}: group {spec.group} has 0 to {nodes.num_rollout_nodes - 1}"
        )
    closed = [each for each in nodes_of(spec) if each in drained]
    if closed:
        raise JobRefused(
            f"{spec.name}: {', '.join(closed)} of group {spec.group} is drained; undo it or wait"
        )
    if len(beside) >= cluster.max_residents:
        raise JobRefused(
            f"{spec.name}: group {spec.group} has {len(beside)} jobs, at most {cluster.max_residents} may"
        )
    members = [*beside, spec]
    _check_memory(cluster.host_memory_bytes, spec, members)
    return group_of(cluster, spec.group, members)


def group_of(cluster: ClusterSpec, name: str, members: Collection[JobSpec]) -> Group:
    """A group as policies see it."""
    nodes = cluster.groups[name]
    return Group(
        name=name,
        num_train_nodes=nodes.num_train_nodes,
        num_rollout_nodes=nodes.num_rollout_nodes,
        members=tuple(Member(job=each.job(), rollout_nodes=each.rollout_nodes) for each in members),
    )


def nodes_of(spec: JobSpec) -> list[str]:
    """The nodes that the job uses, by their names in commands."""
    return [*(f"rollout-{node}" for node in spec.rollout_nodes), "train"]


def _check_memory(limit_bytes: int, spec: JobSpec, members: Collection[JobSpec]) -> None:
    used: Mapping[str, int] = {
        **{
            f"rollout-{node}": sum(each.rollout_bytes for each in members if node in each.rollout_nodes)
            for node in spec.rollout_nodes
        },
        "train": sum(each.train_bytes for each in members),
    }
    for node, num_bytes in used.items():
        if num_bytes > limit_bytes:
            raise JobRefused(
                f"{spec.name}: {node} of group {spec.group} would keep {num_bytes} bytes for {len(members)} "
                f"jobs in host memory, it has {limit_bytes}"
            )
