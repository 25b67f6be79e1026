"""The accounts of the RL jobs that use the router: what each may have, and what it has had.

Owns: JobAccount, JobAccounts, JobAborted.
Promises: a job that nobody configured has the default limits. The account of a job without work is closed
after `job_idle_s`, but the limits that an operator set for the job are kept.
Never does: place turns, I/O, read a clock.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from rose.errors import RoseError
from rose.scheduler.rollout.placing.borrowing import Borrower
from rose.scheduler.rollout.router_config import JobSpec, RouterConfig

_SMOOTHING = 0.1
_FIRST_GUESS_TOKENS = 256.0
"""The expected tokens of a turn before any turn has ended."""


class JobAborted(RoseError):
    """An operator ended the job's turns."""


class JobAccount:
    """One job's limits and its use of the router. Lives on the router's event loop."""

    def __init__(self, name: str, spec: JobSpec, now: float) -> None:
        self.name = name
        self.spec = spec
        self.is_paused = False
        self.in_flight = 0
        self.num_turns = 0
        self.num_tokens = 0
        self.mean_tokens = _FIRST_GUESS_TOKENS
        self.last_active = now
        self.models: set[str | None] = set()
        """The models that its turns asked for; None stands for any model."""
        self.aborts: set[Callable[[], None]] = set()
        """Calling one of these ends one of the job's requests."""

    @property
    def may_start(self) -> bool:
        limit = self.spec.max_in_flight
        return not self.is_paused and (limit is None or self.in_flight < limit)

    def expected_tokens(self, max_tokens: int | None) -> float:
        """Returns how many tokens a turn of this job will probably generate."""
        return self.mean_tokens if max_tokens is None else min(self.mean_tokens, float(max_tokens))

    def turn_ended(self, num_tokens: int) -> None:
        self.num_turns += 1
        self.num_tokens += num_tokens
        self.mean_tokens = (1 - _SMOOTHING) * self.mean_tokens + _SMOOTHING * num_tokens

    def borrower(self, models: Iterable[str | None]) -> Borrower:
        """Returns the job as a borrower of serving GPUs for these models."""
        wanted = frozenset(models)
        return Borrower(
            job=self.name,
            weight=self.spec.weight,
            max_serving_gpus=self.spec.max_serving_gpus,
            models=wanted if wanted and None not in wanted else None,
        )

    def as_json(self, num_queued: int) -> dict[str, Any]:
        return {
            **self.spec.model_dump(),
            "paused": self.is_paused,
            "in_flight": self.in_flight,
            "queued": num_queued,
            "turns": self.num_turns,
            "tokens": self.num_tokens,
        }


class JobAccounts:
    """The accounts by the jobs' names."""

    def __init__(self, config: RouterConfig) -> None:
        self._job_idle_s = config.job_idle_s
        self._specs = dict(config.jobs)
        self._jobs: dict[str, JobAccount] = {}
        self.revision = 0
        """Grows when a job comes, leaves, gets other limits or asks for another model."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[JobAccount]:
        return iter(list(self._jobs.values()))

    def get(self, name: str, now: float) -> JobAccount:
        """Returns a job's account and opens it if there is none."""
        job = self._jobs.get(name)
        if job is None:
            job = self._jobs[name] = JobAccount(name, self._specs.get(name, JobSpec()), now)
            self.revision += 1
        job.last_active = now
        return job

    @asynccontextmanager
    async def abortable(self, name: str, now: float) -> AsyncIterator[None]:
        """Lets an abort of the job end what runs inside, wherever it waits. Raises: JobAborted."""
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

    def asked(self, job: JobAccount, model: str | None) -> None:
        """Notes that a turn of the job asks for this model; None: for any."""
        if model not in job.models:
            job.models.add(model)
            self.revision += 1

    def find(self, name: str) -> JobAccount | None:
        return self._jobs.get(name)

    def change(self, name: str, spec: JobSpec, now: float) -> JobAccount:
        """Sets a job's limits, which outlast its idle times."""
        self._specs[name] = spec
        job = self.get(name, now)
        job.spec = spec
        self.revision += 1
        return job

    def forget(self, name: str) -> None:
        """Closes an account and drops its limits. Raises: KeyError; ValueError while the job has requests."""
        job = self._jobs[name]
        if job.in_flight or job.aborts:
            raise ValueError(
                f"job {name} has {max(job.in_flight, len(job.aborts))} requests; abort them first"
            )
        del self._jobs[name]
        self.revision += 1
        self._specs.pop(name, None)

    def expire(self, queued: dict[str, int], now: float) -> None:
        """Closes the accounts of idle jobs, so that others may have their serving GPUs."""
        for name, job in list(self._jobs.items()):
            is_busy = bool(job.in_flight or queued.get(name, 0) or job.aborts or job.is_paused)
            if is_busy:
                job.last_active = now
            elif now - job.last_active > self._job_idle_s:
                del self._jobs[name]
                self.revision += 1
