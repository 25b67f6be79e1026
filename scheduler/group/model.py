"""What the cluster scheduler reasons about: jobs, their phases' worst-case times, groups that share nodes.

Owns the nouns of inter- and intra-group scheduling, and the formulas that follow from them alone. The values
never change, so a policy tries a candidate by making another group.

Source: WEAVE §4.1 and §4.2. A *node* has eight GPUs; a *group* is one set of training nodes, used by all its
jobs, with rollout nodes of which each job is pinned to some. In one *cycle* (the papers' meta-iteration)
every job runs one rollout and one training phase.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class Phase(StrEnum):
    """The phases of one iteration that hold nodes, each of the pool of the same name."""

    ROLLOUT = "rollout"
    TRAIN = "train"


class SloKind(StrEnum):
    """What a job's SLO limits."""

    ITERATION = "iteration"
    """Every iteration. Source: WEAVE §4.1."""
    LIFETIME = "lifetime"
    """The mean over all iterations: fast ones may pay for slow ones. Ours, looser than the paper's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One RL job, as profiled once at its longest responses.

    `rollout_s` and `train_s` are worst-case times of a phase on the job's own node counts.
    `after_rollout_s` and `after_train_s` are the longest times from the end of a phase until the job asks for
    the next, in which it holds no nodes: rewards, the transfer of weights, checkpoints, evaluation. `slo` is
    the longest allowed iteration over `solo_s`. `rollout_bytes` and `train_bytes` are what a suspended phase
    keeps in the host memory of each of its nodes. `max_serving_gpus` is the most serving GPUs that it may
    borrow; None: as many as its rollout nodes have. No certificate counts them.
    `fewest_rollout_nodes`: while it borrows, the scheduler may hand its others back; None: it keeps all.
    """

    name: str
    rollout_s: float
    train_s: float
    num_rollout_nodes: int = 1
    num_train_nodes: int = 1
    slo: float = 2.0
    slo_kind: SloKind = SloKind.ITERATION
    num_iterations: int = 1
    rollout_bytes: int = 0
    train_bytes: int = 0
    after_rollout_s: float = 0.0
    after_train_s: float = 0.0
    max_serving_gpus: int | None = None
    fewest_rollout_nodes: int | None = None

    @property
    def outside_s(self) -> float:
        """The longest time of an iteration in which the job holds no nodes by itself, without waiting."""
        return self.after_rollout_s + self.after_train_s

    def after_s(self, phase: Phase) -> float:
        """The longest time from the end of a phase until the job asks for the next."""
        return self.after_rollout_s if phase is Phase.ROLLOUT else self.after_train_s

    @property
    def solo_s(self) -> float:
        """An iteration alone on the nodes it asked for: what its SLO is relative to."""
        return self.rollout_s + self.train_s + self.outside_s

    def train_s_on(self, num_train_nodes: int) -> float:
        """Returns the time of a training phase on another number of nodes, in proportion. Source: WEAVE §4.2,
        footnote 3."""
        return self.train_s * self.num_train_nodes / num_train_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A job in a group, pinned to rollout nodes by their index in the group."""

    job: Job
    rollout_nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Jobs that share `num_train_nodes` training nodes and alternate on their rollout nodes.

    `members` stand in cyclic order: the order in which their phases run on every node they share. In a
    multi-rate group some have several iterations in a pass through the order.
    """

    name: str
    num_train_nodes: int
    num_rollout_nodes: int
    members: tuple[Member, ...] = ()
    iterations: tuple[str, ...] = ()
    """The job of each iteration in a pass; empty: round-robin, each member once."""
    pass_s: float = 0.0
    """The length of a pass with these iterations."""

    def without(self, name: str) -> "Group":
        """Returns the group without a member, on the same nodes.

        In a multi-rate order the times of its iterations stay idle.
        """
        members = tuple(member for member in self.members if member.job.name != name)
        iterations = tuple(each for each in self.iterations if each != name) if len(members) > 1 else ()
        return replace(self, members=members, iterations=iterations)

    def solo_s(self, job: Job) -> float:
        """Returns the time of a member's iteration alone on this group's nodes."""
        return job.rollout_s + job.train_s_on(self.num_train_nodes) + job.outside_s

    @property
    def cycle_s(self) -> float:
        """The longest member's iteration: no cycle is shorter. Source: WEAVE §4.2, T_cycle."""
        return max((self.solo_s(member.job) for member in self.members), default=0.0)

    @property
    def load_s(self) -> float:
        """Work of one cycle on the busiest resource. Source: WEAVE §4.2, T_load."""
        rollout = [0.0] * self.num_rollout_nodes
        train = 0.0
        for member in self.members:
            train += member.job.train_s_on(self.num_train_nodes)
            for node in member.rollout_nodes:
                rollout[node] += member.job.rollout_s
        return max(train, *rollout) if rollout else train

    @property
    def round_robin_s(self) -> float:
        """Length of a round-robin cycle if every job is pinned to one rollout node. Source: WEAVE Theorem 1.

        With jobs on several nodes, or with time outside of phases, it is only a lower bound; the tests of
        certificates and cycles have counterexamples.
        """
        return max(self.cycle_s, self.load_s)
