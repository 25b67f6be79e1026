"""The scheduler's state: jobs, groups, permits, and the changes and answers since the last commit.

A state restored from the rows of all commits equals the one that wrote them. Pure: takes ``now``; decides
nothing and does no I/O.
"""

import bisect
import itertools
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from rose.config import parse_config
from rose.errors import ConfigError
from rose.scheduler.cluster.choice import MULTI_RATE
from rose.scheduler.cluster.residents import Resident
from rose.scheduler.group.certificate import Certificate, certify, limit_s
from rose.scheduler.group.model import Group, Job, Member, Phase
from rose.scheduler.group.order import in_order_of
from rose.scheduler.group.search import ordered
from rose.scheduler.runtime.channel.messages import Answer, Message, Start, Stop, encode
from rose.scheduler.runtime.channel.protocol import Batch, Outgoing
from rose.scheduler.runtime.decide.group_permits import GroupPermits, OrderRow, PermitsRow
from rose.scheduler.runtime.decide.meter import Meter
from rose.scheduler.runtime.decide.placing import Groups
from rose.scheduler.runtime.decide.records import JobRecord, JobState, NextPlace, RunnerRow
from rose.scheduler.runtime.job.spec import RunSpec, ServeSpec
from rose.scheduler.runtime.lending.loans import Loan, Loans

Row = TypeVar("Row")
NUM_ENDED = 50
"""The ended jobs that are shown without being asked for by name. A scheduler remembers all of them."""


class State:
    """All jobs of one cluster."""

    def __init__(
        self, cluster: ServeSpec, rows: Mapping[str, bytes], now: float, clock: str, loans: Loans
    ) -> None:
        """``rows``: what earlier schedulers committed. ``clock``: names the clock of every ``now``."""
        self.cluster = cluster
        self.loans = loans
        self.clock = clock
        self.groups = Groups(cluster, self.resident)
        self.permits: dict[str, GroupPermits] = {}
        self.jobs: dict[str, JobRecord] = {}
        self.specs: dict[str, RunSpec] = {}
        """Specs of jobs that are not over, and of those that this scheduler has seen end."""
        self.models: dict[str, Job] = {}
        """The same jobs as policies know them."""
        self.live: dict[str, None] = {}
        """The jobs that are not over, as they were submitted."""
        self.ended: dict[str, None] = {}
        """The jobs that are over, in that order."""
        self.num_in_state = Counter[JobState]()
        self.touched: set[str] = set()
        """Groups whose permits have changed since the scheduler last looked when they are due."""
        self.queue: list[str] = []
        """Queued jobs in the order in which they are tried: that of their `turn`."""
        self.use_of_share: dict[str, float] = {}
        """For each team, the dollars an hour of the nodes that it uses, over its share."""
        self.takeovers: dict[str, tuple[str, ...]] = {}
        """For queued jobs, the running jobs whose places they take. They come first of their priority.

        Empty: all of these have left, and the queued job has not been tried since.
        """
        self.would_fit: dict[str, bool] = {}
        """Whether a queued job would have a place if no job ran; cleared when nodes or drains change."""
        self.num_submitted = 0
        self.has_new_room = True
        """Something has changed since the queue was last tried that may let a queued job in."""
        self.has_come_or_gone = False
        """A job has been placed or is over since the policy was last asked for moves."""
        self._nodes: dict[str, tuple[int, int]] = {}
        """For each group, its rollout and training nodes; kept when the group is gone."""
        self.runner: RunnerRow | None = None
        """None until one has been heard."""
        self.runner_waits_for: str | None = "its runner" if cluster.ray is not None else None
        """Why no job can start on Ray yet; None: jobs can start."""
        self.hung_s: dict[str, float] = {}
        """For each job with ranks that are in no phase and wait for none, when these have hung."""
        self.strays: dict[str, int] = {}
        """Attempts of jobs that this scheduler did not know when a runner named them."""
        self.meter = Meter(now)
        self.progress: dict[str, tuple[int, int]] = {}
        self.past: dict[str, list[list[int]]] = {}
        """For each job, the response lengths of its last rollouts."""
        self._batch = Batch()
        self._dirty: set[str] = set()
        self._dirty_groups: set[str] = set()
        self._restore(rows, now)

    # Restart ------------------------------------------------------------------------------------------------

    def _restore(self, rows: Mapping[str, bytes], now: float) -> None:
        records = {}
        for key, row in rows.items():
            kind, _, name = key.partition(":")
            if kind == "job":
                records[name] = _decoded(key, row, JobRecord)
            elif kind == "nodes":
                self._nodes[name] = _decoded(key, row, tuple[int, int])
            elif kind == "drained":
                self.groups.drain(name, _decoded(key, row, list[str]))
            elif kind == "past":
                self.past[name] = _decoded(key, row, list[list[int]])
            elif kind == "runner":
                self.runner = _decoded(key, row, RunnerRow)
            elif kind == "loan":
                self.loans.restore(name, _decoded(key, row, Loan))
        for name, record in sorted(records.items(), key=lambda each: each[1].number):
            record.adopted(now, self.clock)
            self._adopt(name, record)
            if record.gives_way is not None:
                self.takeovers[record.gives_way.to] = (*self.takeovers.get(record.gives_way.to, ()), name)
        self.queue.sort(key=self.turn)
        if self.runner is not None:
            self.groups.offered = self.runner.num_nodes or {}
        self.groups.drained = {k: v for k, v in self.groups.drained.items() if k in self.groups.by_name}
        self.groups.refresh(now)
        for group in list(self.groups.by_name.values()):
            permits = self.permits_in(group.name)
            if (key := f"group:{group.name}") in rows:
                order = _decoded(f"order:{group.name}", rows[f"order:{group.name}"], OrderRow)
                permits.restore(order, _decoded(key, rows[key], PermitsRow), now)
                self.groups.put(in_order_of(group, order.group))
            for member in group.members:
                record, num_ranks = self.jobs[member.job.name], self.jobs[member.job.name].num_ranks
                asked = record.waiting if record.group == group.name else None
                if asked is not None and asked.phase is not None and len(asked.callers) == num_ranks:
                    permits.ask(member.job.name, asked.phase, asked.iteration, num_ranks)
            self.touched.add(group.name)

    def _adopt(self, name: str, record: JobRecord) -> None:
        """Takes over a job of an earlier scheduler, where it was placed."""
        self.jobs[name] = record
        self.num_submitted = max(self.num_submitted, record.number)
        if record.state.is_over:  # there may be many, and few are asked for
            self._enter(name)
            return
        self.learn(name, self.spec_of(name))
        self._enter(name)
        if not record.state.is_placed:
            return
        self._join(name, record.group, record.rollout_nodes)
        if record.next_place is not None:
            self.groups.leave(name, record.group)
            self._join(name, record.next_place.group, record.next_place.rollout_nodes)

    def _join(self, name: str, to_group: str, rollout_nodes: tuple[int, ...]) -> None:
        job = self.models[name]
        num_rollout_nodes, num_train_nodes = self._nodes[to_group]
        group = self.groups.by_name.get(to_group) or Group(
            name=to_group, num_rollout_nodes=num_rollout_nodes, num_train_nodes=num_train_nodes
        )
        if (group.num_rollout_nodes, group.num_train_nodes) != (num_rollout_nodes, num_train_nodes):
            raise ConfigError(
                f"job {name} runs in group {group.name} of {num_rollout_nodes} rollout and {num_train_nodes} "
                f"training nodes, the cluster's file says {group.num_rollout_nodes} and "
                f"{group.num_train_nodes}; change that when the job is over"
            )
        member = Member(job=job, rollout_nodes=rollout_nodes)
        self.groups.put(replace(group, members=(*group.members, member)))

    # Changes ------------------------------------------------------------------------------------------------

    def changed(self, job: str) -> None:
        """The job's record is part of the next batch."""
        self._dirty.add(job)

    def become(self, job: str, state: JobState) -> None:
        """Changes a job's state, and keeps the queue in order."""
        self._leave(job)
        self.jobs[job].state = state
        self._enter(job)
        self.changed(job)

    def add(self, record: JobRecord, spec: RunSpec) -> None:
        """A job is submitted. One of this name that is over is forgotten, but for its attempts' numbers.

        What such an attempt has left, or says late, is never taken for the new job's.
        """
        record.attempt = self.strays.pop(spec.name, 0)
        if spec.name in self.jobs:
            record.attempt = max(record.attempt, self.jobs[spec.name].attempt)
            self._leave(spec.name)
        self.num_submitted += 1
        record.number = self.num_submitted
        self.jobs[spec.name] = record
        self.learn(spec.name, spec)
        self.would_fit.pop(spec.name, None)
        self._enter(spec.name)
        self.meter.forget(spec.name)
        self.forget_past(spec.name)
        self.changed(spec.name)

    def nodes_by_team(self) -> dict[str, Counter[Phase]]:
        """Returns the nodes of the placed jobs of each team; under "", those of jobs without one."""
        used = {team: Counter[Phase]() for team in ("", *self.cluster.teams)}
        for name in (each for each in self.live if self.jobs[each].state.is_placed):
            team, phases = self.cluster.team_of(self.specs[name]), self.specs[name].phases
            used[team].update({phase: phases[phase].nodes for phase in Phase})
        return used

    def learn(self, job: str, spec: RunSpec) -> None:
        """Replaces the job's file by this one."""
        self.specs[job], self.models[job] = spec, spec.to_job(self.cluster.to_pools())

    def take_places(self, job: str, victims: tuple[str, ...] | None) -> None:
        """A queued job takes the places of these running jobs. None: it no longer takes any."""
        if victims is not None:
            self.takeovers[job] = victims
        else:
            self.takeovers.pop(job, None)
        self.queue.sort(key=self.turn)

    def spec_of(self, job: str) -> RunSpec:
        """Returns the job's file, also for a job that ended long ago."""
        return self.specs.get(job) or parse_config(self.jobs[job].spec, RunSpec, f"job {job}")

    def _enter(self, job: str) -> None:
        state = self.jobs[job].state
        self.num_in_state[state] += 1
        if state.is_over:
            self.live.pop(job, None)
            self.ended[job] = None
        else:
            self.live.setdefault(job)
        if state is JobState.QUEUED:
            bisect.insort(self.queue, job, key=self.turn)

    def _leave(self, job: str) -> None:
        state = self.jobs[job].state
        self.num_in_state[state] -= 1
        if state.is_over:
            del self.ended[job]
        if state is JobState.QUEUED:
            self.queue.remove(job)

    def turn(self, job: str) -> tuple[int, bool, float, int]:
        """Returns what the queue is sorted by."""
        record, spec = self.jobs[job], self.specs[job]
        is_next = record.is_next or job in self.takeovers
        use = 0.0 if is_next else self.use_of_share.get(self.cluster.team_of(spec), 0.0)
        return -spec.priority, not is_next, use, record.number

    def changed_group(self, group: str) -> None:
        """The group's permits are part of the next batch."""
        self._dirty_groups.add(group)
        self.touched.add(group)

    def keep(self, key: str, row: bytes | None) -> None:
        """Adds a row that is no job's and no group's to the next batch."""
        self._batch.rows[key] = row

    def forget_past(self, job: str) -> None:
        """Forgets the response lengths of an earlier job of this name."""
        if self.past.pop(job, None) is not None:
            self._batch.rows[f"past:{job}"] = None

    def set_runner(self, runner: RunnerRow, num_nodes: dict[Phase, int] | None) -> None:
        """This runner has the jobs' processes from now on, and this many nodes; None: unlimited."""
        most = self.runner.most_nodes if self.runner is not None else None
        self.runner = runner.with_nodes(num_nodes, most)
        self.keep("runner:", msgspec.json.encode(self.runner))
        self.groups.offered = self.runner.num_nodes or {}
        self.would_fit.clear()
        self.has_new_room = True

    @property
    def is_beside(self) -> bool:
        """Whether jobs run on the scheduler's own machine: their processes end with their runner."""
        return self.runner is not None and self.runner.num_nodes is None

    def remove(self, job: str, group: str) -> Group:
        """Removes a job from a group, and frees the nodes that only it used."""
        was_drained = group in self.groups.drained
        rest = self.groups.remove(job, group)
        if was_drained:
            self.would_fit.clear()
            if group not in self.groups.drained:
                self.keep(f"drained:{group}", None)
        self.has_new_room = self.loans.is_due = True
        return rest

    def certify(self, group: Group, now: float) -> Certificate:
        """Certifies the order in which the members would follow each other. Raises: CertificateError."""
        return certify(group, self.permits_in(group.name).order_for(group), self._limits_s(group, now))

    def ordered(self, group: Group, now: float) -> Group:
        """Returns the group in an order that keeps all limits, as policies find it; else as it is."""
        limits_s = self._limits_s(group, now)
        return ordered(group, limits_s, multi_rate=self.cluster.policy == MULTI_RATE) or group

    def _limits_s(self, group: Group, now: float) -> dict[str, float]:
        """The policies' limits, with the members' times: what is left of each SLO.

        A job that is about to leave ends its iteration as promised, whatever is left of its SLO.
        """
        limits_s = {member.job.name: limit_s(member.job) for member in group.members}
        for job in (member.job for member in group.members):
            record = self.jobs.get(job.name)  # may be that of an earlier job of this name, which is over
            if self.groups.leaving.get(job.name) == group.name:
                promised_s = self.permits_in(group.name).limits_s().get(job.name, 0.0)
                limits_s[job.name] = max(limits_s[job.name], promised_s)
            elif record is not None and (record.state.is_placed or record.is_resumed):
                work_s = job.solo_s * max(0, job.num_iterations - record.num_done)
                resident = replace(self.resident(job.name, now), job=job, work_s=work_s)
                limits_s[job.name] = resident.limit_s
        return limits_s

    def reserve(self, job: str, group: Group, certificate: Certificate, why: str, now: float) -> None:
        """Reserves a running job's next place in ``group``, which already has the job as a member."""
        record = self.jobs[job]
        [member] = [each for each in group.members if each.job.name == job]
        record.next_place = NextPlace(group=group.name, rollout_nodes=member.rollout_nodes, why=why)
        self.groups.leave(job, record.group)
        self.form(group, certificate, now)
        self.changed(job)

    def form(self, group: Group, certificate: Certificate, now: float) -> None:
        """Puts the group into effect: its members, in the certified order."""
        group = replace(group, pass_s=certificate.cycle_s)
        self.groups.put(group)
        self.loans.is_due = True
        nodes = self._nodes[group.name] = (group.num_rollout_nodes, group.num_train_nodes)
        self._batch.rows[f"nodes:{group.name}"] = msgspec.json.encode(nodes)
        self.permits_in(group.name).form(group, certificate, now)
        self._batch.rows[f"order:{group.name}"] = msgspec.json.encode(self.permits[group.name].rows()[0])
        self.changed_group(group.name)

    def take_batch(self) -> Batch:
        """Returns the changes and answers since the last call."""
        batch, self._batch = self._batch, Batch()
        for name in self._dirty:
            batch.rows[f"job:{name}"] = self.jobs[name].to_row()
        for group in self._dirty_groups:
            batch.rows[f"group:{group}"] = msgspec.json.encode(self.permits[group].rows()[1])
        batch.rows |= self.loans.take_rows()
        self._dirty, self._dirty_groups = set(), set()
        return batch

    def permits_of(self, job: str) -> GroupPermits:
        """Returns the permits of the job's group."""
        return self.permits_in(self.jobs[job].group)

    def permits_in(self, group: str) -> GroupPermits:
        """Returns a group's permits."""
        return self.permits.setdefault(group, GroupPermits(self.cluster.lease_s, self.clock))

    def resident(self, name: str, now: float) -> Resident:
        """Returns a running job as policies see it. A job that named its group is not moved."""
        may_move, pause_s = self.specs[name].group is None, self.cluster.move_pause_s
        return self.jobs[name].resident(self.models[name], may_move=may_move, pause_s=pause_s, now=now)

    # Answers ------------------------------------------------------------------------------------------------

    def shown(self) -> list[str]:
        """Names the jobs that are not over and the last of those that are, in the order of submission."""
        names = [*self.live, *itertools.islice(reversed(self.ended), NUM_ENDED)]
        return sorted(names, key=lambda name: self.jobs[name].number)

    def unknown(self, job: str) -> str:
        return f"no job {job!r}; the jobs are: {', '.join(self.shown()) or 'none'}"

    def answer(
        self, client: str, seq: int, error: str | None = None, body: dict[str, Any] | None = None
    ) -> None:
        self.send(client, Answer(seq=seq, error=error, body=body if body is not None else {}))

    def order(self, order: Start | Stop) -> None:
        """Sends an order to the runner that has the job's process."""
        if self.runner is not None and self.jobs[order.job].host is not None:
            self.send(self.runner.client, order)

    def send(self, client: str, message: Message) -> None:
        self._batch.outgoing.append(Outgoing(client=client, body=encode(message)))

    def event(self, event: str, job: str, **more: Any) -> None:
        self.meter.events[event] += 1
        # The wall clock is for people: nothing is decided by it.
        self._batch.events.append(
            msgspec.json.encode({"event": event, "job": job, "at": time.time(), **more})
        )


def _decoded(key: str, row: bytes, kind: type[Row]) -> Row:
    """Decodes a row of an earlier scheduler. Raises: ConfigError."""
    try:
        return msgspec.json.decode(row, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"the channel has a row {key!r} that another version of ROSE has written ({error}); let that "
            "version end its jobs, or serve an empty channel"
        ) from error
