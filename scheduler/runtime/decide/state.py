"""The scheduler's state: jobs, groups, permits, and the changes and answers since the last commit.

A state restored from the rows of all commits equals the one that wrote them. Pure: takes ``now``; decides
nothing and does no I/O.
"""

import bisect
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from rose.config import parse_config
from rose.errors import ConfigError
from rose.scheduler.cluster.model import POOL_PHASES, Group, Member
from rose.scheduler.cluster.residents import Resident
from rose.scheduler.group.certificate import Certificate, certify
from rose.scheduler.runtime.channel.messages import Answer, Message, Start, Stop, encode
from rose.scheduler.runtime.channel.protocol import Batch, Outgoing
from rose.scheduler.runtime.decide.group_permits import GroupPermits
from rose.scheduler.runtime.decide.holds import OrderRow, PermitsRow
from rose.scheduler.runtime.decide.hosts import Host, Hosts
from rose.scheduler.runtime.decide.meter import Meter
from rose.scheduler.runtime.decide.placing import Groups
from rose.scheduler.runtime.decide.records import JobRecord, JobState, NextPlace
from rose.scheduler.runtime.job.spec import RunSpec, ServeSpec


class State:
    """All jobs of one cluster."""

    def __init__(self, cluster: ServeSpec, rows: Mapping[str, bytes], now: float, clock: str) -> None:
        """``rows``: what earlier schedulers committed. ``clock``: names the clock of every ``now``."""
        self.cluster = cluster
        self.clock = clock
        self.groups = Groups(cluster)
        self.permits: dict[str, GroupPermits] = {}
        self.jobs: dict[str, JobRecord] = {}
        self.specs: dict[str, RunSpec] = {}
        self.queue: list[str] = []
        """Queued jobs in the order in which they are tried: by priority, then as they were submitted."""
        self.num_submitted = 0
        self.has_new_room = True
        """Something has changed since the queue was last tried that may let a queued job in."""
        self.has_come_or_gone = False
        """A job has been placed or is over since the policy was last asked for moves."""
        self.drained: dict[str, list[str]] = {}
        self._nodes: dict[str, tuple[int, int]] = {}
        """For each group, its rollout and training nodes; kept when the group is gone."""
        self.hosts = Hosts()
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
                records[name] = JobRecord.from_row(row)
            elif kind == "nodes":
                self._nodes[name] = msgspec.json.decode(row, type=tuple[int, int])
            elif kind == "drained":
                self.drained[name] = msgspec.json.decode(row, type=list[str])
            elif kind == "past":
                self.past[name] = msgspec.json.decode(row, type=list[list[int]])
            elif kind == "host":
                self.hosts.by_name[name] = msgspec.json.decode(row, type=Host)
            elif kind == "homes":
                self.hosts.homes = msgspec.json.decode(row, type=dict[str, dict[str, str]])
        for name, record in sorted(records.items(), key=lambda each: each[1].number):
            record.adopted(now, self.clock)
            self._adopt(name, record)
        self.settle()
        for group in list(self.groups.by_name.values()):
            permits = self.permits_in(group.name)
            if f"group:{group.name}" in rows:
                order = msgspec.json.decode(rows[f"order:{group.name}"], type=OrderRow)
                permits.restore(order, msgspec.json.decode(rows[f"group:{group.name}"], type=PermitsRow), now)
            for member in group.members:
                record = self.jobs[member.job.name]
                if record.waiting is not None and record.group == group.name:
                    permits.ask(member.job.name, record.waiting.phase, record.waiting.iteration)

    def _adopt(self, name: str, record: JobRecord) -> None:
        """Takes over a job of an earlier scheduler, where it was placed."""
        spec = parse_config(record.spec, RunSpec, f"job {name} of the channel")
        self.jobs[name], self.specs[name] = record, spec
        self.num_submitted = max(self.num_submitted, record.number)
        if record.state is JobState.QUEUED:
            bisect.insort(self.queue, name, key=self._turn)
        if not record.state.is_placed:
            return
        self._join(name, record.group, record.rollout_nodes)
        if record.next_place is not None:
            self.groups.leaving[name] = record.group
            self._join(name, record.next_place.group, record.next_place.rollout_nodes)

    def _join(self, name: str, to_group: str, rollout_nodes: tuple[int, ...]) -> None:
        job = self.specs[name].to_job(self.cluster.pools.to_pools())
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
        record = self.jobs[job]
        if record.state is JobState.QUEUED:
            self.queue.remove(job)
        record.state = state
        if state is JobState.QUEUED:
            bisect.insort(self.queue, job, key=self._turn)
        self.changed(job)

    def _turn(self, job: str) -> tuple[int, int]:
        return -self.specs[job].priority, self.jobs[job].number

    def changed_group(self, group: str) -> None:
        """The group's permits are part of the next batch."""
        self._dirty_groups.add(group)

    def keep(self, key: str, row: bytes) -> None:
        """Adds a row that belongs to neither to the next batch."""
        self._batch.rows[key] = row

    def forget_past(self, job: str) -> None:
        """Forgets the response lengths of an earlier job of this name."""
        if self.past.pop(job, None) is not None:
            self._batch.rows[f"past:{job}"] = None

    def settle(self) -> None:
        """Gives hosts to the nodes that groups use, and takes them from all others."""
        if self.hosts.settle(self.groups.by_name):
            self.keep("homes:", msgspec.json.encode(self.hosts.homes))
        self.groups.offered = {kind: self.hosts.total(kind) for kind in POOL_PHASES}

    def hosts_of(self, group: str, rollout_nodes: tuple[int, ...]) -> list[str] | None:
        """Returns the hosts of a member's nodes, its process's first; None if a node has no host."""
        return self.hosts.of_job(group, rollout_nodes, self.groups.by_name[group].num_train_nodes)

    def certify(self, group: Group) -> Certificate:
        """Certifies the order in which the members would follow each other. Raises: CertificateError."""
        return certify(group, self.permits_in(group.name).order_for(group))

    def reserve(self, job: str, group: Group, certificate: Certificate, why: str, now: float) -> None:
        """Reserves a running job's next place in ``group``, which already has the job as a member."""
        record = self.jobs[job]
        [member] = [each for each in group.members if each.job.name == job]
        record.next_place = NextPlace(group=group.name, rollout_nodes=member.rollout_nodes, why=why)
        self.groups.leaving[job] = record.group
        self.form(group, certificate, now)
        self.changed(job)

    def form(self, group: Group, certificate: Certificate, now: float) -> None:
        """Puts the group into effect: its members, in the certified order."""
        self.groups.put(group)
        nodes = (group.num_rollout_nodes, group.num_train_nodes)
        self._nodes[group.name] = nodes
        self._batch.rows[f"nodes:{group.name}"] = msgspec.json.encode(nodes)
        self.settle()
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
        self._dirty, self._dirty_groups = set(), set()
        return batch

    def permits_of(self, job: str) -> GroupPermits:
        """Returns the permits of the job's group."""
        return self.permits_in(self.jobs[job].group)

    def permits_in(self, group: str) -> GroupPermits:
        """Returns a group's permits."""
        return self.permits.setdefault(group, GroupPermits(self.cluster.lease_s, self.clock))

    def residents(self, now: float) -> dict[str, Resident]:
        """Returns the running jobs as policies see them. A job that named its group is not moved."""
        pools, found = self.cluster.pools.to_pools(), {}
        for name, record in self.jobs.items():
            if record.state.is_placed:
                spec = self.specs[name]
                found[name] = record.resident(
                    spec.to_job(pools),
                    may_move=spec.group is None,
                    pause_s=self.cluster.move_pause_s,
                    now=now,
                )
        return found

    # Answers ------------------------------------------------------------------------------------------------

    def describe_group(self, name: str) -> dict[str, Any]:
        group = self.groups.by_name[name]
        return {
            "num_rollout_nodes": group.num_rollout_nodes,
            "num_train_nodes": group.num_train_nodes,
            "jobs": {each.job.name: list(each.rollout_nodes) for each in group.members},
            "holders": {each.job: each.phase for each in self.permits_in(name).holds.values()},
            "drained": self.drained.get(name, []),
        }

    def describe(self, name: str) -> dict[str, Any]:
        record, spec = self.jobs[name], self.specs[name]
        permits = self.permits_of(name) if record.state.is_placed else None
        hold = permits.holds.get(name) if permits is not None else None
        progress = self.progress.get(name)
        return {
            "name": name,
            "state": record.state,
            "is_over": record.state.is_over,
            "host": record.host,
            "log": f"{self._log_folder(record.host)}/{name}.log",
            "group": record.group,
            "rollout_nodes": list(record.rollout_nodes),
            "why": record.why,
            "iterations": [record.num_done, spec.iterations],
            "attempt": record.attempt,
            "restarts": record.num_restarts,
            "holds": hold.phase if hold is not None else None,
            "waits_for": record.waiting.phase if record.waiting is not None else None,
            "behind": permits.holders_before(name) if permits is not None else [],
            "priority": spec.priority,
            "ahead": self.queue.index(name) if record.state is JobState.QUEUED else None,
            "num_overtaken": record.num_overtaken,
            "progress": list(progress) if progress is not None else None,
            "moving_to": record.next_place.group if record.next_place is not None else None,
            "moves": [
                {
                    "from": {"group": each.from_group, "rollout_nodes": list(each.from_nodes)},
                    "to": {"group": each.to_group, "rollout_nodes": list(each.to_nodes)},
                    "why": each.why,
                    "iteration": each.iteration,
                    "is_warm": each.is_warm,
                    "pause_s": each.pause_s,
                }
                for each in record.moves
            ],
            "note": record.note,
        }

    def _log_folder(self, host: str | None) -> str:
        return self.hosts.by_name[host].log_folder if host is not None else ""

    def unknown(self, job: str) -> str:
        return f"no job {job!r}; the jobs are: {', '.join(self.jobs) or 'none'}"

    def answer(
        self, client: str, seq: int, error: str | None = None, body: dict[str, Any] | None = None
    ) -> None:
        self.send(client, Answer(seq=seq, error=error, body=body if body is not None else {}))

    def order(self, order: Start | Stop) -> None:
        """Sends an order to the runner that has the job's process."""
        host = self.jobs[order.job].host
        if host is not None:
            self.send(self.hosts.by_name[host].client, order)

    def send(self, client: str, message: Message) -> None:
        self._batch.outgoing.append(Outgoing(client=client, body=encode(message)))

    def event(self, event: str, job: str, **more: Any) -> None:
        self.meter.events[event] += 1
        # The wall clock is for people: nothing is decided by it.
        self._batch.events.append(
            msgspec.json.encode({"event": event, "job": job, "at": time.time(), **more})
        )
