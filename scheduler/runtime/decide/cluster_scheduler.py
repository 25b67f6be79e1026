"""The cluster scheduler as a state machine: which call changes what, and what is answered.

Hands each call to the part that owns it, and owns expired leases and drained nodes itself. A call's changes
and its answers are in the same batch, so a scheduler that is killed at any point loses nothing that it has
answered. A call that arrives twice changes nothing the second time. Pure: takes ``now``, the scheduler's
monotonic clock; does no I/O.
"""

import heapq
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rose.scheduler.group.model import Group
from rose.scheduler.runtime.channel.messages import (
    AnyCall,
    Awaiting,
    Cancel,
    Completed,
    Drain,
    Exited,
    Heartbeat,
    Hello,
    History,
    HoldJob,
    Moved,
    Nodes,
    Overview,
    Placed,
    Release,
    ReleaseJob,
    Report,
    Request,
    Status,
    Stepped,
    Stop,
    Submit,
)
from rose.scheduler.runtime.channel.protocol import Batch
from rose.scheduler.runtime.decide.drift_calls import DriftCalls
from rose.scheduler.runtime.decide.job_calls import JobCalls
from rose.scheduler.runtime.decide.move_calls import MoveCalls
from rose.scheduler.runtime.decide.overview import describe_group, describe_job, overview
from rose.scheduler.runtime.decide.permit_calls import PermitCalls
from rose.scheduler.runtime.decide.preempt_calls import PreemptCalls
from rose.scheduler.runtime.decide.queue_calls import QueueCalls
from rose.scheduler.runtime.decide.runner_calls import RunnerCalls
from rose.scheduler.runtime.decide.size_calls import SizeCalls
from rose.scheduler.runtime.decide.state import State
from rose.scheduler.runtime.decide.tail_calls import TailCalls
from rose.scheduler.runtime.job.spec import ServeSpec
from rose.scheduler.runtime.lending.loans import Loan, Loans, RouterNews

logger = logging.getLogger(__name__)

AWAY_S = 2.0
"""A longer time between two ticks, which come four times a second, means that nobody could be heard."""


class Due:
    """The times at which groups' permits are due. A group is looked at only when it is due."""

    def __init__(self) -> None:
        self._at_s: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        """Also holds times that were replaced since."""

    def put(self, group: str, at_s: float | None) -> None:
        """Sets when the group is due; None: never."""
        if at_s is None:
            self._at_s.pop(group, None)
            return
        self._at_s[group] = at_s
        heapq.heappush(self._heap, (at_s, group))

    def pop(self, now: float) -> list[str]:
        """Removes and returns the groups that are due."""
        found = []
        while (at_s := self.next_s()) is not None and at_s <= now:
            group = heapq.heappop(self._heap)[1]
            del self._at_s[group]
            found.append(group)
        return found

    def next_s(self) -> float | None:
        """Returns when the next group is due; None if none is."""
        while self._heap and self._at_s.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


class ClusterScheduler:
    """Schedules all jobs of one cluster."""

    def __init__(
        self,
        cluster: ServeSpec,
        rows: Mapping[str, bytes],
        now: float,
        pid: int,
        clock: str,
        make_key: Callable[[], str] = secrets.token_urlsafe,
    ) -> None:
        """rows: what an earlier scheduler has committed. pid: of the scheduler's process.

        clock: names the one of all ``now``; on the same one it is known how long phases have been running.
        make_key: makes the keys of jobs at the serving fleet's router.
        """
        self._pid = pid
        self._ticked_s = now
        self._state = State(cluster, rows, now, clock, Loans(cluster, make_key))
        self._permits = PermitCalls(self._state, cluster.lease_s, now)
        self._tails = TailCalls(self._state, self._permits)
        self._moves = MoveCalls(self._state, self._permits)
        self._jobs = JobCalls(self._state, self._permits, self._moves)
        self._queue = QueueCalls(self._state, self._jobs, PreemptCalls(self._state, self._jobs))
        self._drift = DriftCalls(self._state, self._permits, self._jobs)
        self._sizes = SizeCalls(self._state, self._permits)
        self._runner = RunnerCalls(self._state, self._permits, self._jobs)
        self._due = Due()

    # The loop's side ----------------------------------------------------------------------------------------

    def handle(self, client: str, call: AnyCall, now: float) -> None:
        """Decides one call."""
        match call:
            case Request():
                self._moves.arrived(call, now)
                if self._permits.request(client, call, now):
                    self._drift.asked(call, now)
            case Heartbeat():
                self._permits.heartbeat(client, call, now)
            case Release():
                self._drift.releasing(call, now)
                self._sizes.releasing(call, now)
                self._permits.release(client, call, now)
            case Completed():
                self._drift.completing(call, now)
                self._sizes.completing(call, now)
                self._moves.completed(client, call, now)
            case Report():
                self._tails.report(client, call, now)
            case Moved():
                self._tails.moved(client, call, now)
            case Stepped():
                self._state.answer(
                    client, call.seq, f"{call.job} shares no device, so its steps are not asked"
                )
            case Submit():
                self._queue.submit(client, call, now)
            case Status():
                self._status(client, call, now)
            case Overview():
                body = overview(self._state, self._pid, now)
                self._state.answer(client, call.seq, body=body)
            case Cancel():
                self._jobs.cancel(client, call, now)
            case HoldJob():
                self._queue.hold(client, call)
            case ReleaseJob():
                self._queue.release(client, call)
            case Drain():
                self._drain(client, call)
            case Hello():
                self._runner.hello(client, call, now)
            case Awaiting():
                self._runner.awaiting(client, call)
            case Nodes():
                self._runner.nodes(client, call)
            case Placed():
                self._runner.placed(client, call, now)
            case Exited():
                self._drift.forget(call.job)
                self._jobs.exited(client, call, now)
                if (record := self._state.jobs.get(call.job)) is None or not record.state.is_placed:
                    self._sizes.forget(call.job)
            case History():
                raise ValueError("the history is the channel's, and no decision")
        self._follow_up(now)

    def _follow_up(self, now: float) -> None:
        """Lets queued jobs into new room first, then asks the policy for moves."""
        self._state.groups.refresh(now)
        self._queue.place_waiting(now)
        if not self._state.takeovers:  # a move could take the room that a queued job waits for
            self._moves.rearrange(now)
        if self._state.loans.is_due:
            groups, jobs = self._state.groups.by_name.values(), self._state.jobs
            lent = self._state.loans.decide(groups, self._state.specs, lambda name: jobs[name].number)
            for job, num_gpus in lent.items():
                self._state.event("lent", job, serving_gpus=num_gpus)

    def tick(self, now: float) -> None:
        """Handles expired leases: frees the nodes when the process has been ended, or a lease later."""
        was_away = now - self._ticked_s > AWAY_S
        self._ticked_s = now
        self._permits.tell_apart(now)
        if was_away:
            self._permits.wait_for_calls(now)
        self._permits.end_hung(now)
        self._follow_up(now)
        if was_away:  # the channel was gone, or this process stood still: heartbeats may be on their way
            for permits in self._state.permits.values():
                permits.renew(now)
        self._note_due(now)
        for group in self._due.pop(now):
            self._look(group, now)

    def _look(self, group: str, now: float) -> None:
        """Ends the leases of a group that have run out, and issues the permits that are due."""
        permits = self._state.permits[group]
        for hold in permits.expired(now):
            if hold.silent and self._state.is_beside:
                # No runner has answered for a whole lease: it is gone, and a watcher has ended the process.
                self._jobs.bury(hold.job, "lease ran out, and the runner is gone", now)
                continue
            hold.silent = tuple(rank for rank, until_s in hold.until_s.items() if until_s <= now)
            hold.renew(now + permits.lease_s)
            self._state.event(
                "expired", hold.job, phase=hold.phase, epoch=hold.epoch, ranks=list(hold.silent)
            )
            self._state.order(Stop(job=hold.job, attempt=self._state.jobs[hold.job].attempt, is_lost=True))
            logger.warning(
                "lease ran out job=%s phase=%s ranks=%s group=%s", hold.job, hold.phase, hold.silent, group
            )
        self._permits.grant(group, now)  # the order waits only so long for a job between two phases
        self._state.touched.add(group)

    def _note_due(self, now: float) -> None:
        """Notes when the groups whose permits have changed are due."""
        for group in self._state.touched:
            permits = self._state.permits.get(group)
            self._due.put(group, permits.next_wake_s(now) if permits is not None else None)
        self._state.touched.clear()

    def decided(self, call: AnyCall, seconds: float) -> None:
        """Counts how long `handle` took."""
        self._state.meter.decided(type(call).__name__.lower(), seconds)

    def next_wake_s(self, now: float) -> float | None:
        """Returns when the next `tick` is due without another call, as when a job that ran ahead may go."""
        self._note_due(now)
        return self._due.next_s()

    @property
    def groups(self) -> Mapping[str, Group]:
        """All groups, by name."""
        return self._state.groups.by_name

    @property
    def loans(self) -> tuple[Loan, ...]:
        """What the serving fleet's router must know of the jobs. It is the same object until that changes."""
        return self._state.loans.wanted

    def router_heard(self, news: RouterNews) -> None:
        """Notes that the router was told of loans, or could not be told."""
        self._state.loans.heard(news)
        for use in news.used:
            record = self._state.jobs.get(use.job)
            is_the_jobs = record is not None and record.number == use.submission
            if record is not None and is_the_jobs and record.borrowed.take(use.meter, use.gpu_s):
                self._state.changed(use.job)

    def take_batch(self) -> Batch:
        """Returns the changes and answers since the last call."""
        return self._state.take_batch()

    # Nodes and answers --------------------------------------------------------------------------------------

    def _drain(self, client: str, call: Drain) -> None:
        group = self._state.groups.by_name.get(call.group)
        if group is None:
            known = ", ".join(self._state.groups.by_name) or "none"
            self._state.answer(client, call.seq, f"no group {call.group!r}; the groups are: {known}")
            return
        nodes = ["train", *(f"rollout-{number}" for number in range(group.num_rollout_nodes))]
        if call.node not in nodes:
            self._state.answer(
                client, call.seq, f"no node {call.node!r} in group {call.group}; it has {', '.join(nodes)}"
            )
            return
        drained = set(self._state.groups.drained.get(call.group, []))
        drained = drained - {call.node} if call.undo else drained | {call.node}
        self._state.groups.drain(call.group, sorted(drained))
        self._state.would_fit.clear()
        self._state.has_new_room |= call.undo
        self._state.keep(f"drained:{call.group}", msgspec.json.encode(sorted(drained)))
        users = [
            member.job.name
            for member in group.members
            if call.node == "train" or int(call.node.removeprefix("rollout-")) in member.rollout_nodes
        ]
        self._state.answer(client, call.seq, body={"drained": sorted(drained), "still_used_by": users})

    def _status(self, client: str, call: Status, now: float) -> None:
        if call.job is not None and call.job not in self._state.jobs:
            self._state.answer(client, call.seq, self._state.unknown(call.job))
            return
        names = [call.job] if call.job is not None else self._state.shown()
        body: dict[str, Any] = {
            "jobs": [describe_job(self._state, name, now) for name in names],
            "scheduler_pid": self._pid,
        }
        if call.job is not None and self._state.jobs[call.job].state.is_waiting:
            body["jobs"][0]["earliest"] = self._queue.earliest(call.job, now)
        if call.job is None:
            body["groups"] = {name: describe_group(self._state, name) for name in self._state.groups.by_name}
            runner = self._state.runner
            body["runner"] = {"host": runner.host, "num_nodes": runner.num_nodes} if runner else None
            body["waits_for"] = self._state.runner_waits_for
            router = self._state.cluster.router
            body["router"] = {"url": router.url, "problem": self._state.loans.problem} if router else None
        self._state.answer(client, call.seq, body=body)
