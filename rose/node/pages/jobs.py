"""The page of a router's jobs: what each is entitled to under contention, and what it gets."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError
from rich.console import Group, RenderableType
from rich.text import Text

from rose.http import reason_of
from rose.node.pages.fitted_table import FittedTable

COLUMNS = ("job", "priority", "weight", "entitled", "got", "tok/s", "in flight", "queued", "state")


class JobReading(BaseModel):
    """A job's part of a router's ``GET /admin/jobs``."""

    weight: float
    priority: int = 0
    paused: bool
    in_flight: int
    queued: int
    tokens: int


class _Answer(BaseModel):
    jobs: dict[str, JobReading]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsSample:
    """One router's jobs by name, or the reason why they are not known."""

    router: str
    taken_at_s: float
    jobs: Mapping[str, JobReading] | None = None
    error: str | None = None


def sample_jobs(client: httpx.Client, router: str) -> JobsSample:
    """Asks one router. The client sends the admin key."""
    now = time.monotonic()
    try:
        answer = client.get(f"{router.rstrip('/')}/admin/jobs")
        answer.raise_for_status()
        jobs = _Answer.model_validate_json(answer.content).jobs
        return JobsSample(router=router, taken_at_s=now, jobs=jobs)
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        hint = {401: "; set ROSE_ROUTER_ADMIN_KEY", 404: ": not a router"}.get(code, "")
        return JobsSample(router=router, taken_at_s=now, error=f"status {code}{hint}")
    except ValidationError:
        return JobsSample(router=router, taken_at_s=now, error="its answer is not that of a router")
    except httpx.HTTPError as error:
        return JobsSample(router=router, taken_at_s=now, error=reason_of(error))


def jobs_page(samples: Sequence[JobsSample], before: Mapping[str, JobsSample]) -> RenderableType:
    """Returns one table per router; rates are relative to ``before``.

    entitled: the job's part of the generated tokens while it and the other jobs with turns all want more, by
    weight among those of the highest priority; the others get nothing then. got: its part of the tokens
    generated since ``before``. tok/s: the same as a rate.
    """
    found: list[RenderableType] = []
    for sample in samples:
        if sample.jobs is None:
            found.append(Text(f"{sample.router}: {sample.error}", style="red"))
            continue
        rows = _rows(sample.jobs, *_generated(sample, before.get(sample.router)))
        found.append(FittedTable(COLUMNS, rows, left=("state",), title=f"jobs of {_host(sample.router)}"))
    return Group(*found)


def _host(router: str) -> str:
    return urlsplit(router).netloc or router


def _generated(sample: JobsSample, before: JobsSample | None) -> tuple[Mapping[str, int], float]:
    """Returns the tokens of each job since the sample before, and the seconds between them. A router that was
    restarted, or a job that was forgotten in between, counts from 0 again."""
    if sample.jobs is None or before is None or before.jobs is None:
        return {}, 0.0
    known = {name: job.tokens for name, job in before.jobs.items()}
    tokens = {name: max(0, job.tokens - known.get(name, 0)) for name, job in sample.jobs.items()}
    return tokens, sample.taken_at_s - before.taken_at_s


def _rows(jobs: Mapping[str, JobReading], tokens: Mapping[str, int], elapsed_s: float) -> list[list[str]]:
    entitled, total = _entitled(jobs), sum(tokens.values())
    return [
        [
            name,
            str(job.priority),
            f"{job.weight:g}",
            f"{entitled[name]:.0%}" if name in entitled else "-",
            f"{tokens[name] / total:.0%}" if total else "-",
            f"{tokens[name] / elapsed_s:.0f}" if elapsed_s > 0 else "-",
            str(job.in_flight),
            str(job.queued),
            "paused" if job.paused else "",
        ]
        for name, job in sorted(jobs.items())
    ]


def _entitled(jobs: Mapping[str, JobReading]) -> dict[str, float]:
    """Returns the part of the tokens that each job with turns would get if all of them wanted more."""
    active = {name: job for name, job in jobs.items() if job.in_flight or (job.queued and not job.paused)}
    highest = max((job.priority for job in active.values()), default=0)
    weights = {name: job.weight if job.priority == highest else 0.0 for name, job in active.items()}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}
