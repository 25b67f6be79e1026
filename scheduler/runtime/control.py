"""The scheduler's decisions: which call changes what, and what is answered.

Owns: all jobs and the groups' permits, as one state machine. Promises: what a call changes is in the same
batch as its answers, so a scheduler that ends anywhere loses nothing that it has answered; a call that
arrives twice changes nothing the second time. Pure: takes ``now``, the scheduler's monotonic clock. Never:
does I/O.
"""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from rose.config import parse_config
from rose.errors import ConfigError, JobRefused, PlacementError
from rose.scheduler.group.certificate import Certificate, CertificateError, certify
from rose.scheduler.runtime.channel import Batch
from rose.scheduler.runtime.messages import (
    AnyCall,
    Cancel,
    Completed,
    Drain,
    Exited,
    Heartbeat,
    Hello,
    History,
    Moved,
    Overview,
    Release,
    Report,
    Request,
    Start,
    Status,
    Stop,
    Submit,
)
from rose.scheduler.runtime.overview import overview
from rose.scheduler.runtime.permit_calls import PermitCalls
from rose.scheduler.runtime.placing import Placed
from rose.scheduler.runtime.records import JobRecord, JobState
from rose.scheduler.runtime.spec import RunSpec, ServeSpec
from rose.scheduler.runtime.state import State
from rose.scheduler.runtime.tail_calls import TailCalls

logger = logging.getLogger(__name__)

AWAY_S = 2.0
"""Between two ticks, which come four times a second."""


class Control:
    """All jobs of one cluster."""

    def __init__(
        self, cluster: ServeSpec, rows: Mapping[str, bytes], now: float, pid: int, clock: str
    ) -> None:
        """rows: what an earlier scheduler has committed. pid: of the scheduler's process.

        clock: names the one of all ``now``; on the same one it is known how long phases have been running.
        """
        self._cluster = cluster
        self._pid = pid
        self._ticked_s = now
        self._state = State(cluster, rows, now, clock)
        self._permits = PermitCalls(self._state, cluster.lease_s)
        self._tails = TailCalls(self._state, self._permits)

    # The loop's side ----------------------------------------------------------------------------------------

    def handle(self, client: str, call: AnyCall, now: float) -> None:
        """One call."""
        match call:
            case Request():
                self._permits.request(client, call, now)
            case Heartbeat():
                self._permits.heartbeat(client, call, now)
            case Release():
                self._permits.release(client, call, now)
            case Completed():
                self._permits.completed(client, call, now)
            case Report():
                self._tails.report(client, call, now)
            case Moved():
                self._tails.moved(client, call, now)
            case Submit():
                self._submit(client, call, now)
            case Status():
                self._status(client, call)
            case Overview():
                body = overview(self._state, self._pid, now)
                self._state.reply(client, call.seq, body=body)
            case Cancel():
                self._cancel(client, call, now)
            case Drain():
                self._drain(client, call)
            case Hello():
                self._hello(client, call, now)
            case Exited():
                self._exited(client, call, now)
            case History():
                raise ValueError("the history is the channel's, and no decision")

    def tick(self, now: float) -> None:
        """Leases that ran out: the process is ended first; when it has, or a lease later, its nodes go on."""
        was_away = now - self._ticked_s > AWAY_S
        self._ticked_s = now
        for group, turns in self._state.turns.items():
            if was_away:  # the channel was gone, or this process stood still: heartbeats may be on their way
                turns.renew(now)
            for hold in turns.expired(now):
                if hold.is_stopping:  # and no runner has answered for a whole lease: it is gone as well
                    self._start_again(hold.job, "lease ran out, and the runner is gone", now)
                    continue
                hold.is_stopping = True
                hold.expires_s = now + turns.lease_s
                self._state.event("expired", hold.job, phase=hold.phase, epoch=hold.epoch)
                self._state.order(
                    Stop(job=hold.job, attempt=self._state.jobs[hold.job].attempt, is_lost=True)
                )
                logger.warning("lease ran out job=%s phase=%s group=%s", hold.job, hold.phase, group)
            self._permits.grant(
                group, now
            )  # the order waits only so long for a job that is between two phases

    def decided(self, call: AnyCall, seconds: float) -> None:
        """How long `handle` took, for those who watch."""
        self._state.meter.decided(type(call).__name__.lower(), seconds)

    def next_wake_s(self, now: float) -> float | None:
        """When the next `tick` is due though nobody calls: a job that runs ahead is held back until then."""
        wakes = (turns.next_wake_s(now) for turns in self._state.turns.values())
        return min((each for each in wakes if each is not None), default=None)

    def take_batch(self) -> Batch:
        """What has changed since the last call."""
        return self._state.take_batch()

    # Jobs ---------------------------------------------------------------------------------------------------

    def _submit(self, client: str, call: Submit, now: float) -> None:
        caller = f"{client}#{call.seq}"
        name = call.spec.get("name")
        earlier = self._state.jobs.get(name) if isinstance(name, str) else None
        if earlier is not None and earlier.submitted_by == caller:
            self._state.reply(client, call.seq, body={"job": name, "state": earlier.state})
            return
        try:
            spec = parse_config(call.spec, RunSpec, "job")
            if earlier is not None and not earlier.state.is_over:
                raise JobRefused(f"{name}: a job of this name is {earlier.state}; choose another name")
            placed, certificate = self._place(spec, now)
        except (ConfigError, PlacementError, CertificateError) as error:
            self._state.reply(client, call.seq, str(error))
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
            self._state.reply(client, call.seq, body={**body, "state": "would run"})
            return
        record = JobRecord(
            spec=call.spec,
            group=placed.group.name,
            rollout_nodes=member.rollout_nodes,
            why=placed.why,
            submitted_by=caller,
            number=max((each.number for each in self._state.jobs.values()), default=0) + 1,
        )
        self._state.jobs[spec.name], self._state.specs[spec.name] = record, spec
        self._state.meter.forget(spec.name)
        self._state.forget_past(spec.name)
        self._state.form(placed.group, certificate, now)
        self._state.event("submitted", spec.name, group=placed.group.name)
        self._start(spec.name)
        self._state.reply(client, call.seq, body={**body, "state": record.state})

    def _place(self, spec: RunSpec, now: float) -> tuple[Placed, Certificate]:
        """A group whose order is certified, with what is held in it now held in turn."""
        placed = self._state.groups.place(spec, self._state.drained, now)
        try:
            return placed, self._certify(placed)
        except CertificateError:
            if spec.group is not None:
                raise
            placed = self._state.groups.place_alone(spec, now)
            return placed, self._certify(placed)

    def _certify(self, placed: Placed) -> Certificate:
        return certify(placed.group, self._state.turns_in(placed.group.name).order_for(placed.group))

    def _start(self, name: str) -> None:
        """A new attempt. Without a runner it waits for one's Hello."""
        self._state.changed(name)
        if self._state.runner is None:
            return
        record = self._state.jobs[name]
        record.attempt += 1
        self._state.event("started", name, attempt=record.attempt, iteration=record.num_done)
        self._state.order(
            Start(job=name, attempt=record.attempt, spec=record.spec, first_iteration=record.num_done)
        )

    def _start_again(self, name: str, why: str, now: float) -> None:
        self._free(name, now)
        self._state.jobs[name].num_restarts += 1
        self._state.jobs[name].note = why
        self._start(name)

    def _free(self, name: str, now: float) -> None:
        """Nobody of this attempt runs: its nodes go to the next."""
        self._state.turns_of(name).drop(name, now)
        self._state.meter.dropped(name)
        self._state.jobs[name].waiting = None
        self._state.progress.pop(name, None)
        self._state.changed(name)
        self._state.changed_group(self._state.jobs[name].group)
        self._permits.grant(self._state.jobs[name].group, now)

    def _hello(self, client: str, call: Hello, now: float) -> None:
        self._state.runner, self._state.log_folder = client, call.log_folder
        self._state.keep("runner:", msgspec.json.encode((client, call.log_folder)))
        self._state.reply(client, call.seq)
        for name, attempt in call.running.items():
            record = self._state.jobs.get(name)
            if record is None or record.attempt != attempt or record.state is not JobState.RUNNING:
                self._state.order(Stop(job=name, attempt=attempt))
        for name, record in self._state.jobs.items():
            if record.state.is_over or call.running.get(name) == record.attempt:
                continue
            if record.state is JobState.CANCELLING:
                self._end(name, JobState.CANCELLED, "", now)
            elif record.attempt == 0:
                self._start(name)
            else:
                self._start_again(name, "its runner was started again", now)

    def _exited(self, client: str, call: Exited, now: float) -> None:
        self._state.reply(client, call.seq)
        record = self._state.jobs.get(call.job)
        if record is None or record.attempt != call.attempt or record.state.is_over:
            return
        self._state.event("exited", call.job, attempt=call.attempt, exit_status=call.exit_status)
        num_iterations = self._state.specs[call.job].iterations
        how = f"attempt {call.attempt} ended with status {call.exit_status}"
        if record.state is JobState.CANCELLING:
            self._end(call.job, JobState.CANCELLED, "", now)
        elif call.exit_status == 0 and record.num_done >= num_iterations:
            self._end(call.job, JobState.DONE, "", now)
        elif call.exit_status == 0:
            note = f"{how} after {record.num_done} of {num_iterations} iterations"
            self._end(call.job, JobState.FAILED, note, now)
        elif record.num_crashes >= self._state.specs[call.job].max_restarts:
            note = f"{how}, the {record.num_crashes + 1}th crash in iteration {record.num_done}"
            self._end(call.job, JobState.FAILED, note, now)
        else:
            record.num_crashes += 1
            self._start_again(call.job, how, now)

    def _end(self, name: str, state: JobState, note: str, now: float) -> None:
        record = self._state.jobs[name]
        record.state, record.note = state, note
        self._free(name, now)
        self._state.groups.remove(name)
        self._state.event(state.value, name)
        self._state.order(Stop(job=name, attempt=record.attempt, forget=True))

    def _cancel(self, client: str, call: Cancel, now: float) -> None:
        record = self._state.jobs.get(call.job)
        if record is None:
            self._state.reply(client, call.seq, self._state.unknown(call.job))
            return
        if record.state is JobState.RUNNING:
            record.state = JobState.CANCELLING
            record.waiting = None
            self._state.changed(call.job)
            if call.job not in self._state.turns_of(call.job).holds:
                self._state.turns_of(call.job).drop(call.job, now)  # what it waits for
            self._state.order(Stop(job=call.job, attempt=record.attempt))
            if record.attempt == 0:
                self._end(call.job, JobState.CANCELLED, "", now)
        self._state.reply(client, call.seq, body={"job": call.job, "state": record.state})

    def _drain(self, client: str, call: Drain) -> None:
        group = self._state.groups.by_name.get(call.group)
        if group is None:
            known = ", ".join(self._state.groups.by_name) or "none"
            self._state.reply(client, call.seq, f"no group {call.group!r}; there are {known}")
            return
        nodes = ["train", *(f"rollout-{number}" for number in range(group.num_rollout_nodes))]
        if call.node not in nodes:
            self._state.reply(
                client, call.seq, f"no node {call.node!r} in group {call.group}: {', '.join(nodes)}"
            )
            return
        drained = set(self._state.drained.get(call.group, []))
        drained = drained - {call.node} if call.undo else drained | {call.node}
        self._state.drained[call.group] = sorted(drained)
        self._state.keep(f"drained:{call.group}", msgspec.json.encode(self._state.drained[call.group]))
        users = [
            member.job.name
            for member in group.members
            if call.node == "train" or int(call.node.removeprefix("rollout-")) in member.rollout_nodes
        ]
        self._state.reply(client, call.seq, body={"drained": sorted(drained), "still_used_by": users})

    # Answers ------------------------------------------------------------------------------------------------

    def _status(self, client: str, call: Status) -> None:
        if call.job is not None and call.job not in self._state.jobs:
            self._state.reply(client, call.seq, self._state.unknown(call.job))
            return
        names = (
            [call.job]
            if call.job is not None
            else sorted(self._state.jobs, key=lambda n: self._state.jobs[n].number)
        )
        body: dict[str, Any] = {
            "jobs": [self._state.describe(name) for name in names],
            "scheduler_pid": self._pid,
        }
        if call.job is None:
            body["groups"] = {name: self._state.describe_group(name) for name in self._state.groups.by_name}
        self._state.reply(client, call.seq, body=body)
