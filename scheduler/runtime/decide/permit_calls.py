"""Answers the calls of jobs' processes: requests, heartbeats, releases, completed iterations.

Serves only the present attempt of a running job, and only under the epoch of its permit. Pure: takes ``now``.
"""

from rose.scheduler.cluster.model import POOL_PHASES
from rose.scheduler.runtime.channel.messages import Completed, Granted, Heartbeat, Release, Request
from rose.scheduler.runtime.decide.holds import Hold
from rose.scheduler.runtime.decide.records import JobState, PermitRequest
from rose.scheduler.runtime.decide.state import State


class PermitCalls:
    """Answers Request, Heartbeat, Release and Completed calls."""

    def __init__(self, state: State, lease_s: float) -> None:
        self._state = state
        self._lease_s = lease_s

    def request(self, client: str, call: Request, now: float) -> None:
        """A phase asks for its nodes."""
        refusal = self.why_not(call.job, call.attempt)
        if refusal is None and call.phase not in POOL_PHASES:
            refusal = f"phase {call.phase!r} needs no permit"
        if refusal is not None:
            self._state.answer(client, call.seq, refusal)
            return
        permits, record = self._state.permits_of(call.job), self._state.jobs[call.job]
        hold = permits.holds.get(call.job)
        if hold is not None and (hold.phase, hold.iteration) != (call.phase, call.iteration):
            refusal = f"{call.job} still holds its permit for {hold.phase} of iteration {hold.iteration}"
            self._state.answer(client, call.seq, refusal)
            return
        request = PermitRequest(phase=call.phase, iteration=call.iteration, client=client, seq=call.seq)
        if hold is not None:  # asked again, or queued by the phase before
            self._send_grant(hold, request)
            return
        record.waiting = request
        self._state.changed(call.job)
        permits.ask(call.job, call.phase, call.iteration)
        self._state.meter.asked(call.job, call.phase, now)
        self._state.changed_group(record.group)
        self.grant(self._state.jobs[call.job].group, now)

    def grant(self, group: str, now: float) -> None:
        """Issues the permits that are due in a group."""
        for hold in self._state.permits[group].grant(now):
            record = self._state.jobs[hold.job]
            self._state.meter.granted(hold.job, hold.phase, now)
            assert record.waiting is not None, hold
            self._send_grant(hold, record.waiting)
            record.waiting = None
            self._state.changed(hold.job)
            self._state.changed_group(group)
            self._state.event(
                "granted", hold.job, phase=hold.phase, iteration=hold.iteration, epoch=hold.epoch
            )

    def _send_grant(self, hold: Hold, request: PermitRequest) -> None:
        grant = Granted(
            seq=request.seq,
            job=hold.job,
            attempt=self._state.jobs[hold.job].attempt,
            phase=hold.phase,
            iteration=hold.iteration,
            epoch=hold.epoch,
            lease_s=self._lease_s,
        )
        self._state.send(request.client, grant)

    def heartbeat(self, client: str, call: Heartbeat, now: float) -> None:
        """A holder is alive."""
        refusal = self.why_not(call.job, call.attempt)
        if refusal is None and not self._state.permits_of(call.job).beat(call.job, call.epoch, now):
            refusal = _fenced(call.phase, call.epoch)
        self._state.answer(client, call.seq, refusal)

    def release(self, client: str, call: Release, now: float) -> None:
        """A holder is done: the next phases may begin."""
        refusal = self.why_not(call.job, call.attempt)
        if refusal is not None:
            self._state.answer(client, call.seq, refusal)
            return
        permits, record = self._state.permits_of(call.job), self._state.jobs[call.job]
        if permits.release(call.job, call.epoch, now):
            record.released_epoch = call.epoch
            self._state.meter.released(call.job, now)
            self._state.event("released", call.job, phase=call.phase, epoch=call.epoch)
            self._state.progress.pop(call.job, None)
            if call.next_phase is not None:
                record.waiting = PermitRequest(
                    phase=call.next_phase, iteration=call.next_iteration, client=client, seq=0
                )
                permits.ask(call.job, call.next_phase, call.next_iteration)
                self._state.meter.asked(call.job, call.next_phase, now)
            self._state.changed(call.job)
            self._state.changed_group(self._state.jobs[call.job].group)
            self.grant(self._state.jobs[call.job].group, now)
        elif record.released_epoch != call.epoch:
            refusal = _fenced(call.phase, call.epoch)
        self._state.answer(client, call.seq, refusal)

    def completed(self, call: Completed, now: float) -> str | None:
        """An iteration is safe. Returns why the call is refused, or None; the caller answers it."""
        refusal = self.why_not(call.job, call.attempt)
        if refusal is None:
            record = self._state.jobs[call.job]
            if call.iteration >= record.num_done:  # else a second time, after a restart
                self._state.meter.completed(call.job, now)
                record.completed(now)
                self._state.groups.touch(record.group)
            record.num_done = max(record.num_done, call.iteration + 1)
            record.num_crashes = 0
            self._state.changed(call.job)
            self._state.event("completed", call.job, iteration=call.iteration)
        return refusal

    def why_not(self, job: str, attempt: int) -> str | None:
        """Returns why a call of this attempt is refused, or None."""
        record = self._state.jobs.get(job)
        if record is None:
            return f"no job {job!r}"
        if record.attempt != attempt:
            return f"attempt {attempt} was replaced by attempt {record.attempt}"
        if record.is_fenced:
            return f"attempt {attempt} has to end: {record.note}"
        return None if record.state is JobState.RUNNING else f"the job is {record.state}"


def _fenced(phase: str, epoch: int) -> str:
    return f"the permit of {phase} (epoch {epoch}) was taken back: its lease ran out"
