"""Answers the calls of jobs' processes: requests, heartbeats, releases, completed iterations.

Serves only the present attempt of a running job, and only under the epoch of its permit. All ranks of a job
get one permit for a phase: it is asked for when the last of them has asked, and over when the last has
released it. A rank that others wait for is named after a lease. An attempt is ended if a rank that waits for
nothing does not call for long, in a phase or in none, unless all iterations are complete. Pure: takes
``now``.
"""

import logging
from collections.abc import Iterable

from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.messages import (
    Completed,
    Granted,
    Heartbeat,
    RankCall,
    Release,
    Request,
    Stop,
)
from rose.scheduler.runtime.decide.group_permits import Hold
from rose.scheduler.runtime.decide.records import AskedByRanks, JobState
from rose.scheduler.runtime.decide.state import State

logger = logging.getLogger(__name__)


class PermitCalls:
    """Answers Request, Heartbeat, Release and Completed calls."""

    def __init__(self, state: State, lease_s: float, now: float) -> None:
        self._state = state
        self._lease_s = lease_s
        for name in state.live:
            if state.jobs[name].state.is_placed and state.jobs[name].runs:
                self.begin(name, now)
        self._apart_s = {name: now for name in state.live if self._are_apart(name)}
        """For each job of which only some ranks have asked or released, when the last of these did.

        Jobs whose note says so already are left out.
        """

    def _are_apart(self, job: str) -> bool:
        record, num_ranks = self._state.jobs[job], self._num_ranks(job)
        hold = self._state.permits_of(job).holds.get(job) if record.state.is_placed else None
        asked = record.waiting
        is_whole = asked is None or len(asked.callers) == num_ranks
        return not is_whole or (hold is not None and len(hold.until_s) < num_ranks)

    def forget(self, job: str) -> None:
        """The attempt has ended: nothing of it waits."""
        self._apart_s.pop(job, None)
        self._state.hung_s.pop(job, None)
        self._state.jobs[job].waiting = None

    def begin(self, job: str, now: float) -> None:
        """The attempt's processes have started: all ranks must call a phase in time."""
        if self._unheard(job):
            self._state.hung_s[job] = now + self._state.specs[job].start_s
        else:
            self._expect(job, now)

    def _hear(self, call: RankCall, now: float) -> None:
        record = self._state.jobs[call.job]
        if call.rank not in record.heard:
            record.heard.append(call.rank)
            self._state.changed(call.job)
            self._expect(call.job, now)

    def _unheard(self, job: str) -> set[int]:
        """The ranks that have called no phase since the attempt's start."""
        return set(range(self._num_ranks(job))) - set(self._state.jobs[job].heard)

    def _outside(self, job: str) -> set[int]:
        """The ranks that are in no phase and wait for nothing."""
        hold, asked = self._state.permits_of(job).holds.get(job), self._state.jobs[job].waiting
        inside = {*(hold.until_s if hold is not None else ()), *(asked.callers if asked is not None else ())}
        return set(range(self._num_ranks(job))) - inside

    def _expect(self, job: str, now: float) -> None:
        """A rank has called. When all have, those that do not wait for others must call again in time."""
        if self._unheard(job):
            return
        spec, hold = self._state.specs[job], self._state.permits_of(job).holds.get(job)
        if hold is not None:
            self._state.hung_s[job] = now + self._phase_s(job, hold.phase) + self._allowed_s(job)
        elif self._outside(job):
            self._state.hung_s[job] = now + max(map(spec.after_s, Phase)) + spec.hung_s
        else:
            self._state.hung_s.pop(job, None)

    def _phase_s(self, job: str, phase: Phase) -> float:
        """The longest time that a phase takes on the group's nodes, as the job's file says."""
        group = self._state.groups.by_name[self._state.jobs[job].group]
        [found] = [member.job for member in group.members if member.job.name == job]
        return found.rollout_s if phase is Phase.ROLLOUT else found.train_s_on(group.num_train_nodes)

    def _allowed_s(self, job: str) -> float:
        """How much longer a phase may take. An attempt's first one may compile, and connect its ranks."""
        spec = self._state.specs[job]
        return spec.hung_s if self._state.jobs[job].is_warm else max(spec.start_s, spec.hung_s)

    def progressed(self, job: str, now: float) -> None:
        """A phase has reported progress, so it has not hung."""
        self._expect(job, now)

    def wait_for_calls(self, now: float) -> None:
        """Gives ranks that are late a lease more: their calls may be on their way."""
        for job, until_s in self._state.hung_s.items():
            self._state.hung_s[job] = max(until_s, now + self._lease_s)

    def end_hung(self, now: float) -> None:
        """Ends the attempts of which a rank has called nothing in time."""
        for job in [each for each, until_s in self._state.hung_s.items() if until_s <= now]:
            record, spec = self._state.jobs[job], self._state.specs[job]
            if record.state is not JobState.RUNNING:
                del self._state.hung_s[job]
                continue
            if record.num_done >= spec.iterations:  # nothing is left that another attempt could do
                del self._state.hung_s[job]
                self._say_ending(job)
                continue
            self._state.hung_s[job] = now + self._lease_s  # the order may be lost with its runner
            event, ranks, record.note = self._blame(job)
            self._state.changed(job)
            self._state.event(event, job, ranks=sorted(ranks), note=record.note)
            self._state.order(Stop(job=job, attempt=record.attempt, is_lost=True))
            logger.warning("%s job=%s %s", event, job, record.note)

    def _blame(self, job: str) -> tuple[str, set[int], str]:
        """Returns the event of a job that has hung, the ranks that it waits for, and the job's note."""
        spec, hold = self._state.specs[job], self._state.permits_of(job).holds.get(job)
        if ranks := self._unheard(job):
            who = named(ranks, self._num_ranks(job))
            return "start_hung", ranks, f"{UNHEARD}{who} called no phase in {spec.start_s:.0f} s (start_s)"
        if hold is None:
            ranks = self._outside(job)
            said = f"has not called for {spec.hung_s:.0f} s (hung_s), and is in no phase"
        else:
            ranks, key = set(hold.until_s), "hung_s" if self._state.jobs[job].is_warm else "start_s"
            said = (
                f"is in {hold.phase} of iteration {hold.iteration}, and has reported nothing for "
                f"{self._allowed_s(job):.0f} s ({key}) more than the {self._phase_s(job, hold.phase):.6g} s "
                "of its file"
            )
        return "hung", ranks, f"{HUNG}{named(ranks, self._num_ranks(job))} {said}"

    def _say_ending(self, job: str) -> None:
        record, spec = self._state.jobs[job], self._state.specs[job]
        record.note = (
            f"all iterations are complete, and its processes still run after {spec.hung_s:.0f} s (hung_s); "
            "rose sched cancel ends them"
        )
        self._state.changed(job)
        self._state.event("ends_late", job, note=record.note)

    def request(self, client: str, call: Request, now: float) -> bool:
        """A phase asks for its nodes. Returns whether all ranks have asked and wait, or get them now."""
        refusal = self.why_not(call)
        if refusal is not None:
            self._state.answer(client, call.seq, refusal)
            return False
        self._hear(call, now)
        permits, record = self._state.permits_of(call.job), self._state.jobs[call.job]
        hold = permits.holds.get(call.job)
        if hold is not None and call.rank in hold.until_s:
            if (hold.phase, hold.iteration) == (call.phase, call.iteration):  # asked again
                self._send_grant(hold, client, call.seq)
                return False
            refusal = f"{call.job} still holds its permit for {hold.phase} of iteration {hold.iteration}"
            self._state.answer(client, call.seq, refusal)
            return False
        if not self._gather(client, call, call.phase, now):
            return False
        permits.ask(call.job, call.phase, call.iteration, self._num_ranks(call.job))
        self._state.meter.asked(call.job, call.phase, now)
        self._state.changed_group(record.group)
        self.grant(record.group, now)
        return True

    def _gather(self, client: str, call: Request | Completed, phase: Phase | None, now: float) -> bool:
        """Notes that a rank has asked. Returns whether all have; refuses a rank that does something else."""
        record = self._state.jobs[call.job]
        new = AskedByRanks(phase=phase, iteration=call.iteration, callers={call.rank: (client, call.seq)})
        asked = record.waiting
        if asked is not None and (asked.phase, asked.iteration) == (phase, call.iteration):
            new.callers.update({rank: each for rank, each in asked.callers.items() if rank != call.rank})
        elif asked is not None and asked.callers.keys() != {call.rank}:
            others = named(asked.callers, self._num_ranks(call.job))
            refusal = f"rank {call.rank} asks for {new}, {others} for {asked}: all ranks must enter the same "
            self._state.answer(client, call.seq, f"{refusal}phases in the same order")
            return False
        record.waiting = new
        self._state.changed(call.job)
        self._note_apart(call.job, now)
        self._expect(call.job, now)
        return len(new.callers) == self._num_ranks(call.job)

    def _note_apart(self, job: str, now: float) -> None:
        """A rank has asked or released: notes since when others are missing."""
        if self._are_apart(job):
            self._apart_s[job] = now
            return
        self._apart_s.pop(job, None)
        record = self._state.jobs[job]
        if record.note.startswith(LATE):
            record.note = ""
            self._state.changed(job)

    def is_last(self, call: Completed) -> bool:
        """Returns whether all other ranks have already said that this iteration is complete."""
        asked = self._state.jobs[call.job].waiting
        is_same = asked is not None and (asked.phase, asked.iteration) == (None, call.iteration)
        ranks = {call.rank, *asked.callers} if is_same and asked is not None else {call.rank}
        return len(ranks) == self._num_ranks(call.job)

    def tell_apart(self, now: float) -> None:
        """Names the ranks for which others of their job have waited for a lease."""
        for job in [each for each, since_s in self._apart_s.items() if now - since_s > self._lease_s]:
            del self._apart_s[job]
            record = self._state.jobs[job]
            if record.state is not JobState.RUNNING:
                continue
            hold, asked = self._state.permits_of(job).holds.get(job), record.waiting
            if hold is not None:  # also where some ask for the next phase already
                late, what = set(hold.until_s), f"is still in {hold.phase} of iteration {hold.iteration}"
            elif asked is not None:
                late = set(range(self._num_ranks(job))) - asked.callers.keys()
                what = f"has not come to {asked}"
            else:
                continue
            record.note = f"{LATE}{named(late, self._num_ranks(job))} {what}"
            self._state.changed(job)
            self._state.event("rank_late", job, ranks=sorted(late), note=record.note)
            logger.warning("rank late job=%s %s", job, record.note)

    def grant(self, group: str, now: float) -> None:
        """Issues the permits that are due in a group."""
        for hold in self._state.permits[group].grant(now):
            record = self._state.jobs[hold.job]
            self._state.meter.granted(hold.job, hold.phase, now)
            assert record.waiting is not None, hold
            for client, seq in record.waiting.callers.values():
                self._send_grant(hold, client, seq)
            record.waiting = None
            self._state.changed(hold.job)
            self._state.changed_group(group)
            self._state.event(
                "granted", hold.job, phase=hold.phase, iteration=hold.iteration, epoch=hold.epoch
            )
            self._expect(hold.job, now)

    def _send_grant(self, hold: Hold, client: str, seq: int) -> None:
        grant = Granted(
            seq=seq,
            job=hold.job,
            attempt=self._state.jobs[hold.job].attempt,
            phase=hold.phase,
            iteration=hold.iteration,
            epoch=hold.epoch,
            lease_s=self._lease_s,
        )
        self._state.send(client, grant)

    def heartbeat(self, client: str, call: Heartbeat, now: float) -> None:
        """A rank that holds a permit is alive."""
        refusal = self.why_not(call)
        if refusal is None and not self._beat(call, now):
            refusal = _fenced(call.phase, call.epoch)
        self._state.answer(client, call.seq, refusal)

    def _beat(self, call: Heartbeat, now: float) -> bool:
        return self._state.permits_of(call.job).beat(call.job, call.epoch, now, call.rank)

    def release(self, client: str, call: Release, now: float) -> None:
        """A rank is done: the next phases may begin when all are."""
        refusal = self.why_not(call)
        if refusal is not None:
            self._state.answer(client, call.seq, refusal)
            return
        permits, record = self._state.permits_of(call.job), self._state.jobs[call.job]
        if permits.release(call.job, call.epoch, now, call.rank):
            self._state.changed_group(record.group)
            self._note_apart(call.job, now)
            if call.job not in permits.holds:
                record.released_epoch, record.is_warm = call.epoch, True
                self._state.meter.released(call.job, now)
                self._state.event("released", call.job, phase=call.phase, epoch=call.epoch)
                self._state.progress.pop(call.job, None)
                self._state.changed(call.job)
                self.grant(record.group, now)
            self._expect(call.job, now)
        elif record.released_epoch != call.epoch:
            refusal = _fenced(call.phase, call.epoch)
        self._state.answer(client, call.seq, refusal)

    def completed(self, client: str, call: Completed, now: float) -> dict[int, tuple[str, int]]:
        """An iteration is safe when all ranks say so. Returns whom the caller has to answer then."""
        refusal = self.why_not(call)
        if refusal is not None:
            self._state.answer(client, call.seq, refusal)
            return {}
        record = self._state.jobs[call.job]
        if call.iteration < record.num_done:  # a second time, after a restart
            return {call.rank: (client, call.seq)}
        if not self._gather(client, call, None, now):
            return {}
        assert record.waiting is not None
        callers, record.waiting = record.waiting.callers, None
        self._expect(call.job, now)
        self._state.meter.completed(call.job, now)
        record.completed(now)
        self._state.groups.touch(record.group)
        record.num_done, record.num_crashes = call.iteration + 1, 0
        self._state.changed(call.job)
        self._state.event("completed", call.job, iteration=call.iteration)
        return callers

    def why_not(self, call: RankCall) -> str | None:
        """Returns why a call of a job's process is refused, or None."""
        record = self._state.jobs.get(call.job)
        if record is None:
            return f"no job {call.job!r}"
        if record.attempt != call.attempt:
            return f"attempt {call.attempt} was replaced by attempt {record.attempt}"
        if record.state is not JobState.RUNNING:
            return f"the job is {record.state}"
        num_ranks = self._num_ranks(call.job)
        return None if call.rank < num_ranks else f"no rank {call.rank}: the attempt has {num_ranks} ranks"

    def _num_ranks(self, job: str) -> int:
        return self._state.jobs[job].num_ranks


LATE = "others wait: "
"""Begins the note of a job of which some ranks wait for others."""
UNHEARD = "start hung: "
"""Begins the note of a job whose attempt is ended because a rank has not been heard."""
HUNG = "hung: "
"""Begins the note of a job whose attempt is ended because a rank that waited for nothing called nothing."""


def named(ranks: Iterable[int], num_ranks: int) -> str:
    """Returns words for these ranks: "ranks 1, 3", or "its process" if the job has one rank."""
    if num_ranks == 1:
        return "its process"
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _fenced(phase: str, epoch: int) -> str:
    return f"the permit of {phase} (epoch {epoch}) was taken back: its lease ran out"
