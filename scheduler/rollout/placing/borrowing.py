"""Which job may use which serving GPU.

Owns: the assignment of serving GPUs to jobs, and the window over their KV usage. Promises: a serving GPU has
at most one job, which can use its weights or whose weights it can get. No job exceeds its N_serving. GPUs
with the lowest recent KV usage are assigned first. Jobs of higher priority come first, and weights count
among jobs of equal priority. A job keeps its GPUs until another job is entitled to them. As few GPUs as
possible get other weights. Never does: I/O, read a clock.

Source: ROSE §4, system workflow. There the user bounds how many serving GPUs a job may borrow. The GPUs with
the lowest recent KVC usage over a fixed window are selected, and each is assigned to at most one job. Sharing
the GPUs by priority and weight where the bounds exceed their number is an addition.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from rose.scheduler.rollout.placing.views import NOBODY, AdapterVersions, Wants, version_for
from rose.types import WeightVersion

_NUM_BUCKETS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrower:
    """A job that has work."""

    job: str
    weight: float = 1.0
    priority: int = 0
    max_serving_gpus: int | None = None
    """N_serving; None: as many as there are."""
    wants: AbstractSet[Wants] | None = None
    """The models and runs that its turns ask for; None: any will do."""
    run_id: str | None = None
    """The run that was declared for it, whose weights a GPU may get for it; None: it takes what there is."""
    published: AbstractSet[Wants] = frozenset()
    """Those of `wants` for which base weights are too old, because a version has been published."""

    def joined(self, other: "Borrower") -> "Borrower":
        """Returns the job with what its turns at another router want as well."""
        both = self.wants is not None and other.wants is not None
        return replace(self, wants=(self.wants or set()) | (other.wants or set()) if both else None)

    def can_use(self, each: "Lendable") -> bool:
        """Returns whether the GPU has weights that this job has turns for, or can get them."""
        return self.finds_weights(each) or self._can_switch(each)

    def finds_weights(self, each: "Lendable") -> bool:
        """Returns whether the GPU has weights that this job has turns for, or base weights that will do."""
        if self.wants is None:
            return True
        met = [wants for wants in self.wants if wants.are_met(each.models, each.version, each.adapters)]
        return any(not self._is_base_withheld(wants, each) for wants in met)

    def _is_base_withheld(self, wants: Wants, each: "Lendable") -> bool:
        """Whether the GPU has base weights for this, and others have been published."""
        if version_for(wants.model, each.version, each.adapters) is not None:
            return False
        if wants in self.published:
            return True
        is_own = self.run_id is not None and wants.run_id == self.run_id
        return is_own and each.base_for is not None and self.run_id not in each.base_for

    def _can_switch(self, each: "Lendable") -> bool:
        run_id, models = self.run_id, each.models
        if run_id is None or not each.follows or self._is_refused(run_id, each) or self.wants is None:
            return False
        wanted = [wants.model for wants in self.wants if wants.run_id == run_id]
        return any(model is None or models is None or model in models for model in wanted)

    def _is_refused(self, run_id: str, each: "Lendable") -> bool:
        """Whether the GPU could not get the run's weights. That it found none says nothing any more once
        there are some."""
        has_published = any(wants.run_id == run_id for wants in self.published)
        found_none = each.base_for is not None and run_id in each.base_for
        return run_id in each.refused and not (has_published and found_none)

    def may_take(self, each: "Lendable", *, is_home: bool) -> bool:
        """Returns whether the job may have the GPU now, which is idle: changing its weights takes time, so it
        first keeps those that it has for as long. `is_home`: whether the job is entitled to it. Otherwise it
        has to be idle for as long, too, since its own job may come back to it."""
        if self.finds_weights(each):
            return True
        rested_s = each.kept_s if is_home else min(each.kept_s, each.idle_s)
        return self._can_switch(each) and rested_s >= each.switch_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Lendable:
    """A serving GPU, or several that run one engine."""

    worker: str
    gpus: int = 1
    kv_usage: float = 0.0
    """Serving's mean use of its KV memory over the window, 0 to 1."""
    models: Collection[str] | None = None
    """The models that it serves; None: it does not say."""
    version: WeightVersion | None = None
    """The weights that it has; None: base weights."""
    adapters: AdapterVersions = field(default_factory=dict)
    follows: bool = False
    """Whether it can get the weights of the run of the job that it is lent to."""
    refused: frozenset[str] = frozenset()
    """The runs whose weights it could not get lately."""
    base_for: frozenset[str] | None = None
    """The runs for whose jobs base weights will do, because they have published nothing; None: all."""
    switch_s: float = 0.0
    """The time that it takes to get another run's weights, as far as is known."""
    kept_s: float = math.inf
    """How long it has had the weights of its run."""
    idle_s: float = math.inf
    """How long no turn has run on it."""


class UsageWindow:
    """The mean of a value over a sliding window, kept in a bounded number of buckets."""

    def __init__(self, window_s: float) -> None:
        self._bucket_s = window_s / _NUM_BUCKETS
        self._buckets: deque[tuple[int, float, int]] = deque()

    def add(self, value: float, now: float) -> None:
        number = int(now / self._bucket_s)
        if self._buckets and self._buckets[-1][0] == number:
            _, total, count = self._buckets.pop()
            self._buckets.append((number, total + value, count + 1))
        else:
            self._buckets.append((number, value, 1))
        while self._buckets[0][0] <= number - _NUM_BUCKETS:
            self._buckets.popleft()

    def mean(self) -> float:
        """Returns the mean; 0 while nothing is known."""
        means = [total / count for _, total, count in self._buckets]
        return sum(means) / len(means) if means else 0.0


def assign(
    borrowers: Sequence[Borrower], lendables: Sequence[Lendable], held: Mapping[str, str]
) -> dict[str, str]:
    """Returns worker -> job, NOBODY where no job may have it. `held`: the assignment so far."""
    owners: dict[str, str] = {}
    given = {each.job: 0 for each in borrowers}
    for able, group in _by_weights(borrowers, lendables):
        left = _entitlements(able, group, given)
        for each in group:  # a job that has to give some back keeps the idlest
            job = held.get(each.worker, NOBODY)
            if left.get(job, 0) >= each.gpus and any(b.job == job and b.can_use(each) for b in able):
                owners[each.worker] = job
                left[job] -= each.gpus
        for fits in (Borrower.finds_weights, Borrower.can_use):  # what changes no weights comes first
            for each in group:
                if each.worker in owners:
                    continue
                wanting = [b for b in able if left[b.job] >= each.gpus and fits(b, each)]
                if wanting:
                    heir = min(wanting, key=lambda b: (-b.priority, -left[b.job], b.job)).job
                    owners[each.worker] = heir
                    left[heir] -= each.gpus
    return {each.worker: owners.get(each.worker, NOBODY) for each in lendables}


def _by_weights(
    borrowers: Sequence[Borrower], lendables: Sequence[Lendable]
) -> list[tuple[list[Borrower], list[Lendable]]]:
    """Returns groups of GPUs that the same jobs can use, idlest first, with these jobs: those with the same
    models and run, or with the same models where they can get any run's weights.

    Groups that the fewest jobs can use come first, so that jobs with a choice get their part elsewhere.
    """
    groups: dict[tuple[frozenset[str] | None, str | frozenset[str] | None], list[Lendable]] = {}
    for each in sorted(lendables, key=_idlest):
        models = frozenset(each.models) if each.models is not None else None
        run_id = each.version.run_id if each.version is not None else None
        groups.setdefault((models, each.refused if each.follows else run_id), []).append(each)
    found = [([b for b in borrowers if any(map(b.can_use, group))], group) for group in groups.values()]
    return sorted(found, key=lambda pair: len(pair[0]))


def _idlest(each: Lendable) -> tuple[float, str]:
    return (each.kv_usage, each.worker)


def lend_idle(
    waiting: Sequence[Borrower],
    lendables: Sequence[Lendable],
    entitled: Mapping[str, str],
    owners: Mapping[str, str],
    busy: AbstractSet[str],
) -> dict[str, str]:
    """Returns worker -> job for now, with GPUs that their owners leave idle lent to jobs whose turns wait.

    `waiting`: jobs with turns that found no place, with what these turns want. `entitled`: the result of
    `assign`. `owners`: who has each GPU now. `busy`: workers on which their owner has turns running.

    A job gets a GPU that it is entitled to back as soon as it waits; other turns there run to their end.
    """
    lent = dict(owners)
    held: Counter[str] = Counter()
    for each in lendables:
        held[owners[each.worker]] += each.gpus
    by_job = {borrower.job: borrower for borrower in waiting}
    by_usage = sorted(lendables, key=_idlest)

    def hand(each: Lendable, job: str) -> None:
        held[lent[each.worker]] -= each.gpus
        held[job] += each.gpus
        lent[each.worker] = job

    for each in by_usage:  # a GPU that its owner's waiting turns can't use counts against the owner's bound
        owner = by_job.get(lent[each.worker])
        if owner is not None and each.worker not in busy and not owner.can_use(each):
            hand(each, NOBODY)
    for each in by_usage:
        home = by_job.get(entitled[each.worker])
        if home is None or home.job == lent[each.worker] or not home.may_take(each, is_home=True):
            continue
        if _fits(home, held[home.job] + each.gpus):
            hand(each, home.job)
    for each in by_usage:
        if each.worker in busy or lent[each.worker] in by_job:
            continue
        fitting = [
            b for b in waiting if b.may_take(each, is_home=False) and _fits(b, held[b.job] + each.gpus)
        ]
        fitting = [b for b in fitting if b.finds_weights(each)] or fitting
        if fitting:
            hand(each, min(fitting, key=lambda b: _rank(b, held[b.job] + each.gpus)).job)
    return lent


def _rank(borrower: Borrower, gpus: int) -> tuple[int, float, str]:
    """Orders the jobs that could have a GPU, the next first. `gpus`: what the job would have with it."""
    return (-borrower.priority, gpus / borrower.weight, borrower.job)


def _fits(borrower: Borrower, gpus: int) -> bool:
    return borrower.max_serving_gpus is None or gpus <= borrower.max_serving_gpus


def _entitlements(
    borrowers: Sequence[Borrower], lendables: Sequence[Lendable], given: dict[str, int]
) -> dict[str, int]:
    """Returns how many of these GPUs each job is entitled to, within its bound: by priority, and by
    weight among equal ones.

    `given`: the GPUs of other groups by job, to which these are added.
    """
    before = {each.job: given[each.job] for each in borrowers}
    for each in lendables:
        open_ = [b for b in borrowers if b.can_use(each) and _fits(b, given[b.job] + each.gpus)]
        if open_:
            first = min(open_, key=lambda b: _rank(b, given[b.job] + each.gpus))
            given[first.job] += each.gpus
    return {job: given[job] - gpus for job, gpus in before.items()}
