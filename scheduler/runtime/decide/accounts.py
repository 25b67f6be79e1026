"""Accounts for the time that a running job has used, in the form that the policies read.

Only completed iterations count. A job banks the time that its SLO allowed and that it did not use, and a job
that used more may not be slowed at all. The functions are pure: they take ``now``.
"""

from rose.scheduler.cluster.model import Job
from rose.scheduler.cluster.residents import Resident
from rose.scheduler.runtime.decide.records import JobRecord, JobState


def started(record: JobRecord, now: float, clock: str) -> None:
    """The first attempt begins."""
    if record.since_s is None:
        record.since_s, record.clock = now, clock


def completed(record: JobRecord, now: float) -> None:
    """An iteration is done, and the next one begins."""
    if record.since_s is not None:
        record.spent_s += now - record.since_s
        record.since_s = now


def adopted(record: JobRecord, now: float, clock: str) -> None:
    """A scheduler with this clock takes the job over. Time that passed on another clock counts as none."""
    if record.clock == clock:
        return
    record.clock = clock
    record.since_s = now if record.since_s is not None else None
    for move in record.moves:
        move.left_s = now if move.left_s is not None else None


def resident(record: JobRecord, job: Job, *, may_move: bool, pause_s: float, now: float) -> Resident:
    """Returns the job as of ``now``. A job that is being moved has the pause of the move still before it."""
    work_s = job.solo_s * max(0, job.num_iterations - record.num_done)
    bank_s = job.slo * job.solo_s * record.num_done - record.spent_s
    is_free = may_move and record.next_place is None and record.state is JobState.RUNNING
    found = Resident(
        job=job,
        since_s=now,
        work_s=work_s,
        bank_s=max(bank_s, -(job.slo - 1.0) * work_s),
        stays=not is_free,
    )
    return found.paused(pause_s) if record.next_place is not None else found
