"""Right-sizes jobs that borrow serving GPUs: hands rollout nodes back after an iteration, or takes more.

Owns the times of each job's last iterations, and asks the policy (rose.scheduler.cluster.right_sizing) for
the cheapest number of own nodes. The job gets that number only in an order that is certified with own nodes
alone, at worst-case times, so loans may end at any time. A job that is lent nothing any more gets all nodes
that it asked for, as soon as they are free. Only nodes that no other job uses are handed back. If a job
starts ranks on each node, each node keeps its number of ranks, so the next attempt has fewer ranks. Pure:
takes ``now``.

Only what this scheduler has seen counts: a restart delays the decision by `NUM_ITERATIONS` iterations.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rose.config import parse_config
from rose.errors import ConfigError
from rose.scheduler.cluster.right_sizing import LastIterations, RightSizing, others_nodes, sized
from rose.scheduler.group.certificate import CertificateError
from rose.scheduler.group.model import Job, Phase
from rose.scheduler.runtime.channel.messages import Completed, Release, Stop
from rose.scheduler.runtime.decide.permit_calls import PermitCalls
from rose.scheduler.runtime.decide.records import JobState
from rose.scheduler.runtime.decide.state import State
from rose.scheduler.runtime.job.spec import RunSpec

logger = logging.getLogger(__name__)

NUM_ITERATIONS = 3
"""The iterations whose mean counts."""


@dataclass(slots=True, kw_only=True)
class _Window:
    """What an attempt's iterations have taken since one of them ended, on the same nodes."""

    attempt: int
    began_s: float
    gpu_s: float
    """What the job's turns had used of serving GPUs by then."""
    num_iterations: int = 0
    rollout_s: float = 0.0


class SizeCalls:
    """Watches Release and Completed calls of jobs that may do with fewer nodes."""

    def __init__(self, state: State, permits: PermitCalls) -> None:
        self._state = state
        self._permits = permits
        self._windows: dict[str, _Window] = {}
        self._policies: dict[str, RightSizing] = {}

    def releasing(self, call: Release, now: float) -> None:
        """A phase is about to release its nodes."""
        window = self._windows.get(call.job)
        if window is None or call.phase is not Phase.ROLLOUT or self._permits.why_not(call) is not None:
            return
        window.rollout_s += (
            self._state.permits_of(call.job).held_s(call.job, call.epoch, now, call.rank) or 0.0
        )

    def completing(self, call: Completed, now: float) -> None:
        """An iteration is about to be safe: the job holds nothing, and may go on with other nodes."""
        if self._permits.why_not(call) is not None or not self._permits.is_last(call):
            return
        if call.iteration < self._state.jobs[call.job].num_done:  # sent again, and answered already
            return
        if not self._may_change(call):
            self._windows.pop(call.job, None)
            return
        spec, gpu_s = self._state.specs[call.job], self._state.jobs[call.job].borrowed.gpu_s
        window = self._windows.get(call.job)
        if window is not None and window.attempt == call.attempt:
            window.num_iterations += 1
        else:  # when this iteration began is not known
            window = self._windows[call.job] = _Window(attempt=call.attempt, began_s=now, gpu_s=gpu_s)
        if not self._state.loans.num_gpus(call.job):
            num = spec.phases["rollout"].nodes
            if num < spec.asked_nodes:
                self._change(call.job, [spec.asked_nodes], "it is lent no serving GPUs any more", now)
        elif window.num_iterations >= NUM_ITERATIONS:
            self._windows[call.job] = _Window(attempt=call.attempt, began_s=now, gpu_s=gpu_s)
            seen = LastIterations(
                num_nodes=spec.phases["rollout"].nodes,
                iteration_s=(now - window.began_s) / window.num_iterations,
                rollout_s=window.rollout_s / window.num_iterations,
                lent_gpus=(gpu_s - window.gpu_s) / window.rollout_s if window.rollout_s else 0.0,
            )
            self._choose(call.job, seen, now)

    def forget(self, job: str) -> None:
        """The job is over or waits for a place."""
        self._windows.pop(job, None)
        self._policies.pop(job, None)

    def _may_change(self, call: Completed) -> bool:
        record, spec = self._state.jobs[call.job], self._state.specs[call.job]
        is_able = spec.borrow is not None and spec.borrow.fewest_nodes is not None
        goes_on = call.iteration + 1 < spec.iterations and record.state is JobState.RUNNING
        is_still = record.next_place is None and record.gives_way is None
        is_fixed = self._state.groups.drained.get(record.group) or (
            self._state.cluster.ray is not None and spec.placement.is_strict
        )
        return is_able and goes_on and is_still and not is_fixed

    def _choose(self, job: str, seen: LastIterations, now: float) -> None:
        spec, group = self._state.specs[job], self._state.groups.by_name[self._state.jobs[job].group]
        assert spec.borrow is not None and spec.borrow.fewest_nodes is not None
        pools = self._state.cluster.to_pools()
        policy = self._policies.setdefault(job, RightSizing(pools))
        num_shared = len(others_nodes(group, job) & set(self._state.jobs[job].rollout_nodes))
        nums = range(max(spec.borrow.fewest_nodes, num_shared), spec.asked_nodes + 1)
        wanted = policy.wanted(seen, nums, group.num_train_nodes)
        self._change(job, wanted, f"with {seen.lent_gpus:.1f} lent GPUs that costs least", now)

    def _change(self, job: str, nums: Iterable[int], why: str, now: float) -> None:
        """Gives the job the first of these numbers of nodes that is certified without loans; else none."""
        record = self._state.jobs[job]
        for num in nums:
            model = sized(self._state.models[job], num)
            try:
                content = _with_job(record.spec, model, self._state.specs[job])
                spec = parse_config(content, RunSpec, "job")
                if self._is_over_quota(spec):
                    continue
                group = self._state.groups.resized(record.group, model, now)
                if group is None:
                    continue
                group = self._state.ordered(group, now)
                certificate = self._state.certify(group, now)
            except (ConfigError, CertificateError) as error:
                logger.info("not resized job=%s nodes=%d reason=%s", job, num, error)
                continue
            [member] = [each for each in group.members if each.job.name == job]
            record.spec, record.rollout_nodes = content, member.rollout_nodes
            record.note = f"keeps {num} of the {spec.asked_nodes} rollout nodes that it asked for: {why}"
            self._state.learn(job, spec)
            self._state.form(group, certificate, now)
            self._state.has_new_room = self._state.has_come_or_gone = True
            self._state.changed(job)
            self._state.event("resized", job, num_rollout_nodes=num, reason=record.note)
            logger.info("resized job=%s %s", job, record.note)
            self._start_anew(job)
            return

    def _is_over_quota(self, spec: RunSpec) -> bool:
        """Whether the job's team would use more rollout nodes than it may."""
        team = self._state.cluster.teams.get(spec.team) if spec.team is not None else None
        quota = team.quota(Phase.ROLLOUT) if team is not None else None
        if spec.team is None or quota is None:
            return False
        used = self._state.nodes_by_team()[spec.team][Phase.ROLLOUT]
        more = spec.phases[Phase.ROLLOUT].nodes - self._state.specs[spec.name].phases[Phase.ROLLOUT].nodes
        return used + more > quota

    def _start_anew(self, job: str) -> None:
        """On a Ray cluster a new attempt continues the job, as its processes are on its nodes."""
        record = self._state.jobs[job]
        if not self._state.is_beside:
            record.is_leaving = True
            self._state.order(Stop(job=job, attempt=record.attempt, forget=True))


def _with_job(content: Mapping[str, Any], job: Job, before: RunSpec) -> dict[str, Any]:
    """Returns the job's file for this number of rollout nodes. ``before``: its file until now."""
    phases = dict(content["phases"])
    rollout = {
        "nodes": job.num_rollout_nodes,
        "seconds": job.rollout_s,
        "memory_gb": job.rollout_bytes / 1e9,
    }
    phases[Phase.ROLLOUT] = {**phases[Phase.ROLLOUT], **rollout}
    borrow = {**content["borrow"], "asked_nodes": before.asked_nodes}
    ranks = {"num_ranks": before.ranks_on(job.num_rollout_nodes)}
    return {**content, "phases": phases, "slo": job.slo, "borrow": borrow, **ranks}
