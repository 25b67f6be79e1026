"""What the router of the serving fleet should know of the jobs: their keys, their runs, their serving GPUs.

Owns the jobs' declarations and decides how many serving GPUs each job may borrow. A declaration is kept in
the channel until the router is known to have forgotten it, so no restart of the scheduler leaves one behind.
Borrowed GPUs are in no certificate. Pure: does no I/O; makes keys with the function that it is given.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from rose.scheduler.cluster.borrowed import lend
from rose.scheduler.group.model import Group
from rose.scheduler.runtime.job.spec import RunSpec, ServeSpec


class Loan(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the router knows it."""

    job: str
    key: str
    """The key that the job's turns have, and no turns of another or an earlier job."""
    submission: int = 0
    """The job's number: another job that was submitted under this name has another one."""
    run_id: str
    model: str | None = None
    weight: float = 1.0
    priority: int = 0
    """The priority of the job in the queue, by which routers and engines choose between turns as well."""
    max_serving_gpus: int = 0
    is_over: bool = False
    """The router is to forget the job."""


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """How long turns of a job have used serving GPUs."""

    job: str
    submission: int
    """The submission that the loan names under whose key these turns came."""
    meter: str
    """The router's count for this key. It grows, and ends with the router's process."""
    gpu_s: float


class RouterNews(msgspec.Struct, frozen=True, kw_only=True):
    """What was heard of the router."""

    problem: str | None = None
    """Why it can't be told what it should know, for people; None: it knows everything."""
    forgotten: tuple[Loan, ...] = ()
    """Loans that were over, and that it no longer knows."""
    used: tuple[Use, ...] = ()


class Loans:
    """The declarations of all jobs of one cluster."""

    def __init__(self, cluster: ServeSpec, make_key: Callable[[], str]) -> None:
        self._router, self._pools = cluster.router, cluster.to_pools()
        self._make_key = make_key
        self._loans: dict[str, Loan] = {}
        self._rows: dict[str, bytes | None] = {}
        self.is_due = True
        """Jobs have come or gone, or take another time, since the last decision."""
        self.problem: str | None = None
        """Why the router does not know of the loans, for people."""
        self._wanted: tuple[Loan, ...] | None = None
        """None: it has to be made again."""

    def restore(self, name: str, loan: Loan) -> None:
        """Takes over what an earlier scheduler has committed."""
        self._loans[name], self._wanted = loan, None

    @property
    def wanted(self) -> tuple[Loan, ...]:
        """Returns what the router is to know: the same object until that changes."""
        if self._wanted is None:
            self._wanted = tuple(self._loans.values())
        return self._wanted

    def num_gpus(self, job: str) -> int | None:
        """Returns how many serving GPUs the job may borrow now; None: its file does not ask for any."""
        loan = self._loans.get(job)
        return loan.max_serving_gpus if loan is not None and not loan.is_over else None

    def variables(self, spec: RunSpec, submission: int) -> dict[str, str]:
        """Returns the variables by which the processes of a job that is placed reach the router."""
        if self._router is None or spec.borrow is None:
            return {}
        self.is_due = True
        return self._router.variables(self._declared(spec, submission).key)

    def decide(
        self, groups: Iterable[Group], specs: Mapping[str, RunSpec], submission_of: Callable[[str], int]
    ) -> dict[str, int]:
        """Lends again to the members of the groups, and ends the loans of all other jobs.

        specs, submission_of: of these members. Returns the jobs that may borrow more or less than before,
        with their GPUs.
        """
        self.is_due = False
        if self._router is None:
            return {}
        groups = list(groups)
        lent = lend(groups, self._pools)
        members = {member.job.name for group in groups for member in group.members}
        changed = {}
        for name in members:
            if specs[name].borrow is None:
                continue
            loan, num = self._declared(specs[name], submission_of(name)), lent.get(name, 0)
            if loan.max_serving_gpus != num:
                self._put(msgspec.structs.replace(loan, max_serving_gpus=num))
                changed[name] = num
        for name, loan in list(self._loans.items()):
            if name not in members and not loan.is_over:
                self._put(msgspec.structs.replace(loan, max_serving_gpus=0, is_over=True))
        return changed

    def heard(self, news: RouterNews) -> None:
        """The router has been told something, or could not be told."""
        self.problem = news.problem
        for loan in news.forgotten:
            if self._loans.get(loan.job) == loan:  # else a job of this name has come since
                del self._loans[loan.job]
                self._rows[f"loan:{loan.job}"], self._wanted = None, None

    def take_rows(self) -> dict[str, bytes | None]:
        """Returns the rows that have changed since the last call."""
        rows, self._rows = self._rows, {}
        return rows

    def _declared(self, spec: RunSpec, submission: int) -> Loan:
        loan, borrow = self._loans.get(spec.name), spec.borrow
        assert borrow is not None
        if loan is None or loan.is_over:
            loan = Loan(
                job=spec.name,
                key=self._make_key(),
                submission=submission,
                run_id=borrow.run_id,
                model=borrow.model,
                weight=borrow.weight,
                priority=spec.priority,
            )
            self._put(loan)
        elif (loan.submission, loan.priority) != (submission, spec.priority):
            # Schedulers of earlier versions noted neither.
            loan = msgspec.structs.replace(loan, submission=submission, priority=spec.priority)
            self._put(loan)
        return loan

    def _put(self, loan: Loan) -> None:
        self._loans[loan.job] = loan
        self._rows[f"loan:{loan.job}"], self._wanted = msgspec.json.encode(loan), None
