"""The modelled serving engine: continuous batching with chunked prefill, and the shipped deadlines.

Owns serving requests and their token times. Makes the calls on ServingDeadlines that the engine's scheduler
makes. Never advances time: its caller says when a step begins and ends.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rose.admission.deadlines import ServingDeadlines
from rose.admission.gate import GateSettings, ServingView
from rose.admission.online import OnlineStepTime
from rose.admission.step_time import StepShape, attended_pairs
from rose.types import SLO
from sim.twin.pairs import EngineModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingArrival:
    """A request of the traffic."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    own_slo: SLO | None = None
    is_prefilled: bool = False
    """Whether its KV comes from a prefiller: this instance only decodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """How one request fared; None for what never happened."""

    arrival: ServingArrival
    first_token_s: float | None
    last_token_s: float | None
    max_itl_s: float
    """The longest time between two of its tokens."""

    @property
    def is_complete(self) -> bool:
        """Returns whether its answer came to its end."""
        return self.last_token_s is not None

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens of an answer that came to its end."""
        if self.last_token_s is None or self.first_token_s is None or self.arrival.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.arrival.output_tokens - 1)


def for_prefiller(arrivals: Iterable[ServingArrival]) -> list[ServingArrival]:
    """Returns the same traffic at an instance that computes prompts and first tokens alone."""
    return [replace(arrival, output_tokens=1) for arrival in arrivals]


def for_decoder(
    arrivals: Iterable[ServingArrival], prefilled: Iterable[ServedRequest]
) -> list[ServingArrival]:
    """Returns what reaches the decoder behind a prefiller that served `arrivals` as `prefilled`: a request
    comes with its KV when its first token is out. Sending the KV takes no time here."""
    pairs = zip(arrivals, prefilled, strict=True)
    handed_over = [
        replace(
            whole,
            at_s=served.first_token_s,
            output_tokens=whole.output_tokens - 1,
            is_prefilled=True,
        )
        for whole, served in pairs
        if served.first_token_s is not None and whole.output_tokens > 1
    ]
    return sorted(handed_over, key=lambda arrival: arrival.at_s)


class _Request:
    __slots__ = ("arrival", "first_s", "gap_s", "id", "last_s", "num_out", "prompt_left", "scheduled")

    def __init__(self, request_id: str, arrival: ServingArrival) -> None:
        self.id = request_id
        self.arrival = arrival
        self.prompt_left = 0 if arrival.is_prefilled else arrival.prompt_tokens
        self.scheduled = 0  # prompt tokens in the step that runs
        self.num_out = 0
        self.first_s: float | None = None
        self.last_s = 0.0
        self.gap_s = 0.0

    @property
    def kv_tokens(self) -> int:
        return self.arrival.prompt_tokens + self.arrival.output_tokens

    @property
    def context(self) -> int:
        return self.arrival.prompt_tokens - self.prompt_left + self.num_out

    def emit(self, now: float) -> None:
        if self.first_s is None:
            self.first_s = now
        else:
            self.gap_s = max(self.gap_s, now - self.last_s)
        self.last_s = now
        self.num_out += 1


class TwinServing:
    """Requests in, steps out; first come, first served, decodes before prefill, as vLLM schedules."""

    def __init__(self, model: EngineModel, settings: GateSettings, online: OnlineStepTime) -> None:
        self.model = model
        self.online = online
        self._deadlines = ServingDeadlines(settings, chunk_tokens=model.max_batched_tokens)
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._all: list[_Request] = []
        self._kv_tokens = 0

    @property
    def has_work(self) -> bool:
        """Returns whether a request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    def add(self, arrival: ServingArrival) -> None:
        """A request reaches the scheduler."""
        request = _Request(str(len(self._all)), arrival)
        self._all.append(request)
        self._waiting.append(request)
        if arrival.is_prefilled:
            self._deadlines.arrived_prefilled(request.id, arrival.at_s, arrival.own_slo)
        else:
            self._deadlines.arrived(request.id, arrival.at_s, arrival.prompt_tokens, arrival.own_slo)

    def waited(self, seconds: float, now: float) -> None:
        """Says that it waited for rollout steps until now."""
        self._deadlines.waited(seconds, now)

    def view(self, now: float) -> ServingView:
        """Returns what the engine would publish now."""
        return self._deadlines.view(
            now, self.online.model, has_work=self.has_work, context_tokens=self._context()
        )

    def may_join(self, now: float) -> bool:
        """Returns whether what arrived during a gap may be part of the step that ends it."""
        return self._deadlines.may_join(now, self.online.model, self._context())

    def prefill_room(self, now: float) -> int:
        """Returns how many prompt tokens the next step may take along, beside a rollout engine."""
        return self._deadlines.prefill_room(now, self.online.model, self._context())

    def start_step(self, max_prefill: int | None = None) -> StepShape:
        """Fills the next step, with at most this many prompt tokens."""
        decodes = [r for r in self._running if not r.prompt_left]
        room = self.model.max_batched_tokens - len(decodes)
        if max_prefill is not None:
            room = min(room, max_prefill)
        prefill = 0
        for request in self._running:
            if request.prompt_left:
                prefill += self._schedule(request, room - prefill)
        while self._waiting and prefill < room and self._fits(self._waiting[0]):
            request = self._waiting.popleft()
            self._running.append(request)
            self._kv_tokens += request.kv_tokens
            prefill += self._schedule(request, room - prefill)
            if request.arrival.is_prefilled:
                decodes.append(request)
        return StepShape(
            prefill_tokens=prefill,
            num_decodes=len(decodes),
            context_tokens=sum(r.context for r in decodes),
            prefill_pairs=sum(attended_pairs(r.scheduled, r.context) for r in self._running),
        )

    def end_step(self, now: float, work: StepShape, seconds: float) -> None:
        """The step that start_step() filled is over."""
        self.online.observe(work.observed(seconds))
        produced, finished = [], []
        for request in self._running:
            request.prompt_left -= request.scheduled
            was_prefilled, request.scheduled = request.scheduled > 0, 0
            if request.prompt_left:
                if was_prefilled:
                    self._deadlines.prefilled(request.id, request.prompt_left, request.context)
                continue
            request.emit(now)
            produced.append(request.id)
            if request.num_out >= request.arrival.output_tokens:
                finished.append(request)
        self._deadlines.produced(produced, now)
        self._finish(finished)
        kv_load = self._kv_tokens / self.model.kv_tokens
        self._deadlines.set_load(max(len(self._running) / self.model.max_seqs, kv_load))

    def served(self) -> list[ServedRequest]:
        """Every request so far."""
        return [
            ServedRequest(
                arrival=r.arrival,
                first_token_s=r.first_s,
                last_token_s=r.last_s if r.num_out >= r.arrival.output_tokens else None,
                max_itl_s=r.gap_s,
            )
            for r in self._all
        ]

    def check_integrity(self) -> None:
        """Raises AssertionError if the books disagree."""
        self._deadlines.check_integrity()
        assert self._kv_tokens == sum(r.kv_tokens for r in self._running) <= self.model.kv_tokens
        assert len(self._running) <= self.model.max_seqs
        assert all(r.num_out < r.arrival.output_tokens for r in self._running)

    def _schedule(self, request: _Request, room: int) -> int:
        request.scheduled = min(request.prompt_left, max(0, room))
        return request.scheduled

    def _fits(self, request: _Request) -> bool:
        has_slot = len(self._running) < self.model.max_seqs
        return has_slot and self._kv_tokens + request.kv_tokens <= self.model.kv_tokens

    def _finish(self, finished: list[_Request]) -> None:
        if not finished:
            return
        gone = set(finished)
        self._running = [r for r in self._running if r not in gone]
        self._kv_tokens -= sum(r.kv_tokens for r in finished)
        self._deadlines.finished(r.id for r in finished)

    def _context(self) -> int:
        return sum(r.context for r in self._running)
