"""Moves running jobs to cheaper groups. The policy decides when a job arrives or ends; a job moves between
two iterations.

Owns moves from the decision to the first request in the new group. From the decision on, the job has a place
in the new group, in an order certified with it; without a certificate it stays. A job finishes its iteration
where it is, and never holds nodes in both groups. No iteration is lost or run twice, whoever is killed in
between. Pure: takes ``now``; policies choose the moves.

A job that is preempted leaves its group in the same way, and goes back to the queue (job_calls.py).

Between two iterations a job holds and requests nothing, and its working sets are in host memory. The answer
to the call that completes an iteration names the job's place, also when the call is repeated. A job that
crashed counts as between two iterations.
"""

import logging
from dataclasses import dataclass

from rose.scheduler.group.certificate import Certificate, CertificateError
from rose.scheduler.group.model import Group
from rose.scheduler.runtime.channel.messages import Completed, Request, Stop
from rose.scheduler.runtime.decide.permit_calls import PermitCalls
from rose.scheduler.runtime.decide.placing import Moves, MoveTarget
from rose.scheduler.runtime.decide.records import JobState, MoveRecord
from rose.scheduler.runtime.decide.state import State

logger = logging.getLogger(__name__)


NUM_LOOKED = 2
"""The groups that are looked at in one call or tick: a decision among thousands of jobs holds nobody up."""


@dataclass(slots=True)
class _Search:
    """A search for moves that goes through the groups in several steps."""

    num_left: int
    """The moves that may still be made."""
    groups: list[str]
    """The groups that are still to be looked at."""
    best: Moves | None = None


class MoveCalls:
    """Decides and carries out moves; answers Completed calls."""

    def __init__(self, state: State, permits: PermitCalls) -> None:
        self._state = state
        self._permits = permits
        self._search: _Search | None = None
        self._rules = state.cluster.to_preemption()

    def rearrange(self, now: float) -> None:
        """Searches for moves if a job has come or ended, a few groups at a time, and decides on the best."""
        if self._search is None and self._state.has_come_or_gone and self._state.groups.max_moves:
            self._search = _Search(self._state.groups.max_moves, self._state.groups.movable(now))
            self._state.has_come_or_gone = False
        num_looked = 0
        while self._search is not None and num_looked < NUM_LOOKED:
            names = self._search.groups[: NUM_LOOKED - num_looked]
            num_looked += max(1, len(names))
            self._look(self._search, names, now)

    def _look(self, search: _Search, names: list[str], now: float) -> None:
        """Looks for moves out of these groups, and decides when all groups have been looked at."""
        del search.groups[: len(names)]
        found = self._state.groups.rearranged(now, search.num_left, names)
        if found is not None and (search.best is None or found.gain_dollars > search.best.gain_dollars):
            search.best = found
        if search.groups:
            return
        self._search = None
        if search.best is not None and search.best is not found:  # jobs may have come or gone since
            search.best = self._state.groups.rearranged(now, search.num_left, [search.best.leave])
        if search.best is None or not self._reserve(search.best, now):
            return
        num_left = search.num_left - len(search.best.targets)
        if num_left > 0:
            self._search = _Search(num_left, self._state.groups.movable(now))

    def completed(self, client: str, call: Completed, now: float) -> None:
        """An iteration is safe. The answer says where the job runs from here on."""
        is_new = call.job in self._state.jobs and call.iteration >= self._state.jobs[call.job].num_done
        callers = self._permits.completed(client, call, now)
        if not callers:
            return
        record = self._state.jobs[call.job]
        if is_new and record.num_done < self._state.specs[call.job].iterations:
            self._leave(call.job, now)
            self._evict(call.job)
            self._give_way(call.job, now)
        body = {
            "group": record.group,
            "rollout_nodes": list(record.rollout_nodes),
            "ends": record.is_leaving or record.state is JobState.PREEMPTING,
        }
        for each, seq in callers.values():
            self._state.answer(each, seq, body=body)

    def _leave(self, job: str, now: float) -> None:
        """Lets the job move. On a Ray cluster a new attempt continues it, as a process stays on its host."""
        record = self._state.jobs[job]
        if record.next_place is None:
            return
        record.is_leaving = not self._state.is_beside
        self.switch(job, now, is_warm=not record.is_leaving)
        if record.is_leaving:
            self._state.order(Stop(job=job, attempt=record.attempt, forget=True))

    def _evict(self, job: str) -> None:
        """Ends the process of a job whose nodes are about to go away: it continues on others."""
        record = self._state.jobs[job]
        leaving = self._state.runner.leaving if self._state.runner is not None else {}
        if leaving.get(job) == record.attempt and not record.is_leaving:
            record.is_leaving = True
            record.note = "its nodes are being drained"
            self._state.event("evicted", job, iteration=record.num_done)
            self._state.order(Stop(job=job, attempt=record.attempt))

    def _give_way(self, job: str, now: float) -> None:
        """Ends the process of a job that is preempted. The job holds and requests nothing."""
        record = self._state.jobs[job]
        if record.gives_way is None or not self._rules.may_leave(record.ran_s(now)):
            return
        self._state.become(job, JobState.PREEMPTING)
        self._state.event("preemption_begun", job, by=record.gives_way.to, iteration=record.num_done)
        self._state.order(Stop(job=job, attempt=record.attempt, forget=True))

    def switch(self, job: str, now: float, *, is_warm: bool) -> None:
        """Carries out the job's move, if one is decided. The job is between two iterations."""
        record = self._state.jobs[job]
        place, old = record.next_place, record.group
        if place is None:
            return
        self._state.permits_of(job).drop(job, now)
        rest = self._state.remove(job, old)
        record.moves.append(
            MoveRecord(
                from_group=old,
                from_nodes=record.rollout_nodes,
                to_group=place.group,
                to_nodes=place.rollout_nodes,
                why=place.why,
                iteration=record.num_done,
                is_warm=is_warm,
                left_s=now,
            )
        )
        record.group, record.rollout_nodes, record.why = place.group, place.rollout_nodes, place.why
        record.next_place = None
        self.issue_again(rest, now)
        self._state.changed(job)
        self._state.changed_group(old)
        self._state.event(
            "move_begun",
            job,
            from_group=old,
            to_group=place.group,
            iteration=record.num_done,
            is_warm=is_warm,
        )
        self._permits.grant(old, now)

    def arrived(self, call: Request, now: float) -> None:
        """A phase asks for nodes: the first such call after a move ends its pause."""
        record = self._state.jobs.get(call.job)
        if record is None or not record.moves or record.attempt != call.attempt:
            return
        move = record.moves[-1]
        if move.left_s is None:
            return
        move.pause_s, move.left_s = now - move.left_s, None
        self._state.meter.paused(call.job, move.pause_s)
        self._state.changed(call.job)
        self._state.event("move_ended", call.job, to_group=move.to_group, pause_s=move.pause_s)

    def forget(self, job: str) -> None:
        """The job is over: cancels its move."""
        record = self._state.jobs[job]
        if record.next_place is not None:
            self._state.remove(job, record.next_place.group)
            record.next_place = None

    def _reserve(self, found: Moves, now: float) -> bool:
        """Reserves the places of moves that pay together, all or none. Returns whether it did."""
        issued: list[tuple[MoveTarget, Certificate]] = []
        for target in found.targets:
            try:
                issued.append((target, self._state.certify(target.group, now)))
            except CertificateError as error:
                self._state.event("move_refused", target.job, to_group=target.group.name, reason=str(error))
                logger.info("not moved job=%s to=%s reason=%s", target.job, target.group.name, error)
                return False
        for target, certificate in issued:
            record = self._state.jobs[target.job]
            why = f"moved by {self._state.cluster.policy}, ${found.gain_dollars:.2f} less until all have left"
            self._state.reserve(target.job, target.group, certificate, why, now)
            self._state.event(
                "move_decided", target.job, from_group=record.group, to_group=target.group.name, reason=why
            )
            if record.host is None:
                self.switch(target.job, now, is_warm=False)
        return True

    def issue_again(self, rest: Group, now: float) -> None:
        """Certifies those who stay. Without a certificate the place of the job that left stays empty."""
        if not rest.members:
            return
        rest = self._state.ordered(rest, now)
        try:
            certificate = self._state.certify(rest, now)
        except CertificateError as error:
            logger.info("a place stays empty group=%s reason=%s", rest.name, error)
            return
        self._state.form(rest, certificate, now)
