"""The scheduler's decisions: which call changes what, and what is answered.

Owns: all jobs and the groups' permits, as one state machine. Promises: what a call changes is in the same
batch as its answers, so a scheduler that ends anywhere loses nothing that it has answered; a call that
arrives twice changes nothing the second time. Pure: takes ``now``, the scheduler's monotonic clock. Never:
does I/O.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from rose.config import parse_config
from rose.errors import ConfigError, JobRefused, PlacementError
from rose.scheduler.cluster.model import Group, Member
from rose.scheduler.group.certificate import Certificate, CertificateError, certify
from rose.scheduler.group.order import round_robin
from rose.scheduler.runtime.channel import Batch, Outgoing
from rose.scheduler.runtime.messages import (
    AnyCall,
    Cancel,
    Completed,
    Drain,
    Exited,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Release,
    Reply,
    Report,
    Request,
    Start,
    Status,
    Stop,
    Submit,
    encode,
)
from rose.scheduler.runtime.placing import Groups, Placed
from rose.scheduler.runtime.records import JobRecord, JobState
from rose.scheduler.runtime.spec import RunSpec, ServeSpec
from rose.scheduler.runtime.turns import Ask, Hold, Turns

logger = logging.getLogger(__name__)

AWAY_S = 2.0
"""Between two ticks, which come four times a second."""


class Control:
    """All jobs of one cluster."""

    def __init__(self, cluster: ServeSpec, rows: Mapping[str, bytes], now: float, pid: int) -> None:
        """rows: what an earlier scheduler has committed. pid: of the scheduler's process."""
        self._pid = pid
        self._ticked_s = now
        self._cluster = cluster
        self._groups = Groups(cluster)
        self._turns: dict[str, Turns] = {}
        self._jobs: dict[str, JobRecord] = {}
        self._specs: dict[str, RunSpec] = {}
        self._drained: dict[str, list[str]] = {}
        self._nodes: dict[str, dict[str, int]] = {}
        """Of each group, by the fields of Group; kept when it is gone."""
        self._runner: str | None = None
        self._log_folder = ""
        self._progress: dict[str, tuple[int, int]] = {}
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
                self._nodes[name] = msgspec.json.decode(row, type=dict[str, int])
            elif kind == "drained":
                self._drained[name] = msgspec.json.decode(row, type=list[str])
            elif kind == "runner":
                self._runner, self._log_folder = msgspec.json.decode(row, type=tuple[str, str])
        for name, record in sorted(records.items(), key=lambda each: each[1].number):
            self._adopt(name, record)
        for group in list(self._groups.by_name.values()):
            turns = self._turns_in(group.name)
            if f"group:{group.name}" in rows:
                turns.restore(msgspec.json.decode(rows[f"group:{group.name}"]), now)
            for member in group.members:
                waiting = self._jobs[member.job.name].waiting
                if waiting is not None:
                    turns.ask(_ask(member.job.name, waiting))
            if group.members:
                turns.form(group, now)

    def _adopt(self, name: str, record: JobRecord) -> None:
        """A job of an earlier scheduler, where it was placed."""
        spec = parse_config(record.spec, RunSpec, f"job {name} of the channel")
        self._jobs[name], self._specs[name] = record, spec
        if record.state.is_over:
            return
        member = Member(job=spec.to_job(self._cluster.pools.to_pools()), rollout_nodes=record.rollout_nodes)
        nodes = self._nodes[record.group]
        group = self._groups.by_name.get(record.group) or Group(name=record.group, **nodes)
        if (group.num_rollout_nodes, group.num_train_nodes) != tuple(nodes.values()):
            raise ConfigError(
                f"job {name} runs in group {record.group} of {nodes}, the cluster's file says "
                f"{group.num_rollout_nodes} and {group.num_train_nodes}; change that when the job is over"
            )
        self._groups.put(replace(group, members=(*group.members, member)))

    # The loop's side ----------------------------------------------------------------------------------------

    def handle(self, client: str, call: AnyCall, now: float) -> None:
        """One call."""
        match call:
            case Request():
                self._request(client, call, now)
            case Heartbeat():
                self._heartbeat(client, call, now)
            case Release():
                self._release(client, call, now)
            case Completed():
                self._completed(client, call)
            case Report():
                self._progress[call.job] = (call.num_done, call.num_total)
                self._reply(client, call.seq)
            case Submit():
                self._submit(client, call, now)
            case Status():
                self._status(client, call)
            case Cancel():
                self._cancel(client, call, now)
            case Drain():
                self._drain(client, call)
            case Hello():
                self._hello(client, call, now)
            case Exited():
                self._exited(client, call, now)

    def tick(self, now: float) -> None:
        """Leases that ran out: the process is ended first; when it has, or a lease later, its nodes go on."""
        was_away = now - self._ticked_s > AWAY_S
        self._ticked_s = now
        for group, turns in self._turns.items():
            if was_away:  # the channel was gone, or this process stood still: heartbeats may be on their way
                turns.renew(now)
            for hold in turns.expired(now):
                if hold.is_stopping:  # and no runner has answered for a whole lease: it is gone as well
                    self._start_again(hold.job, "lease ran out, and the runner is gone", now)
                    continue
                hold.is_stopping = True
                hold.expires_s = now + turns.lease_s
                self._event("expired", hold.job, phase=hold.phase, epoch=hold.epoch)
                self._order(Stop(job=hold.job, attempt=self._jobs[hold.job].attempt, is_lost=True))
                logger.warning("lease ran out job=%s phase=%s group=%s", hold.job, hold.phase, group)
            self._grant(group, now)  # the order waits only so long for a job that is between two phases

    def take_batch(self) -> Batch:
        """What has changed since the last call."""
        batch, self._batch = self._batch, Batch()
        for name in self._dirty:
            batch.rows[f"job:{name}"] = self._jobs[name].to_row()
        for group in self._dirty_groups:
            batch.rows[f"group:{group}"] = msgspec.json.encode(self._turns[group].to_json())
        self._dirty, self._dirty_groups = set(), set()
        return batch

    # Permits ------------------------------------------------------------------------------------------------

    def _request(self, client: str, call: Request, now: float) -> None:
        refusal = self._why_not(call.job, call.attempt)
        if refusal is None and call.phase not in ("rollout", "train"):
            refusal = f"phase {call.phase!r} needs no permit"
        if refusal is not None:
            self._reply(client, call.seq, refusal)
            return
        turns, record = self._turns_of(call.job), self._jobs[call.job]
        hold = turns.holds.get(call.job)
        if hold is not None and (hold.phase, hold.iteration) != (call.phase, call.iteration):
            self._reply(client, call.seq, f"holds {hold.phase} of iteration {hold.iteration} still")
            return
        request = {"phase": call.phase, "iteration": call.iteration, "client": client, "seq": call.seq}
        if hold is not None:  # asked again, or queued by the phase before
            self._send_grant(hold, request)
            return
        record.waiting = request
        self._dirty.add(call.job)
        turns.ask(_ask(call.job, request))
        self._grant(self._jobs[call.job].group, now)

    def _grant(self, group: str, now: float) -> None:
        """Lets the phases begin that may."""
        for hold in self._turns[group].grant(now):
            record = self._jobs[hold.job]
            assert record.waiting is not None, hold
            self._send_grant(hold, record.waiting)
            record.waiting = None
            self._dirty.add(hold.job)
            self._dirty_groups.add(group)
            self._event("granted", hold.job, phase=hold.phase, iteration=hold.iteration, epoch=hold.epoch)

    def _send_grant(self, hold: Hold, request: Mapping[str, Any]) -> None:
        grant = Grant(
            seq=request["seq"],
            job=hold.job,
            attempt=self._jobs[hold.job].attempt,
            phase=hold.phase,
            iteration=hold.iteration,
            epoch=hold.epoch,
            lease_s=self._cluster.lease_s,
        )
        self._send(request["client"], grant)

    def _heartbeat(self, client: str, call: Heartbeat, now: float) -> None:
        refusal = self._why_not(call.job, call.attempt)
        if refusal is None and not self._turns_of(call.job).beat(call.job, call.epoch, now):
            refusal = _fenced(call.phase, call.epoch)
        self._reply(client, call.seq, refusal)

    def _release(self, client: str, call: Release, now: float) -> None:
        refusal = self._why_not(call.job, call.attempt)
        if refusal is not None:
            self._reply(client, call.seq, refusal)
            return
        turns, record = self._turns_of(call.job), self._jobs[call.job]
        if turns.release(call.job, call.epoch, now):
            record.released_epoch = call.epoch
            self._event("released", call.job, phase=call.phase, epoch=call.epoch)
            self._progress.pop(call.job, None)
            if call.next_phase is not None:
                record.waiting = {
                    "phase": call.next_phase,
                    "iteration": call.next_iteration,
                    "client": client,
                    "seq": 0,
                }
                turns.ask(_ask(call.job, record.waiting))
            self._dirty.add(call.job)
            self._dirty_groups.add(self._jobs[call.job].group)
            self._grant(self._jobs[call.job].group, now)
        elif record.released_epoch != call.epoch:
            refusal = _fenced(call.phase, call.epoch)
        self._reply(client, call.seq, refusal)

    def _completed(self, client: str, call: Completed) -> None:
        refusal = self._why_not(call.job, call.attempt)
        if refusal is None:
            record = self._jobs[call.job]
            record.num_done = max(record.num_done, call.iteration + 1)
            record.num_crashes = 0
            self._dirty.add(call.job)
            self._event("completed", call.job, iteration=call.iteration)
        self._reply(client, call.seq, refusal)

    def _why_not(self, job: str, attempt: int) -> str | None:
        record = self._jobs.get(job)
        if record is None:
            return f"no job {job!r}"
        if record.attempt != attempt:
            return f"attempt {attempt} was replaced by attempt {record.attempt}"
        return None if record.state is JobState.RUNNING else f"the job is {record.state}"

    def _turns_of(self, job: str) -> Turns:
        return self._turns_in(self._jobs[job].group)

    def _turns_in(self, group: str) -> Turns:
        return self._turns.setdefault(group, Turns(self._cluster.lease_s))

    # Jobs ---------------------------------------------------------------------------------------------------

    def _submit(self, client: str, call: Submit, now: float) -> None:
        caller = f"{client}#{call.seq}"
        name = call.spec.get("name")
        earlier = self._jobs.get(name) if isinstance(name, str) else None
        if earlier is not None and earlier.submitted_by == caller:
            self._reply(client, call.seq, body={"job": name, "state": earlier.state})
            return
        try:
            spec = parse_config(call.spec, RunSpec, "job")
            if earlier is not None and not earlier.state.is_over:
                raise JobRefused(f"{name}: a job of this name is {earlier.state}; choose another name")
            placed, certificate = self._place(spec, now)
        except (ConfigError, PlacementError, CertificateError) as error:
            self._reply(client, call.seq, str(error))
            return
        member = next(each for each in placed.group.members if each.job.name == spec.name)
        body = {
            "job": spec.name,
            "group": placed.group.name,
            "rollout_nodes": list(member.rollout_nodes),
            "why": placed.why,
            "iteration_s": certificate.bounds[spec.name].longest_s,
            "limit_s": certificate.bounds[spec.name].limit_s,
        }
        if call.dry_run:
            self._reply(client, call.seq, body={**body, "state": "would run"})
            return
        record = JobRecord(
            spec=call.spec,
            group=placed.group.name,
            rollout_nodes=member.rollout_nodes,
            why=placed.why,
            submitted_by=caller,
            number=max((each.number for each in self._jobs.values()), default=0) + 1,
        )
        self._jobs[spec.name], self._specs[spec.name] = record, spec
        self._form(placed.group, now)
        self._event("submitted", spec.name, group=placed.group.name)
        self._start(spec.name)
        self._reply(client, call.seq, body={**body, "state": record.state})

    def _place(self, spec: RunSpec, now: float) -> tuple[Placed, Certificate]:
        """A group whose order is certified, with what is held in it now held in turn."""
        placed = self._groups.place(spec, self._drained, now)
        order = self._turns_in(placed.group.name).order_for(placed.group)
        try:
            return placed, certify(placed.group, order)
        except CertificateError:
            if spec.group is not None:
                raise
            placed = self._groups.place_alone(spec, now)
            return placed, certify(placed.group, round_robin(placed.group))

    def _form(self, group: Group, now: float) -> None:
        self._groups.put(group)
        nodes = {"num_rollout_nodes": group.num_rollout_nodes, "num_train_nodes": group.num_train_nodes}
        self._nodes[group.name] = nodes
        self._batch.rows[f"nodes:{group.name}"] = msgspec.json.encode(nodes)
        self._turns_in(group.name).form(group, now)

    def _start(self, name: str) -> None:
        """A new attempt. Without a runner it waits for one's Hello."""
        self._dirty.add(name)
        if self._runner is None:
            return
        record = self._jobs[name]
        record.attempt += 1
        self._event("started", name, attempt=record.attempt, iteration=record.num_done)
        self._order(
            Start(job=name, attempt=record.attempt, spec=record.spec, first_iteration=record.num_done)
        )

    def _start_again(self, name: str, why: str, now: float) -> None:
        self._free(name, now)
        self._jobs[name].num_restarts += 1
        self._jobs[name].note = why
        self._start(name)

    def _free(self, name: str, now: float) -> None:
        """Nobody of this attempt runs: its nodes go to the next."""
        self._turns_of(name).drop(name, now)
        self._jobs[name].waiting = None
        self._progress.pop(name, None)
        self._dirty.add(name)
        self._dirty_groups.add(self._jobs[name].group)
        self._grant(self._jobs[name].group, now)

    def _hello(self, client: str, call: Hello, now: float) -> None:
        self._runner, self._log_folder = client, call.log_folder
        self._batch.rows["runner:"] = msgspec.json.encode((client, call.log_folder))
        self._reply(client, call.seq)
        for name, attempt in call.running.items():
            record = self._jobs.get(name)
            if record is None or record.attempt != attempt or record.state is not JobState.RUNNING:
                self._order(Stop(job=name, attempt=attempt))
        for name, record in self._jobs.items():
            if record.state.is_over or call.running.get(name) == record.attempt:
                continue
            if record.state is JobState.CANCELLING:
                self._end(name, JobState.CANCELLED, "", now)
            elif record.attempt == 0:
                self._start(name)
            else:
                self._start_again(name, "its runner was started again", now)

    def _exited(self, client: str, call: Exited, now: float) -> None:
        self._reply(client, call.seq)
        record = self._jobs.get(call.job)
        if record is None or record.attempt != call.attempt or record.state.is_over:
            return
        self._event("exited", call.job, attempt=call.attempt, exit_status=call.exit_status)
        num_iterations = self._specs[call.job].iterations
        how = f"attempt {call.attempt} ended with status {call.exit_status}"
        if record.state is JobState.CANCELLING:
            self._end(call.job, JobState.CANCELLED, "", now)
        elif call.exit_status == 0 and record.num_done >= num_iterations:
            self._end(call.job, JobState.DONE, "", now)
        elif call.exit_status == 0:
            note = f"{how} after {record.num_done} of {num_iterations} iterations"
            self._end(call.job, JobState.FAILED, note, now)
        elif record.num_crashes >= self._specs[call.job].max_restarts:
            note = f"{how}, the {record.num_crashes + 1}th crash in iteration {record.num_done}"
            self._end(call.job, JobState.FAILED, note, now)
        else:
            record.num_crashes += 1
            self._start_again(call.job, how, now)

    def _end(self, name: str, state: JobState, note: str, now: float) -> None:
        record = self._jobs[name]
        record.state, record.note = state, note
        self._free(name, now)
        self._groups.remove(name)
        self._event(state.value, name)
        self._order(Stop(job=name, attempt=record.attempt, forget=True))

    def _cancel(self, client: str, call: Cancel, now: float) -> None:
        record = self._jobs.get(call.job)
        if record is None:
            self._reply(client, call.seq, self._unknown(call.job))
            return
        if record.state is JobState.RUNNING:
            record.state = JobState.CANCELLING
            record.waiting = None
            self._dirty.add(call.job)
            self._order(Stop(job=call.job, attempt=record.attempt))
            if record.attempt == 0:
                self._end(call.job, JobState.CANCELLED, "", now)
        self._reply(client, call.seq, body={"job": call.job, "state": record.state})

    def _drain(self, client: str, call: Drain) -> None:
        group = self._groups.by_name.get(call.group)
        if group is None:
            known = ", ".join(self._groups.by_name) or "none"
            self._reply(client, call.seq, f"no group {call.group!r}; there are {known}")
            return
        nodes = ["train", *(f"rollout-{number}" for number in range(group.num_rollout_nodes))]
        if call.node not in nodes:
            self._reply(client, call.seq, f"no node {call.node!r} in group {call.group}: {', '.join(nodes)}")
            return
        drained = set(self._drained.get(call.group, []))
        drained = drained - {call.node} if call.undo else drained | {call.node}
        self._drained[call.group] = sorted(drained)
        self._batch.rows[f"drained:{call.group}"] = msgspec.json.encode(self._drained[call.group])
        users = [
            member.job.name
            for member in group.members
            if call.node == "train" or int(call.node.removeprefix("rollout-")) in member.rollout_nodes
        ]
        self._reply(client, call.seq, body={"drained": sorted(drained), "still_used_by": users})

    # Answers ------------------------------------------------------------------------------------------------

    def _status(self, client: str, call: Status) -> None:
        if call.job is not None and call.job not in self._jobs:
            self._reply(client, call.seq, self._unknown(call.job))
            return
        names = [call.job] if call.job is not None else sorted(self._jobs, key=lambda n: self._jobs[n].number)
        body: dict[str, Any] = {
            "jobs": [self._describe(name) for name in names],
            "scheduler_pid": self._pid,
        }
        if call.job is None:
            body["groups"] = {name: self._describe_group(name) for name in self._groups.by_name}
        self._reply(client, call.seq, body=body)

    def _describe_group(self, name: str) -> dict[str, Any]:
        group = self._groups.by_name[name]
        return {
            "num_rollout_nodes": group.num_rollout_nodes,
            "num_train_nodes": group.num_train_nodes,
            "jobs": {each.job.name: list(each.rollout_nodes) for each in group.members},
            "holders": {each.job: each.phase for each in self._turns_in(name).holds.values()},
            "drained": self._drained.get(name, []),
        }

    def _describe(self, name: str) -> dict[str, Any]:
        record, spec = self._jobs[name], self._specs[name]
        hold = self._turns_of(name).holds.get(name)
        progress = self._progress.get(name)
        return {
            "name": name,
            "state": record.state,
            "is_over": record.state.is_over,
            "log": f"{self._log_folder}/{name}.log",
            "group": record.group,
            "why": record.why,
            "iterations": [record.num_done, spec.iterations],
            "attempt": record.attempt,
            "restarts": record.num_restarts,
            "holds": hold.phase if hold is not None else None,
            "waits_for": record.waiting["phase"] if record.waiting is not None else None,
            "behind": self._turns_of(name).holders_before(name),
            "progress": list(progress) if progress is not None else None,
            "note": record.note,
        }

    def _unknown(self, job: str) -> str:
        return f"no job {job!r}; there are {', '.join(self._jobs) or 'none'}"

    def _reply(
        self, client: str, seq: int, error: str | None = None, body: dict[str, Any] | None = None
    ) -> None:
        self._send(client, Reply(seq=seq, error=error, body=body if body is not None else {}))

    def _order(self, order: Start | Stop) -> None:
        if self._runner is not None:
            self._send(self._runner, order)

    def _send(self, client: str, message: Message) -> None:
        self._batch.outgoing.append(Outgoing(client=client, body=encode(message)))

    def _event(self, event: str, job: str, **more: Any) -> None:
        # The wall clock is for people: nothing is decided by it.
        self._batch.events.append(
            msgspec.json.encode({"event": event, "job": job, "at": time.time(), **more})
        )


def _ask(job: str, request: Mapping[str, Any]) -> Ask:
    return Ask(job=job, phase=request["phase"], iteration=request["iteration"])


def _fenced(phase: str, epoch: int) -> str:
    return f"the permit of {phase} (epoch {epoch}) was taken back: its lease ran out"
