"""Ending a job's requests on an operator's word.

Owns: the scope in which a request can be ended.
Promises: what runs inside ends as JobAborted, wherever it waits; nobody else's request is touched.
Never does: know what a request does.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rose.scheduler.rollout.turn.errors import JobAborted
from rose.scheduler.rollout.turn.jobs import Job


@asynccontextmanager
async def abortable(job: Job) -> AsyncIterator[None]:
    """What runs inside ends when the job is aborted. Raises: JobAborted."""
    clock = asyncio.timeout(None)

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
