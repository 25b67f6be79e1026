"""Turns that wait and the places they get: the router's bookkeeping without its event loop.

Owns: the jobs' queues in fair order, the places taken on workers, who has borrowed which serving GPU.
Promises: each turn gets one place or one error; while several jobs wait, each gets generated tokens in
proportion to its weight; a job that can't be placed holds up nobody. Time is an argument: the service and the
simulator drive the same object.
Never does: I/O, wait, choose a worker (policy.py, cost.py).
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from rose.errors import NoWorkerError
from rose.scheduler.rollout.placing.borrowing import Lendable, assign, lend_idle
from rose.scheduler.rollout.placing.fairness import FairQueue
from rose.scheduler.rollout.placing.sessions import Session
from rose.scheduler.rollout.placing.views import NOBODY, Policy, Turn, WorkerKind, WorkerView, of_model
from rose.scheduler.rollout.turn.jobs import Job, JobTable
from rose.scheduler.rollout.workers.worker import Worker

_EXPIRE_EVERY_S = 1.0

_models = attrgetter("models")

Members = Callable[[], Mapping[str, Worker]]


@dataclass(slots=True, eq=False)
class Place:
    """A turn's place on a worker, to be released."""

    worker: Worker
    turn: Turn
    job: Job
    cost: float
    """Tokens charged for it in the fair order."""
    missing_tokens: float
    """Prompt tokens that the worker has to prefill for it."""
    ahead_tokens: float
    """Those of other turns that it prefills first."""
    is_prefilled: bool = False

    def first_token(self, took_s: float) -> None:
        """The prefill is over, so long after the place was taken."""
        if not self.is_prefilled:
            self.worker.prefilled(took_s, self.missing_tokens + self.ahead_tokens)
            self.end_prefill()

    def end_prefill(self) -> None:
        """Its prefill no longer keeps others waiting."""
        if not self.is_prefilled:
            self.is_prefilled = True
            self.worker.pending_prefill_tokens -= self.missing_tokens


@dataclass(slots=True, eq=False)
class Waiter:
    """A turn in a queue. `done` is called once, with its place or with why it gets none."""

    turn: Turn
    job: Job
    cost: float
    done: Callable[[Place | NoWorkerError], None]
    is_settled: bool = False

    def settle(self, outcome: Place | NoWorkerError) -> None:
        self.is_settled = True
        self.done(outcome)


def probably_cached(session: Session | None, members: Mapping[str, Worker], now: float) -> dict[str, float]:
    """Prompt tokens of a session's next turn that each worker should find in its prefix cache."""
    if session is None:
        return {}
    known = [members[worker] for worker in session.holders if worker in members]
    return {w.id: session.cached_tokens(w.id, w.weight_version, now) * w.cache_trust for w in known}


class Placement:
    """Changed by one thread only."""

    def __init__(self, members: Members, policy: Policy, jobs: JobTable) -> None:
        self._members = members
        self._policy = policy
        self._jobs = jobs
        self._queue: FairQueue[Waiter] = FairQueue()
        self._lent_to: tuple[object, ...] = ()
        self._entitled: dict[str, str] = {}
        self._expire_at = 0.0
        self.is_paused = False
        """Nothing is placed; what runs, runs on."""

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def num_waiting(self, job: str) -> int:
        """Turns in one job's queue."""
        return self._queue.length(job)

    def queued_by_job(self) -> dict[str, int]:
        return self._queue.lengths()

    def place_now(self, turn: Turn, job: Job, cost: float, now: float) -> Place | None:
        """A place at once, as enqueue() and pump() would give it where nobody waits; None: let it wait.

        Raises:
            NoWorkerError: no worker can ever take it.
        """
        if self.is_paused or not job.may_start or (len(self._queue) and self._is_waited_for(turn.model)):
            return None
        members = self._members()
        self._jobs.asked(job, turn.model)
        self._lend(members, now)
        picked = self._policy.pick(turn, [worker.view() for worker in members.values()], now)
        if picked is None:
            return None
        self._queue.settle(job.name, cost)  # with turns of another model it may wait
        return _take(turn, job, cost, members[picked])

    def _is_waited_for(self, model: str | None) -> bool:
        """Whether a turn in the queue may go where one for this model may."""
        if model is None:
            return True
        return any(None in models or model in models for models in self._queue.kinds().values())

    def enqueue(self, waiter: Waiter, *, is_first: bool = False) -> None:
        """Let a turn wait; `is_first`: ahead of its job's others. Call pump() after it."""
        job, model, weight = waiter.job, waiter.turn.model, waiter.job.spec.weight
        self._jobs.asked(job, model)
        self._queue.push(job.name, waiter, cost=waiter.cost, weight=weight, is_first=is_first, kind=model)

    def set_policy(self, policy: Policy) -> None:
        """Place by another policy from now on."""
        self._policy = policy

    def withdraw(self, waiter: Waiter) -> None:
        """Take a turn out of its queue, if it is still there."""
        self._queue.remove(waiter.job.name, waiter)

    def release(self, place: Place, num_tokens: int) -> None:
        """A turn left its worker, having generated so many tokens there. Call pump() after it."""
        worker, job = place.worker, place.job
        assert worker.in_flight > 0, f"worker {worker.id} released more often than acquired"
        worker.tenants[job.name] -= 1
        worker.in_flight -= 1
        job.in_flight -= 1
        place.end_prefill()
        self._queue.settle(job.name, num_tokens - place.cost)

    def pump(self, now: float) -> None:
        """Place what can be placed, in fair order."""
        if self.is_paused or not len(self._queue):
            return
        members = self._members()
        self._lend(members, now)
        self._place(members, now)
        if len(self._queue) and self._lend_idle(members):
            self._place(members, now)

    def _place(self, members: Mapping[str, Worker], now: float) -> None:
        views = {worker_id: worker.view() for worker_id, worker in members.items()}
        while any(view.has_room for view in views.values()):
            asking = _Asking(self._policy, list(views.values()), now)
            taken = self._queue.take(asking, asking.has_room_for)
            if taken is None:
                return
            waiter, picked = taken
            waiter.settle(_take(waiter.turn, waiter.job, waiter.cost, members[picked]))
            views[picked] = members[picked].view()

    def _lend(self, members: Mapping[str, Worker], now: float) -> None:
        """Assign the serving GPUs anew when a job or a worker came, went or has to do with other models."""
        if now >= self._expire_at:
            self._jobs.expire(self._queue.lengths(), now)
            self._expire_at = now + _EXPIRE_EVERY_S
        key = (self._jobs.revision, *members, *map(_models, members.values()))
        if key == self._lent_to:
            return
        self._lent_to = key
        serving = _serving(members)
        held = {worker.id: worker.owner for worker in serving if worker.owner is not None}
        self._entitled = assign([job.borrower(job.models) for job in self._jobs], _lendables(serving), held)
        for worker in serving:
            worker.owner = self._entitled[worker.id]

    def _lend_idle(self, members: Mapping[str, Worker]) -> bool:
        """Lend what jobs leave idle to those whose turns still wait; whether any GPU changed hands."""
        if len(self._jobs) < 2 and all(len(job.models) < 2 for job in self._jobs):
            return False
        serving = _serving(members)
        if not serving:
            return False
        found = [(self._jobs.find(name), models) for name, models in self._queue.kinds().items()]
        waiting = [job.borrower(models) for job, models in found if job is not None and job.may_start]
        owners = {worker.id: worker.owner or NOBODY for worker in serving}
        busy = {worker.id for worker in serving if worker.tenants[worker.owner or NOBODY]}
        lent = lend_idle(waiting, _lendables(serving), self._entitled, owners, busy)
        for worker in serving:
            if worker.owner != lent[worker.id]:  # an assignment makes its view anew
                worker.owner = lent[worker.id]
        return lent != owners

    def lend_anew(self, now: float) -> None:
        """Select the serving GPUs by their usage of late; for the begin of an RL step."""
        members = self._members()
        self._lent_to = ()
        for worker in members.values():
            worker.owner = None
        self._lend(members, now)


def _take(turn: Turn, job: Job, cost: float, worker: Worker) -> Place:
    missing_tokens, ahead_tokens = turn.missing_tokens(worker.id), worker.pending_prefill_tokens
    worker.tenants[job.name] += 1
    worker.in_flight += 1
    worker.pending_prefill_tokens += missing_tokens
    job.in_flight += 1
    return Place(worker, turn, job, cost, missing_tokens, ahead_tokens)


def _serving(members: Mapping[str, Worker]) -> list[Worker]:
    return [worker for worker in members.values() if worker.spec.kind is WorkerKind.SERVING]


def _lendables(serving: Iterable[Worker]) -> list[Lendable]:
    return [
        Lendable(worker=w.id, gpus=w.spec.gpus, kv_usage=w.kv_usage.mean(), models=w.models) for w in serving
    ]


class _Asking:
    """Asks the policy for each waiter in turn, and for none that is like one it found no place for."""

    def __init__(self, policy: Policy, views: Sequence[WorkerView], now: float) -> None:
        self._policy = policy
        self._views = views
        self._now = now
        self._hopeless: set[Hashable] = set()
        self._has_room: dict[str | None, bool] = {}

    def has_room_for(self, model: str | None) -> bool:
        """Whether any worker could take a turn for this model."""
        if model not in self._has_room:
            self._has_room[model] = any(worker.has_room for worker in of_model(model, self._views))
        return self._has_room[model]

    def __call__(self, waiter: Waiter) -> str | None:
        if waiter.is_settled or not waiter.job.may_start:
            return None
        likeness = self._policy.likeness(waiter.turn, self._now)
        if likeness in self._hopeless:
            return None
        try:
            picked = self._policy.pick(waiter.turn, self._views, self._now)
        except NoWorkerError as error:
            waiter.settle(error)
            return None
        if picked is None:
            self._hopeless.add(likeness)
        return picked
