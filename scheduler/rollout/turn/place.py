"""A turn's place on a worker.

Owns: what a place holds of its worker and its job, and what its tokens say of the worker's speed.
Promises: what was taken is given back once, by end().
Never does: choose a worker, wait (places.py), I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rose.http import LEASE_HEADER
from rose.scheduler.rollout.placing.views import TurnView, WorkerKind
from rose.scheduler.rollout.turn.accounts import JobAccount
from rose.scheduler.rollout.turn.gpu_meter import GpuMeter
from rose.scheduler.rollout.workers.worker import Worker


@dataclass(slots=True, eq=False)
class Place:
    """A turn's place on a worker, which has to be released."""

    worker: Worker
    turn: TurnView
    job: JobAccount
    cost: float
    """Tokens charged to the job in the fair order."""
    missing_tokens: float
    """Prompt tokens of this turn that the worker has to prefill."""
    ahead_tokens: float
    """Prompt tokens of other turns that the worker prefills first."""
    meter: GpuMeter | None = None
    """Counts how long the job uses a serving GPU; None on any other."""
    lease_headers: Mapping[str, str] = field(default_factory=dict)
    """Tells the worker under which of its leases the turn was placed, and no later one: that may be another
    job's. Empty for a worker without leases."""
    headers: bytes = b""
    """The lines of the turn's head that only its worker gets, these among them."""
    is_prefilled: bool = False
    num_tokens: int = 0
    """Tokens generated on it so far."""
    last_token_at: float | None = None

    def received(self, num_tokens: int, now: float, began: float) -> None:
        """Notes tokens that arrived at `now`, in a stream that began at `began`."""
        worker, before = self.worker, self.last_token_at
        if before is None:
            self.first_token(now - began)
        is_paced = before is not None and before > worker.updated_at
        worker.made_tokens(num_tokens, now, now - before if before is not None and is_paced else None)
        self.last_token_at = now
        self.num_tokens += num_tokens

    def first_token(self, took_s: float) -> None:
        """Notes the end of the prefill, `took_s` after it began."""
        if not self.is_prefilled:
            self.worker.prefilled(took_s, self.missing_tokens + self.ahead_tokens)
            self.end_prefill()

    def end(self, now: float) -> None:
        """Notes that the turn has left the worker."""
        self.worker.end_turn(self.job.name)
        if self.meter is not None and self.meter.end(self.worker.id, now):
            self.worker.dividing.discard(self.meter.divide)
        self.job.in_flight -= 1
        self.end_prefill()

    def end_prefill(self) -> None:
        """Notes that this turn's prefill no longer delays others."""
        if not self.is_prefilled:
            self.is_prefilled = True
            self.worker.end_prefill(self.missing_tokens)


def take_place(turn: TurnView, job: JobAccount, cost: float, worker: Worker, now: float) -> Place:
    """Puts a turn on a worker; end() the place afterwards."""
    meter = job.serving_gpus if worker.spec.kind is WorkerKind.SERVING else None
    if meter is not None:
        meter.begin(worker.id, worker.spec.gpus, now, worker.num_routers)
        worker.dividing.add(meter.divide)
    missing_tokens, ahead_tokens = turn.missing_tokens(worker.id), worker.pending_prefill_tokens
    worker.begin_turn(job.name, missing_tokens)
    job.in_flight += 1
    lease = worker.lease
    lease_headers = {LEASE_HEADER: f"{lease.router} {lease.fence}"} if lease is not None else {}
    lines = [f"{name}: {value}\r\n" for name, value in lease_headers.items()]
    headers = worker.openai_headers + "".join(lines).encode()
    return Place(worker, turn, job, cost, missing_tokens, ahead_tokens, meter, lease_headers, headers)
