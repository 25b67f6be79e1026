"""Certifies a job anew whose phases take longer than its file says, with the times that were measured.

Owns how long each job held its nodes lately, and uses the longest times. The job stays if its group can be
certified with them. Otherwise it alone is placed like a new job and continues there after its last iteration.
If no place can be certified, it stays, and its note says so. Times are never shortened, and no other job is
moved. Pure: takes ``now``.

Only what this scheduler has seen counts: a restart delays the decision by `NUM_HOLDS` iterations. Source:
WEAVE §5, robustness to drift, where the job is always stopped and placed as a new one.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rose.config import parse_config
from rose.errors import ConfigError, PoolsFull
from rose.scheduler.cluster.model import POOL_PHASES, Phase
from rose.scheduler.group.certificate import CertificateError
from rose.scheduler.runtime.channel.messages import Completed, Release
from rose.scheduler.runtime.decide.job_calls import JobCalls
from rose.scheduler.runtime.decide.permit_calls import PermitCalls
from rose.scheduler.runtime.decide.state import State
from rose.scheduler.runtime.job.spec import RunSpec

logger = logging.getLogger(__name__)

NUM_HOLDS = 3
"""A phase has drifted when this many holds in a row were too long; a single one may be an accident."""
MARGIN = 0.1
MIN_S = 1.0
"""A hold is too long if it exceeds the file's time by this share and by this many seconds."""


class DriftCalls:
    """Watches Release and Completed calls for drift."""

    def __init__(self, state: State, permits: PermitCalls, jobs: JobCalls) -> None:
        self._state = state
        self._permits = permits
        self._jobs = jobs
        self._holds: dict[str, dict[Phase, deque[float]]] = {}
        """The last holds of each job and phase, in seconds."""

    def releasing(self, call: Release, now: float) -> None:
        """A phase is about to release its nodes."""
        if self._permits.why_not(call) is not None:
            return
        held_s = self._state.permits_of(call.job).held_s(call.job, call.epoch, now, call.rank)
        if held_s is not None:
            last = self._holds.setdefault(call.job, defaultdict(lambda: deque(maxlen=NUM_HOLDS)))
            last[call.phase].append(held_s)

    def completing(self, call: Completed, now: float) -> None:
        """An iteration is about to be safe: the job holds nothing and can be certified with other times."""
        if self._permits.why_not(call) is not None or not self._permits.is_last(call):
            return
        times, spec = self._drifted(call.job), self._state.specs[call.job]
        if not times or self._state.jobs[call.job].next_place or call.iteration + 1 >= spec.iterations:
            return
        del self._holds[call.job]
        said = ", ".join(
            f"{phase} takes {seconds:.6g} s, its file says {spec.phases[phase].seconds:.6g}"
            for phase, seconds in times.items()
        )
        content = _with_times(self._state.jobs[call.job].spec, times)
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
        self._holds.pop(job, None)

    def _drifted(self, job: str) -> dict[Phase, float]:
        """Returns the phases that were too long, with the longest of their last times."""
        times = {}
        for phase, last in self._holds.get(job, {}).items():
            if phase in POOL_PHASES and len(last) == NUM_HOLDS:
                file_s = self._state.specs[job].phases[phase].seconds
                if file_s is not None and min(last) > file_s + max(MIN_S, MARGIN * file_s):
                    times[phase] = max(last)
        return times

    def _stay(self, spec: RunSpec, now: float) -> str | None:
        """Certifies the job's group with the times; None if it can't be certified."""
        group = self._state.groups.by_name[self._state.jobs[spec.name].group]
        job = spec.to_job(self._state.cluster.pools.to_pools())
        members = (replace(each, job=job) if each.job.name == spec.name else each for each in group.members)
        group = replace(group, members=tuple(members), periods_s=())
        try:
            certificate = self._state.certify(group, now)
        except CertificateError:
            if spec.group is not None:
                raise
            return None
        self._state.form(group, certificate, now)
        return f"certified anew in {group.name}"

    def _go(self, spec: RunSpec, now: float) -> str:
        """Reserves a place elsewhere, which the job takes when the iteration is safe."""
        groups = self._state.groups
        old = groups.by_name[self._state.jobs[spec.name].group]
        groups.put(replace(old, members=tuple(each for each in old.members if each.job.name != spec.name)))
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


def _with_times(content: Mapping[str, Any], times: Mapping[Phase, float]) -> dict[str, Any]:
    phases = content["phases"]
    changed = {phase: {**phases[phase], "seconds": seconds} for phase, seconds in times.items()}
    return {**content, "phases": {**phases, **changed}}
