"""Ending a job's requests on an operator's word.

Owns: JobAborted, and the scope in which a request can be ended.
Promises: whatever runs inside the scope ends with JobAborted, wherever it waits. No other job's request is
touched.
Never does: know what a request does.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rose.errors import RoseError
from rose.scheduler.rollout.turn.accounts import JobAccount


class JobAborted(RoseError):
    """An operator ended the job's turns."""


@asynccontextmanager
async def abortable(job: JobAccount) -> AsyncIterator[None]:
    """Lets an abort of the job end what runs inside. Raises: JobAborted."""
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
