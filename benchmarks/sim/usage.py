"""What a simulated cluster's nodes do: the share of their time in which they compute, and the most at once.

Owns the sums over a simulation. Promises: the simulation runs as without them. Never: decides anything.
"""

from collections.abc import Sequence

from rose.scheduler.cluster.policies import ClusterPolicy
from rose.scheduler.group.cycle import promised_s
from rose.scheduler.group.model import Group, Phase
from rose.scheduler.sim.loop import Drift, Simulation
from rose.scheduler.sim.workloads import Submission


class Usage:
    """Nodes of each pool: paid for, computing, and the most that were paid for at once."""

    def __init__(self) -> None:
        self.paid_s = dict.fromkeys(Phase, 0.0)
        self.busy_s = dict.fromkeys(Phase, 0.0)
        self.peak = dict.fromkeys(Phase, 0)

    def share(self, phase: Phase) -> float:
        """The share of the paid time in which the nodes compute."""
        return self.busy_s[phase] / self.paid_s[phase]


class UsageSimulation(Simulation):
    """A simulation that also sums what the nodes do. A job that pauses for a move computes nothing."""

    def __init__(
        self,
        submitted: Sequence[Submission],
        policy: ClusterPolicy,
        *,
        changes: Sequence[Drift] = (),
    ) -> None:
        super().__init__(submitted, policy, keeps_ends=True, changes=changes)
        self.usage = Usage()

    def _advance(self, now_s: float) -> None:
        before_s = self._now_s
        for group in self.cluster.groups.values():
            self._add(group, before_s, now_s)
        for phase, num in zip(Phase, self.cluster.num_used, strict=True):
            self.usage.paid_s[phase] += num * (now_s - before_s)
            self.usage.peak[phase] = max(self.usage.peak[phase], num)
        super()._advance(now_s)

    def _add(self, group: Group, before_s: float, now_s: float) -> None:
        for member, promise_s in zip(group.members, promised_s(group), strict=True):
            job = member.job
            begin_s = max(before_s, self.cluster.residents[job.name].since_s)
            num_iterations = max(0.0, now_s - begin_s) / promise_s
            rollout_s = len(member.rollout_nodes) * job.rollout_s
            train_s = group.num_train_nodes * job.train_s_on(group.num_train_nodes)
            self.usage.busy_s[Phase.ROLLOUT] += num_iterations * rollout_s
            self.usage.busy_s[Phase.TRAIN] += num_iterations * train_s
