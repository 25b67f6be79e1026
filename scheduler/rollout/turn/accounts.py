"""The accounts of the RL jobs that use the router: what each may have, and what it has had.

Owns: JobAccount, JobAccounts, JobAborted, and which job has which key.
Promises: a job that nobody configured has the default limits. The account of a job without work is closed
after `job_idle_s`, but the limits that an operator set for the job are kept.
Never does: place turns, I/O, read a clock.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from rose.errors import RoseError
from rose.messages import key_proof
from rose.scheduler.rollout.placing.borrowing import Borrower
from rose.scheduler.rollout.placing.views import DEFAULT_JOB, TurnView, Wants
from rose.scheduler.rollout.router_config import RouterConfig, RouterJob, contradiction
from rose.scheduler.rollout.turn.gpu_meter import GpuMeter

_DEFAULTS = RouterJob()
_MAX_WANTS = 64
"""Clients may name any run while nothing is published; what is in use is soon noted again."""
EXTENDED, DIVERGED = "extended", "diverged"
_SMOOTHING = 0.1
_FIRST_GUESS_TOKENS = 256.0
"""The expected tokens of a turn before any turn has ended."""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _set_in(spec: RouterJob) -> dict[str, Any]:
    return spec.model_dump(exclude_unset=True)


class JobAborted(RoseError):
    """An operator ended the job's turns."""


class QueueFull(RoseError):
    """The job has too many turns waiting, or too many jobs have turns; its client should try again later."""


class JobAccount:
    """One job's limits and its use of the router. Lives on the router's event loop."""

    def __init__(self, name: str, spec: RouterJob, now: float) -> None:
        self.name = name
        self.spec = spec
        self.is_paused = False
        self.num_routers = 1
        """The routers that share its limits, this one included."""
        self.in_flight = 0
        self.num_turns = 0
        self.num_tokens = 0
        self.serving_gpus = GpuMeter()
        self.next_turns = {EXTENDED: 0, DIVERGED: 0}
        """Later turns of trajectories, by whether their prompts begin with all tokens of the turn before."""
        self.mean_tokens = _FIRST_GUESS_TOKENS
        self.last_active = now
        self.wants: set[Wants] = set()
        """The models and runs that its turns asked for."""
        self.aborts: set[Callable[[], None]] = set()
        """Calling one of these ends one of the job's requests."""

    @property
    def may_start(self) -> bool:
        limit = self.spec.max_in_flight
        return not self.is_paused and (limit is None or self.in_flight < max(1, limit // self.num_routers))

    def expected_tokens(self, max_tokens: int | None) -> float:
        """Returns how many tokens a turn of this job will probably generate."""
        return self.mean_tokens if max_tokens is None else min(self.mean_tokens, float(max_tokens))

    def turn_ended(self, num_tokens: int) -> None:
        self.num_turns += 1
        self.num_tokens += num_tokens
        self.mean_tokens = (1 - _SMOOTHING) * self.mean_tokens + _SMOOTHING * num_tokens

    def borrower(self, wants: Iterable[Wants]) -> Borrower:
        """Returns the job as a borrower of serving GPUs for turns that want this."""
        wanted = frozenset(wants)
        return Borrower(
            job=self.name,
            weight=self.spec.weight,
            priority=self.spec.priority,
            max_serving_gpus=self.spec.max_serving_gpus,
            wants=wanted if wanted and Wants() not in wanted else None,
            run_id=self.spec.run_id,
        )

    def as_json(self, num_queued: int, now: float, *, shows_proof: bool) -> dict[str, Any]:
        """Returns the account as admins see it. `shows_proof`: whether only admins read this. Whoever has the
        proof can try keys against it."""
        key, meter = self.spec.key if shows_proof else None, self.serving_gpus.id
        return {
            **self.spec.model_dump(exclude={"key"}),
            "has_key": self.spec.key is not None,
            "paused": self.is_paused,
            "in_flight": self.in_flight,
            "queued": num_queued,
            "turns": self.num_turns,
            "tokens": self.num_tokens,
            "serving_gpu_s": self.serving_gpus.used_s(now),
            "serving_meter": {"id": meter, "proof": key_proof(key, meter) if key is not None else None},
            "next_turns": dict(self.next_turns),
        }


class JobAccounts:
    """The accounts by the jobs' names."""

    def __init__(self, config: RouterConfig) -> None:
        self._job_idle_s = config.job_idle_s
        self._max_jobs = config.max_jobs
        self._specs: Mapping[str, RouterJob] = {}
        self._by_key: Mapping[bytes, str] = {}
        """The jobs' names by the digests of their keys: a look-up takes as long for a wrong key."""
        self._run_id = config.run_id
        self._others: Sequence[Borrower] = ()
        self.num_routers = 1
        """The routers before the same workers, this one included."""
        self._declared = config.jobs
        """What the router's file says of the jobs."""
        self._had_keys = any(spec.key is not None for spec in config.jobs.values())
        self._take_specs(config.jobs)
        self._jobs: dict[str, JobAccount] = {}
        self._meters: dict[str, GpuMeter] = {}
        """The meters of declared jobs without an account: what they have used of serving GPUs is kept."""
        self.revision = 0
        """Grows when a job comes, leaves, gets other limits or asks for another model or run."""

    def __len__(self) -> int:
        return len(self._jobs)

    def _check_room(self, name: str) -> None:
        """Bounds the number of jobs: anyone may name one, and each has metrics. Raises: QueueFull."""
        is_known = name in self._jobs or name in self._specs or name == DEFAULT_JOB
        if not is_known and len(self._jobs) >= self._max_jobs:
            raise QueueFull(
                f"job {name}: {len(self._jobs)} jobs have turns, which is the limit (max_jobs); send the name"
                " of one of them, declare the job, or try later"
            )

    def __iter__(self) -> Iterator[JobAccount]:
        return iter(list(self._jobs.values()))

    def without_account(self) -> list[JobAccount]:
        """Returns what an account would show of each job that was declared and has none: it is idle."""
        return [self._new(name, 0.0) for name in self._specs if name not in self._jobs]

    def _new(self, name: str, now: float) -> JobAccount:
        job = JobAccount(name, self.spec(name), now)
        job.serving_gpus = self._meters.get(name, job.serving_gpus)
        return job

    def get(self, name: str, now: float) -> JobAccount:
        """Returns a job's account and opens it if there is none."""
        job = self._jobs.get(name)
        if job is None:
            job = self._jobs[name] = self._new(name, now)
            job.num_routers = self.num_routers
            self.revision += 1
        job.last_active = now
        return job

    @asynccontextmanager
    async def abortable(self, name: str, now: float) -> AsyncIterator[None]:
        """Lets an abort of the job end what runs inside, wherever it waits. Raises: JobAborted; QueueFull if
        too many jobs have turns."""
        self._check_room(name)
        job, clock = self.get(name, now), asyncio.timeout(None)

        def abort() -> None:
            clock.reschedule(asyncio.get_running_loop().time())

        job.aborts.add(abort)
        try:
            async with clock:
                yield
        except TimeoutError:
            if clock.expired():
                raise JobAborted(f"job {job.name} was aborted") from None
            raise
        finally:
            job.aborts.discard(abort)

    def asked(self, job: JobAccount, turn: TurnView) -> None:
        """Notes what a turn of the job asks for."""
        if (wants := turn.wants) not in job.wants:
            if len(job.wants) == _MAX_WANTS:
                job.wants.clear()
            job.wants.add(wants)
            self.revision += 1

    def share(self, num_routers: int, others: Sequence[Borrower]) -> None:
        """Divides the jobs' limits among this many routers, and counts the other routers' jobs as borrowers
        of serving GPUs."""
        self.num_routers = num_routers
        for job in self:
            job.num_routers = num_routers
        if others != self._others:
            self._others = others
            self.revision += 1

    @property
    def are_several(self) -> bool:
        """Whether more than one job may have work, at this router or at another."""
        return len(self._jobs) + len(self._others) > 1

    def own_borrowers(self) -> list[Borrower]:
        """Returns the jobs that have work at this router."""
        return [job.borrower(job.wants) for job in self]

    def borrowers(self) -> list[Borrower]:
        """Returns the jobs that have work at any router, each once."""
        found = {each.job: each for each in self.own_borrowers()}
        for other in self._others:
            spec = self.spec(other.job)  # declared alike at all routers
            each = replace(other, run_id=spec.run_id, priority=spec.priority)
            found[each.job] = found[each.job].joined(each) if each.job in found else each
        return list(found.values())

    def find(self, name: str) -> JobAccount | None:
        return self._jobs.get(name)

    def spec(self, name: str) -> RouterJob:
        """Returns what was set for the job, or the defaults."""
        return self._specs.get(name, _DEFAULTS)

    @property
    def has_keys(self) -> bool:
        """Whether any job has a key of its own, or had one in the router's file: whoever takes the last key
        away doesn't let in clients without one."""
        return self._had_keys or bool(self._by_key)

    @property
    def has_runs(self) -> bool:
        """Whether any job has a run of its own."""
        return any(spec.run_id is not None for spec in self._specs.values())

    def holder(self, key: str) -> str | None:
        """Returns the job that has this key."""
        return self._by_key.get(_digest(key)) if self._by_key else None

    def owner(self, run_id: str) -> str | None:
        """Returns a job that has a key of its own and this run."""
        specs = self._specs.items()
        return next((name for name, spec in specs if spec.key is not None and spec.run_id == run_id), None)

    def change(self, name: str, given: RouterJob, now: float) -> JobAccount:
        """Sets those of a job's key, run, model and limits that were given. They outlast its idle times.

        Raises: ValueError if it contradicts another job or the router's run.
        """
        self.put(name, RouterJob(**{**self.spec(name).model_dump(), **_set_in(given)}))
        return self.get(name, now)

    def put(self, name: str, spec: RouterJob | None) -> None:
        """Sets those of a job's key, run, model and limits that are set in `spec`; the rest, or all if it is
        None, is what the router's file says.

        Raises: ValueError if it contradicts another job or the router's run.
        """
        declared, before = self._declared.get(name), self.spec(name).key
        if spec is None or declared is None:
            spec = spec or declared
        else:
            spec = RouterJob(**{**_set_in(declared), **_set_in(spec)})
        others = {other: each for other, each in self._specs.items() if other != name}
        self._take_specs({**others, **({name: spec} if spec is not None else {})})
        job = self._jobs.get(name)
        if job is not None:
            job.spec = self.spec(name)
        if self.spec(name).key != before:  # the name is another job's from now on
            self._meters.pop(name, None)
            if job is not None:
                job.serving_gpus = GpuMeter()
        self.revision += 1

    def forget(self, name: str) -> None:
        """Closes an account and drops what was changed: what the router's file says of the job holds again.

        Raises: KeyError; ValueError while the job has requests, or if the file contradicts another job.
        """
        job = self._jobs.get(name)
        if job is None and name not in self._specs:
            raise KeyError(name)
        if job is not None and (job.in_flight or job.aborts):
            raise ValueError(
                f"job {name} has {max(job.in_flight, len(job.aborts))} requests; abort them first"
            )
        self.put(name, None)
        self._jobs.pop(name, None)
        self._meters.pop(name, None)

    def _take_specs(self, specs: Mapping[str, RouterJob]) -> None:
        if (problem := contradiction(specs, self._run_id)) is not None:
            raise ValueError(problem)
        self._specs = dict(specs)
        self._by_key = {_digest(s.key): name for name, s in specs.items() if s.key is not None}

    def expire(self, queued: dict[str, int], now: float) -> None:
        """Closes the accounts of idle jobs, so that others may have their serving GPUs."""
        for name, job in list(self._jobs.items()):
            is_busy = bool(job.in_flight or queued.get(name, 0) or job.aborts or job.is_paused)
            if is_busy:
                job.last_active = now
            elif now - job.last_active > self._job_idle_s:
                del self._jobs[name]
                if name in self._specs:
                    self._meters[name] = job.serving_gpus
                self.revision += 1
