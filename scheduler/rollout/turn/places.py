"""Places on workers: which turns wait for one, and which gets the next.

Owns: the jobs' queues in fair order, and which job has borrowed which serving GPU.
Promises: each turn gets one place or one error. While several jobs of one priority wait, each gets generated
tokens in proportion to its weight, and a job that can't be placed holds up no other. Time is an argument, so
that the service and the simulator drive the same object.
Never does: I/O, wait, choose a worker (placing/policy.py, placing/cost.py).
"""

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from rose.errors import NoWorkerError
from rose.scheduler.rollout.placing.borrowing import Borrower, Lendable, assign, lend_idle
from rose.scheduler.rollout.placing.fairness import FairQueue
from rose.scheduler.rollout.placing.fleet import Fleet
from rose.scheduler.rollout.placing.policy import PlacementPolicy, constraints
from rose.scheduler.rollout.placing.views import (
    NO_RUN,
    NOBODY,
    TurnView,
    Wants,
    WorkerKind,
    WorkerView,
    of_model,
    version_for,
)
from rose.scheduler.rollout.turn.accounts import JobAccount, JobAccounts
from rose.scheduler.rollout.turn.place import Place, take_place
from rose.scheduler.rollout.workers.members import Members
from rose.scheduler.rollout.workers.worker import Worker

logger = logging.getLogger(__name__)

_EXPIRE_EVERY_S = 1.0
_GIVE_UP_EVERY_S = 1.0
_WARN_AFTER_S = 10.0
"""Workers take a version within seconds, so turns that wait longer for one may wait for weights that never
come."""
_WARN_EVERY_S = 60.0
"""The shortest time between two such warnings of a run."""
_SHOWN_WORKERS = 8
"""An error names this many workers."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A turn in a queue. `done` is called once, with its place or with the reason why it gets none."""

    turn: TurnView
    job: JobAccount
    cost: float
    done: Callable[[Place | NoWorkerError], None]
    is_settled: bool = False

    def settle(self, outcome: Place | NoWorkerError) -> None:
        self.is_settled = True
        self.done(outcome)


class Places:
    """Lives on one thread."""

    def __init__(
        self,
        members: Members,
        policy: PlacementPolicy,
        jobs: JobAccounts,
        weights_s: float = math.inf,
    ) -> None:
        """`members`: the workers by id, as they are from now on. `weights_s`: how long a turn waits while no
        worker has weights that it may use."""
        self._members = members
        self._weights_s = weights_s
        self._missing_since: dict[Wants, float] = {}
        self._warned_at: dict[str, float] = {}
        """The runs whose weights turns have waited for, with the time of the last warning."""
        self._policy = policy
        self._jobs = jobs
        self._queue: FairQueue[Waiter, Wants] = FairQueue(
            lambda job: jobs.spec(job).weight, lambda job: jobs.spec(job).priority
        )
        self._lent_at: tuple[int, ...] | None = None
        """The revisions of jobs, fleet, loans and announcements at which GPUs were assigned; None: they have
        to be again."""
        self._entitled: dict[str, str] = {}
        self._expire_at = 0.0
        self._give_up_at = 0.0
        self.is_paused = False
        """No turn is placed while this is set; running turns go on."""

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def num_waiting(self, job: str) -> int:
        """Returns the length of one job's queue."""
        return self._queue.length(job)

    def is_waited_for(self, worker: Worker, job: str) -> bool:
        """Returns whether turns of a job wait that may begin, and could on this worker."""
        account = self._jobs.find(job)
        if self.is_paused or account is None or not account.may_start:
            return False
        kinds = self._queue.kinds().get(job, ())
        return bool(kinds) and self._informed(account.borrower(kinds)).can_use(_lendable(worker))

    def queued_by_job(self) -> dict[str, int]:
        return self._queue.lengths()

    def place_now(self, turn: TurnView, job: JobAccount, cost: float, now: float) -> Place | None:
        """Returns the place that enqueue() and pump() would give at once; None if the turn has to wait.

        Raises:
            NoWorkerError: no worker can ever take the turn.
        """
        if self.is_paused or not job.may_start or (len(self._queue) and self._are_waited_for(turn.wants)):
            return None
        members = self._members
        self._jobs.asked(job, turn)
        self.lend(now)
        picked = self._policy.pick(turn, members.fleet, now)
        if picked is None:
            return None
        self._queue.settle(job.name, cost)  # its turns for other models may be waiting
        return take_place(turn, job, cost, members[picked], now)

    def _are_waited_for(self, wants: Wants) -> bool:
        """Whether a queued turn could run on a worker whose weights meet this."""
        waiting = [other for kinds in self._queue.kinds().values() for other in kinds]
        return any(_are_alike(wants.model, o.model) and _are_alike(wants.run_id, o.run_id) for o in waiting)

    def enqueue(self, waiter: Waiter, *, since: float = math.inf) -> None:
        """Queues a turn. `since`: when it first came, if it comes again. Call pump() afterwards."""
        job, wants = waiter.job, waiter.turn.wants
        self._jobs.asked(job, waiter.turn)
        alike = (waiter.turn.pinned_version, waiter.turn.least_context)
        self._queue.push(job.name, waiter, kind=wants, cost=waiter.cost, since=since, likeness=alike)

    def set_policy(self, policy: PlacementPolicy) -> None:
        """Places turns by another policy from now on."""
        self._policy = policy

    def withdraw(self, waiter: Waiter) -> None:
        """Takes a turn out of its queue, if it is still there."""
        self._queue.remove(waiter.job.name, waiter)

    def release(self, place: Place, num_tokens: int, now: float) -> None:
        """Frees a place on which `num_tokens` were generated. Call pump() afterwards."""
        place.end(now)
        self._queue.settle(place.job.name, num_tokens - place.cost)

    def pump(self, now: float) -> None:
        """Places every turn that can be placed, in fair order."""
        self._members.refresh()  # now, and not in the next turn's way
        if not len(self._queue):
            self._missing_since.clear()
        if self.is_paused or not len(self._queue):
            return
        self.lend(now)
        self._place(now)
        if len(self._queue) and self._lend_idle(now):
            self._place(now)
        if now >= self._give_up_at:
            self._give_up(now)

    def _give_up(self, now: float) -> None:
        """Ends the turns for which no worker has had weights for `weights_s`."""
        self._give_up_at = now + _GIVE_UP_EVERY_S
        fleet = self._members.fleet
        waiting = {wants for kinds in self._queue.kinds().values() for wants in kinds}
        versions = self._policy.versions
        declared = {job.spec.run_id for job in self._jobs} - {None}
        missing = [
            wants
            for wants in waiting
            if not versions.are_held(wants, fleet.cohorts)
            or (wants.run_id in declared and self._is_base_withheld(wants))
        ]
        self._missing_since = {wants: self._missing_since.get(wants, now) for wants in missing}
        for wants, since in self._missing_since.items():
            if now - since >= _WARN_AFTER_S:
                self._warn(wants, since, now)
            if now - since < self._weights_s:
                continue
            problems = [worker.run_problem(wants.run_id) for worker in self._members.values()]
            reasons = [each for each in problems if each is not None]
            error = NoWorkerError(_no_weights(wants, fleet.views, self._weights_s, reasons))
            for waiter in self._queue.of_kind(wants):
                if not waiter.is_settled:
                    waiter.settle(error)

    def _warn(self, wants: Wants, since: float, now: float) -> None:
        """Says now and then that turns wait for a version of a run that no worker has."""
        for newest, held in self._policy.versions.outrun(wants, self._members.fleet.cohorts):
            run = newest.run_id
            if now - self._warned_at.get(run, -math.inf) >= _WARN_EVERY_S:
                self._warned_at[run] = now
                logger.warning(
                    "turns have waited %.0f s for weights %s, and the newest that workers have are %s. If the"
                    " run began again under its old id, such as at a new relay, make the router forget the"
                    " old one: DELETE /admin/runs/%s",
                    *(now - since, newest, held, run),
                )

    def _is_base_withheld(self, wants: Wants) -> bool:
        """Whether the only weights there are for this are base weights of GPUs that are to get its run's."""
        for worker in self._members.values():
            if not wants.are_met(worker.models, worker.weight_version, worker.adapters):
                continue
            has_base = version_for(wants.model, worker.weight_version, worker.adapters) is None
            if not has_base or worker.base_for is None or wants.run_id in worker.base_for:
                return False
        return True

    def _place(self, now: float) -> None:
        members = self._members
        while members.fleet.is_open:
            asking = _Asking(self._policy, members.fleet, now)
            taken = self._queue.take(asking, asking.is_open_for, self._may_start, asking.is_last)
            if taken is None:
                return
            waiter, picked = taken
            waiter.settle(take_place(waiter.turn, waiter.job, waiter.cost, members[picked], now))

    def _may_start(self, job: str) -> bool:
        account = self._jobs.find(job)
        return account is not None and account.may_start

    def lend(self, now: float, *, begins_anew: bool = False) -> None:
        """Assigns the serving GPUs again if a job or a worker came, left or changed its models or run.

        `begins_anew`: chooses all of them again by their recent usage, as at the beginning of an RL step.
        """
        if now >= self._expire_at:
            self._jobs.expire(self._queue.lengths(), now)
            self._expire_at = now + _EXPIRE_EVERY_S
        members, num_announced = self._members, self._policy.versions.known.num_changes
        lent_at = (self._jobs.revision, members.fleet.revision, members.num_contests, num_announced)
        if lent_at == self._lent_at and not begins_anew:
            return
        self._lent_at = lent_at
        serving = _serving(self._members)
        held = {w.id: w.holder for w in serving if w.holder is not None and not begins_anew}
        borrowers = [self._informed(each) for each in self._jobs.borrowers()]
        self._entitled = assign(borrowers, [_lendable(w, now) for w in serving], held)
        for worker in serving:
            self._hand(worker, self._entitled[worker.id])

    def _informed(self, borrower: Borrower) -> Borrower:
        """Returns the borrower with what is known to be published of what it wants."""
        wants, versions = borrower.wants or (), self._policy.versions
        return replace(borrower, published=frozenset(w for w in wants if versions.is_base_too_old(w)))

    def _hand(self, worker: Worker, job: str) -> None:
        worker.lend(job, self._jobs.spec(job).run_id)

    def _lend_idle(self, now: float) -> bool:
        """Lends GPUs that their jobs leave idle to jobs with waiting turns. Returns whether any changed
        hands."""
        if not self._jobs.are_several and all(len(job.wants) < 2 for job in self._jobs):
            return False
        serving = _serving(self._members)
        if all(_is_settled(worker, self._entitled) for worker in serving):
            return False  # a full fleet, at which every heartbeat looks while turns wait
        found = [(self._jobs.find(name), kinds) for name, kinds in self._queue.kinds().items()]
        waiting = [
            self._informed(job.borrower(kinds)) for job, kinds in found if job is not None and job.may_start
        ]
        lendables = [_lendable(w, now) for w in serving]
        held = {w.id: w.holder or NOBODY for w in serving}
        busy = {w.id for w in serving if w.tenants[w.owner or NOBODY]}
        used = {w.id for w in serving if w.num_routers > 1}
        lent = lend_idle(waiting, lendables, self._entitled, held, busy | used)
        # A job that finds no idle GPU asks for one that another router uses, and gets it after that one.
        lent = lend_idle(waiting, lendables, self._entitled, lent, busy)
        changed = [worker for worker in serving if worker.owner != lent[worker.id]]
        for worker in changed:
            self._hand(worker, lent[worker.id])
        return bool(changed)


def _serving(members: Mapping[str, Worker]) -> list[Worker]:
    return [worker for worker in members.values() if worker.spec.kind is WorkerKind.SERVING]


def _is_settled(worker: Worker, entitled: Mapping[str, str]) -> bool:
    """Whether a GPU runs turns of the job that is entitled to it, so that it can't be lent to another."""
    owner = worker.owner
    return owner is not None and owner == entitled[worker.id] and worker.tenants[owner] > 0


def _lendable(worker: Worker, now: float = math.inf) -> Lendable:
    """Returns a serving GPU as it can be lent now, or at any later time."""
    return Lendable(
        worker=worker.id,
        gpus=worker.spec.gpus,
        kv_usage=worker.kv_usage.mean(),
        models=worker.models,
        version=worker.weight_version,
        adapters=worker.adapters,
        follows=worker.follows_loans,
        refused=worker.refused_runs,
        base_for=worker.base_for,
        switch_s=worker.switch_s,
        kept_s=now - worker.run_since,
        idle_s=worker.idle_s(now),
    )


def _are_alike(one: str | None, other: str | None) -> bool:
    return one is None or other is None or one == other


def _weights_of(worker: WorkerView, model: str | None) -> str:
    version = version_for(model, worker.weight_version, worker.adapters)
    if version is not None:
        return str(version)
    return "base weights, and waits for its run's" if worker.awaits_weights else "base weights"


def _no_weights(wants: Wants, workers: Sequence[WorkerView], weights_s: float, reasons: Sequence[str]) -> str:
    """Returns the error for a turn whose weights no worker has."""
    able = of_model(wants.model, workers)
    held = [f"{worker.id} {_weights_of(worker, wants.model)}" for worker in able]
    more = f" and {len(held) - _SHOWN_WORKERS} more" if len(held) > _SHOWN_WORKERS else ""
    shown = f"{', '.join(held[:_SHOWN_WORKERS])}{more}" if held else "none"
    model = f" of model {wants.model}" if wants.model is not None else ""
    needed = f"weights of run {wants.run_id}" if wants.run_id else "weights"
    if wants.run_id == NO_RUN:
        needed = "base weights, all that a job without a run may use"
    is_adapter = wants.model is not None and wants.model == wants.run_id
    flag, named = ("--adapter", "model") if is_adapter else ("--run", "job's run")
    if reasons:
        return f"for {weights_s:g} s no worker{model} has had {needed}; it can't get them: {reasons[0]}"
    has_older = any(
        version is not None and wants.run_id in (None, version.run_id)
        for version in (version_for(wants.model, each.weight_version, each.adapters) for each in able)
    )
    fix = f"let a worker follow the run (rose serve {flag}), or correct the {named}"
    if has_older:
        fix = (
            "if the trainer publishes faster than workers take versions, set version_mode max-lag, or have it"
            f" wait for them (num_workers); otherwise {fix}"
        )
    return (
        f"for {weights_s:g} s no worker{model} has had {needed} that are new enough; workers: {shown}; {fix}"
    )


class _Asking:
    """Asks the policy about waiting turns, but not about turns like one for which it found no worker."""

    def __init__(self, policy: PlacementPolicy, fleet: Fleet, now: float) -> None:
        self._policy = policy
        self._fleet = fleet
        self._now = now
        self._hopeless: set[Hashable] = set()
        self._is_open: dict[Wants, bool] = {}

    def is_open_for(self, wants: Wants) -> bool:
        """Returns whether any worker whose weights meet this may take a turn of some job."""
        if wants not in self._is_open:
            able = [c for c in self._fleet.cohorts if wants.are_met(c.models, c.version, c.adapters)]
            self._is_open[wants] = any(cohort.is_open for cohort in able)
        return self._is_open[wants]

    def is_last(self, waiter: Waiter) -> bool:
        """Whether, if this turn can go nowhere, later ones with its wants, pinned version and least context
        can't either. That holds if the turn avoids no worker and the policy looks at nothing else."""
        turn, now = waiter.turn, self._now
        is_free = not waiter.is_settled and not turn.avoid_until
        return is_free and self._policy.likeness(turn, now) == constraints(turn, now)

    def __call__(self, waiter: Waiter) -> str | None:
        if waiter.is_settled:
            return None
        likeness = self._policy.likeness(waiter.turn, self._now)
        if likeness in self._hopeless:
            return None
        try:
            picked = self._policy.pick(waiter.turn, self._fleet, self._now)
        except NoWorkerError as error:
            waiter.settle(error)
            return None
        if picked is None:
            self._hopeless.add(likeness)
        return picked
