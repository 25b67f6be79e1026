"""Running jobs go from one group to another, where that is cheaper: decided when a job comes or ends, done
when the job is between two iterations.

Owns: moves, from the policy's decision to the first request in the new group. Promises: a job that is to move
has its place there from the decision on, in an order that is certified with it, or it stays; what it has
begun it ends where it is, and it is never a holder in both; nobody's iteration is lost or run twice, whoever
is killed in between. Pure: takes ``now``. Never: chooses a move.

Between two iterations a job holds and asks for nothing, and its phases' states lie in host memory. The answer
to the call that completes the iteration names the job's place; asked again, it names it again. A job that
crashes before is between two iterations as well.
"""

import logging

from rose.scheduler.cluster.candidates import EPSILON
from rose.scheduler.cluster.choice import POLICIES
from rose.scheduler.cluster.model import Group, SloKind
from rose.scheduler.group.certificate import Certificate, CertificateError
from rose.scheduler.runtime.channel.messages import Completed, Request, Stop
from rose.scheduler.runtime.decide.permit_calls import PermitCalls
from rose.scheduler.runtime.decide.placing import Moves, Residents, Target
from rose.scheduler.runtime.decide.records import MoveRecord
from rose.scheduler.runtime.decide.state import State

logger = logging.getLogger(__name__)


class MoveCalls:
    """On one state."""

    def __init__(self, state: State, permits: PermitCalls) -> None:
        self._state = state
        self._permits = permits

    def rearrange(self, now: float) -> None:
        """A job has come or ended: decides on as many moves as the policy has for one such event."""
        left = POLICIES[self._state.cluster.policy](0).max_moves
        while left > 0:
            residents = self._state.residents(now)
            found = self._state.groups.rearranged(self._state.drained, residents, now, left)
            if found is None or not self._reserve(found, residents, now):
                return
            left -= len(found.targets)

    def completed(self, client: str, call: Completed, now: float) -> None:
        """An iteration is safe: the answer says where the job is from here on."""
        refusal = self._permits.completed(call, now)
        if refusal is not None:
            self._state.answer(client, call.seq, refusal)
            return
        record = self._state.jobs[call.job]
        if record.num_done < self._state.specs[call.job].iterations:
            self._leave(call.job, now)
        body = {
            "group": record.group,
            "rollout_nodes": list(record.rollout_nodes),
            "ends": record.is_leaving,
        }
        self._state.answer(client, call.seq, body=body)

    def _leave(self, job: str, now: float) -> None:
        """A process stays on its host: on another one, the job's next attempt goes on."""
        record = self._state.jobs[job]
        if record.next_place is None:
            return
        hosts = self._state.hosts_of(record.next_place.group, record.next_place.rollout_nodes)
        if hosts is None:  # none for its nodes there at the moment
            return
        record.is_leaving = hosts[0] != record.host
        self.switch(job, now, is_warm=not record.is_leaving)
        if record.is_leaving:
            self._state.order(Stop(job=job, attempt=record.attempt, forget=True))

    def switch(self, job: str, now: float, *, is_warm: bool) -> None:
        """The job is between two iterations: if it is to move, it does now."""
        record = self._state.jobs[job]
        place, old = record.next_place, record.group
        if place is None:
            return
        self._state.permits_of(job).drop(job, now)
        rest = self._state.groups.remove(job, old)
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
        self._issue_again(rest, now)
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
        """A phase asks for nodes: the first one after a move ends its pause."""
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
        """The job is over: it has no place that it goes to."""
        record = self._state.jobs[job]
        if record.next_place is not None:
            self._state.groups.remove(job, record.next_place.group)
            record.next_place = None

    def _reserve(self, found: Moves, residents: Residents, now: float) -> bool:
        """Takes the places of moves that pay together, all or none. Whether they are taken."""
        issued: list[tuple[Target, Certificate]] = []
        for target in found.targets:
            try:
                issued.append((target, self._certify(target.group, residents)))
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

    def _certify(self, group: Group, residents: Residents) -> Certificate:
        """Also for those who have less left of their SLO than an iteration's. Raises: CertificateError."""
        certificate = self._state.certify(group)
        for name, bound in certificate.bounds.items():
            promised_s = bound.longest_s if bound.slo_kind is SloKind.ITERATION else bound.mean_s
            limit_s = residents[name].limit_s
            if self._state.groups.leaving.get(name) != group.name and promised_s > limit_s * (1 + EPSILON):
                raise CertificateError(
                    f"group {group.name}: job {name} could be promised an iteration of {promised_s:.6g} s, "
                    f"what is left of its SLO allows {limit_s:.6g} s",
                    job=name,
                    bound_s=promised_s,
                    limit_s=limit_s,
                )
        return certificate

    def _issue_again(self, rest: Group, now: float) -> None:
        """The certificate of those who stay; without one, the turn of the one that left stays empty."""
        if not rest.members:
            return
        try:
            certificate = self._state.certify(rest)
        except CertificateError as error:
            logger.info("a turn stays empty group=%s reason=%s", rest.name, error)
            return
        self._state.form(rest, certificate, now)
