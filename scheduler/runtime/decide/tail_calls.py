"""Answers progress reports of rollouts, and decides when a rollout's tail should move onto fewer nodes.

Owns the jobs' past response lengths and the thresholds chosen from them. A job is told to move only if a
replay of the group's past predicts a gain and the tail still ends within its certified time. The freed nodes
go to other jobs only after the job says that it has moved. Pure: takes ``now``.
"""

from typing import NamedTuple

import msgspec

from rose.scheduler.group.certificate import Certificate
from rose.scheduler.group.model import Phase
from rose.scheduler.group.tail_nodes import NUM_PASSES, NodeTail, choose_threshold, kept_now
from rose.scheduler.runtime.channel.messages import Moved, Report
from rose.scheduler.runtime.decide.permit_calls import PermitCalls
from rose.scheduler.runtime.decide.state import State

NUM_PAST = NUM_PASSES


class _Choice(NamedTuple):
    """A job's threshold, and the group that it was chosen for: the gain depends on who can use the nodes."""

    certificate: Certificate
    present: frozenset[str]
    threshold: float | None


class TailCalls:
    """Answers Report and Moved calls."""

    def __init__(self, state: State, permits: PermitCalls) -> None:
        self._state = state
        self._permits = permits
        self._thresholds: dict[str, _Choice] = {}
        """Dropped when a member of the group has new lengths."""

    def report(self, client: str, call: Report, now: float) -> None:
        """Records progress. The answer names the nodes to move to, if the tail should move."""
        refusal = self._permits.why_not(call)
        if refusal is not None:
            self._state.answer(client, call.seq, refusal)
            return
        self._state.progress[call.job] = (call.num_done, call.num_total)
        self._permits.progressed(call.job, now)
        if call.lengths:
            self._learn(call.job, call.lengths)
        keep = self._keep(call, now)
        self._state.answer(client, call.seq, body={"keep": list(keep)} if keep is not None else {})

    def moved(self, client: str, call: Moved, now: float) -> None:
        """The tail runs on fewer nodes now, so other jobs may use the rest."""
        refusal = self._permits.why_not(call)
        if refusal is None:
            permits = self._state.permits_of(call.job)
            refusal = permits.begin_tail(call.job, call.epoch, call.keep, now)
        if refusal is None:
            group = self._state.jobs[call.job].group
            self._state.changed_group(group)
            self._state.event("moved", call.job, keep=call.keep, epoch=call.epoch)
            self._permits.grant(group, now)
        self._state.answer(client, call.seq, refusal)

    def _learn(self, job: str, lengths: list[int]) -> None:
        past = [*self._state.past.get(job, []), lengths][-NUM_PAST:]
        self._state.past[job] = past
        self._state.keep(f"past:{job}", msgspec.json.encode(past))
        for member in self._state.groups.by_name[self._state.jobs[job].group].members:
            self._thresholds.pop(member.job.name, None)

    def _keep(self, call: Report, now: float) -> tuple[int, ...] | None:
        permits, speed = self._state.permits_of(call.job), self._state.specs[call.job].speed
        hold = permits.holds.get(call.job)
        is_tail = hold is not None and hold.phase is Phase.ROLLOUT and not permits.has_moved(call.job)
        if speed is None or not is_tail or call.num_tokens is None or call.num_done >= call.num_total:
            return None
        threshold = self._threshold(call.job)
        if threshold is None or call.num_done < threshold * call.num_total:
            return None
        group = permits.present()
        [job] = [member.job for member in group.members if member.job.name == call.job]
        return kept_now(
            group,
            call.job,
            speed,
            num_left=call.num_total - call.num_done,
            reached_tokens=call.num_tokens,
            left_s=job.rollout_s - (now - permits.granted_s(call.job)),
        )

    def _threshold(self, job: str) -> float | None:
        permits = self._state.permits_of(job)
        certificate, group = permits.certificate, permits.present()
        present = frozenset(member.job.name for member in group.members)
        known = {name: each for name, each in self._thresholds.items() if each[:2] == (certificate, present)}
        if job not in known:
            tails = {
                member.job.name: NodeTail(speed=speed, past=past)
                for member in group.members
                if (speed := self._state.specs[member.job.name].speed) is not None
                and (past := self._state.past.get(member.job.name))
            }
            others = {name: each.threshold for name, each in known.items()}
            chosen = choose_threshold(group, certificate, job, tails, others) if job in tails else None
            known[job] = self._thresholds[job] = _Choice(certificate, present, chosen)
        return known[job].threshold
