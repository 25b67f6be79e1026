"""What a running job has used of its time, as the policies want to know it.

Owns: the sums in its record. Promises: work and budget of the iterations that are done count, what a job did
not use of its SLO or used too much; one that is over its budget may not be slowed at all. Pure: takes
``now``. Never: decides.
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
    """By a scheduler with this clock: what has passed on another one counts as none."""
    if record.clock == clock:
        return
    record.clock = clock
    record.since_s = now if record.since_s is not None else None
    for move in record.moves:
        move.left_s = now if move.left_s is not None else None


def resident(record: JobRecord, job: Job, *, may_move: bool, pause_s: float, now: float) -> Resident:
    """The job as of ``now``; one that is being moved has the pause of that before it."""
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
