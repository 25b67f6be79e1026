"""What the router writes down about each request: its session, counts, times and span.

Owns: the beginning and the end of a Journey.
Promises: each request that began is counted once, with one result.
Never does: place turns, network I/O.
"""

import time

from rose.scheduler.rollout.formats.bodies import Json
from rose.scheduler.rollout.formats.completions import Single
from rose.scheduler.rollout.router_config import RouterConfig
from rose.scheduler.rollout.turn.accounts import DIVERGED, EXTENDED, JobAccounts
from rose.scheduler.rollout.turn.counters import Counters
from rose.scheduler.rollout.turn.journey import Journey, Route
from rose.scheduler.rollout.turn.latencies import Latencies
from rose.scheduler.rollout.turn.traces import open_traces
from rose.scheduler.rollout.turn.trajectories import Trajectories, about_tokens, needed_context, needed_whole
from rose.scheduler.rollout.workers.models import Catalogue
from rose.scheduler.rollout.workers.worker import Worker

FINISHED = "finished"
CANCELLED = "cancelled"


class TurnRecords:
    """Lives on the router's event loop."""

    def __init__(
        self, config: RouterConfig, jobs: JobAccounts, catalogue: Catalogue, trajectories: Trajectories
    ) -> None:
        self._jobs = jobs
        self._catalogue = catalogue
        self._trajectories = trajectories
        self.counters = Counters()
        self.latencies = Latencies()
        self.traces = open_traces(config.otlp_endpoint) if config.otlp_endpoint is not None else None

    def begin(self, route: Route, single: Single, num_singles: int) -> Journey:
        """Begins one of the single requests of a call."""
        session = self._trajectories.key(single, num_singles, route)
        journey = Journey(
            session=session,
            route=route,
            prompt_tokens=about_tokens(single.prompt) + single.generation.num_tokens,
            max_tokens=single.generation.max_tokens,
        )
        if self._catalogue.have_several_contexts(route.model):
            num_tokens = needed_context(single)
            journey.least_context = self._catalogue.least_context(route.model, num_tokens)
        is_extended = single.generation.extends_last_turn = self._trajectories.is_extended(single, journey)
        if is_extended is not None:
            account = self._jobs.get(route.job, time.monotonic())
            account.next_turns[EXTENDED if is_extended else DIVERGED] += 1
        return self._traced(journey)

    def begin_whole(self, route: Route, body: Json) -> Journey:
        """Begins a request that goes to a worker whole: it has its client's session, or one of its own."""
        session = route.explicit_session
        journey = Journey(
            session=session if session is not None else f"whole-{time.monotonic_ns()}", route=route
        )
        if self._catalogue.have_several_contexts(route.model):
            num_tokens = needed_whole(body)
            journey.least_context = self._catalogue.least_context(route.model, num_tokens)
        return self._traced(journey)

    def _traced(self, journey: Journey) -> Journey:
        if self.traces is not None:
            route = journey.route
            journey.span = self.traces.begin(route.job, journey.session, route.trace_parent)
        return journey

    def finished(
        self,
        single: Single,
        journey: Journey,
        worker: Worker,
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> None:
        """Finishes a turn and remembers where, before its client learns of it and sends the next one."""
        single.generation.finish(finish_reason, stop_reason)
        self._trajectories.ended(single, journey, worker)
        self._jobs.get(journey.route.job, time.monotonic()).turn_ended(single.generation.num_tokens)

    def finished_whole(self, journey: Journey, worker: Worker, num_tokens: int | None) -> None:
        """Remembers where a request that was forwarded whole finished; `num_tokens`: None if it made none."""
        self._trajectories.answered_whole(journey, worker)
        if num_tokens is not None:
            self._jobs.get(journey.route.job, time.monotonic()).turn_ended(num_tokens)

    def ended(self, journey: Journey, result: str, single: Single | None = None) -> None:
        """Counts a request. `result` is FINISHED, CANCELLED or the name of the error that ended it."""
        self.counters.turns[result] += 1
        generation = single.generation if single is not None else None
        num_tokens = generation.num_tokens if generation is not None else 0
        model = journey.route.model if journey.route.model in self._catalogue else None
        is_finished = result == FINISHED
        self.latencies.ended(journey, model, time.monotonic(), num_tokens, is_finished=is_finished)
        if journey.span is not None:
            journey.span.end(result, generation)
