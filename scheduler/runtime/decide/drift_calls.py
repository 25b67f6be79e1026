"""Certifies a job again that takes longer than its file says, with the times that were measured.

Owns the record of how long each job lately held its nodes and was away between two phases. Certifies with the
longest of these times. The job stays if its group can be certified with them. Otherwise only this job is
placed like a new one, and continues there after its last iteration. If no place can be certified, it stays,
and its note says so. Never shortens times and never moves another job. Pure: takes ``now``.

Only what this scheduler has seen counts: a restart delays the decision by `NUM_HOLDS` iterations. Source:
WEAVE §5, robustness to drift, where the job is always stopped and placed as a new one.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from rose.config import parse_config
from rose.errors import ConfigError, PoolsFull
from rose.scheduler.group.certificate import CertificateError
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.messages import Completed, Release, Request
from rose.scheduler.runtime.decide.job_calls import JobCalls
from rose.scheduler.runtime.decide.permit_calls import PermitCalls
from rose.scheduler.runtime.decide.state import State
from rose.scheduler.runtime.job.spec import RunSpec

logger = logging.getLogger(__name__)

NUM_TIMES = 3
"""A time has drifted when this many in a row were too long; a single one may be an accident."""
MARGIN = 0.1
MIN_S = 1.0
"""A time is too long if it exceeds the file's by this share and by this many seconds."""


class _What(NamedTuple):
    """A part of an iteration: a phase, or the time after it until the job asks for the next phase."""

    phase: Phase
    is_outside: bool

    def __str__(self) -> str:
        return f"the time after {self.phase}" if self.is_outside else self.phase.value

    def of_file(self, spec: RunSpec) -> float:
        """Returns the time that the job's file says."""
        if self.is_outside:
            return spec.after_s(self.phase)
        seconds = spec.phases[self.phase].seconds
        assert seconds is not None, "no job is placed without times"
        return seconds


class DriftCalls:
    """Watches Request, Release and Completed calls for drift."""

    def __init__(self, state: State, permits: PermitCalls, jobs: JobCalls) -> None:
        self._state = state
        self._permits = permits
        self._jobs = jobs
        self._last: dict[str, dict[_What, deque[float]]] = {}
        """The last times of each job, in seconds."""
        self._released: dict[str, tuple[Phase, float]] = {}
        """The last phase of each job, and when it ended, until the job asks for the next."""

    def asked(self, call: Request, now: float) -> None:
        """All ranks of a job ask for a phase, for the first time or again."""
        phase, ended_s = self._released.pop(call.job, (call.phase, now))
        if phase is not call.phase:
            self._note(call.job, _What(phase, is_outside=True), now - ended_s)

    def releasing(self, call: Release, now: float) -> None:
        """A phase is about to release its nodes."""
        if self._permits.why_not(call) is not None:
            return
        held_s = self._state.permits_of(call.job).held_s(call.job, call.epoch, now, call.rank)
        if held_s is not None:
            self._note(call.job, _What(call.phase, is_outside=False), held_s)
            self._released[call.job] = call.phase, now

    def _note(self, job: str, what: _What, seconds: float) -> None:
        times = self._last.setdefault(job, defaultdict(lambda: deque(maxlen=NUM_TIMES)))
        times[what].append(seconds)

    def completing(self, call: Completed, now: float) -> None:
        """An iteration is about to be safe: the job holds nothing and can be certified with other times."""
        if self._permits.why_not(call) is not None or not self._permits.is_last(call):
            return
        times, spec = self._drifted(call.job), self._state.specs[call.job]
        if not times or self._state.jobs[call.job].next_place or call.iteration + 1 >= spec.iterations:
            return
        for what in times:
            del self._last[call.job][what]
        said = ", ".join(
            f"{what} takes {seconds:.6g} s, its file says {what.of_file(spec):.6g}"
            for what, seconds in times.items()
        )
        content = _with_times(self._state.jobs[call.job].spec, spec, times)
        measured = parse_config(content, RunSpec, "job")
        try:
            where = self._stay(measured, now) or self._go(measured, now)
        except (ConfigError, PoolsFull, CertificateError) as error:
            self._say(call.job, "drift_refused", f"{said}; with that {error}")
            return
        self._state.jobs[call.job].spec = content
        self._state.learn(call.job, measured)
        self._say(call.job, "drifted", f"{said}: {where}")

    def forget(self, job: str) -> None:
        """The attempt has ended, or another job has the name."""
        self._last.pop(job, None)
        self._released.pop(job, None)

    def _drifted(self, job: str) -> dict[_What, float]:
        """Returns what was too long, with the longest of its last times."""
        times = {}
        for what, last in self._last.get(job, {}).items():
            file_s = what.of_file(self._state.specs[job])
            if len(last) == NUM_TIMES and min(last) > file_s + max(MIN_S, MARGIN * file_s):
                times[what] = max(last)
        return times

    def _stay(self, spec: RunSpec, now: float) -> str | None:
        """Certifies the job's group with the times; None if it can't be certified."""
        group = self._state.groups.by_name[self._state.jobs[spec.name].group]
        job = spec.to_job(self._state.cluster.to_pools())
        members = (replace(each, job=job) if each.job.name == spec.name else each for each in group.members)
        group = self._state.ordered(replace(group, members=tuple(members), iterations=()), now)
        try:
            certificate = self._state.certify(group, now)
        except CertificateError:
            if spec.group is not None:
                raise
            return None
        self._state.form(group, certificate, now)
        return f"certified again in {group.name}"

    def _go(self, spec: RunSpec, now: float) -> str:
        """Reserves a place elsewhere, which the job takes when the iteration is safe."""
        groups = self._state.groups
        old = groups.by_name[self._state.jobs[spec.name].group]
        groups.put(old.without(spec.name))
        try:
            placed, certificate = self._jobs.place(spec, now, avoid=old.name)
        finally:
            groups.put(old)
        self._state.reserve(spec.name, placed.group, certificate, f"drifted; {placed.why}", now)
        return f"goes from {old.name} to {placed.group.name}"

    def _say(self, job: str, event: str, note: str) -> None:
        logger.info("%s job=%s %s", event, job, note)
        self._state.jobs[job].note = note
        self._state.changed(job)
        self._state.event(event, job, reason=note)


def _with_times(content: Mapping[str, Any], spec: RunSpec, times: Mapping[_What, float]) -> dict[str, Any]:
    """Returns the job's file with these times. Those of phases without nodes stay as they are."""
    phases, outside = dict(content["phases"]), spec.outside.model_dump()
    for (phase, is_outside), seconds in times.items():
        if is_outside:
            outside[f"after_{phase}_s"] += seconds - spec.after_s(phase)
        else:
            phases[phase] = {**phases[phase], "seconds": seconds}
    return {**content, "phases": phases, "outside": outside}
