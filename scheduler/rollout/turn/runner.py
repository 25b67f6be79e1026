"""A turn's way through the router: begin, place, attempt, release, end.

Owns: the loop of attempts of one single request, and the fan-out of a call.
Promises: a turn ends with exactly one answer or one error. It holds no place afterwards, also when its client
leaves.
Never does: parse clients' HTTP (http/service.py), choose workers (placing/policy.py), speak to workers
(attempt.py).
"""

import asyncio
import time

from rose.errors import RoseError, WorkerError
from rose.scheduler.rollout.formats.completions import ClientCall, Single
from rose.scheduler.rollout.formats.shape import Sink
from rose.scheduler.rollout.turn.accounts import JobAccounts
from rose.scheduler.rollout.turn.attempt.attempt import AttemptParts, TurnAttempt
from rose.scheduler.rollout.turn.attempt.endings import EndKind
from rose.scheduler.rollout.turn.dispatch import Dispatcher
from rose.scheduler.rollout.turn.journey import Journey, Route
from rose.scheduler.rollout.turn.records import CANCELLED, FINISHED
from rose.scheduler.rollout.turn.rerouting import Rerouting
from rose.scheduler.rollout.turn.trajectories import about_tokens, answering_version
from rose.scheduler.rollout.workers.worker import Worker

_CANT_RESUME = (
    "the worker was lost after tokens were streamed; the state of stop strings and parsers can't be carried"
    " to another worker, and that of structured output and penalties only to an engine of ROSE's, so send"
    " the request again"
)


class TurnRunner:
    """Runs turns. Lives on the router's event loop."""

    def __init__(
        self,
        parts: AttemptParts,
        jobs: JobAccounts,
        dispatcher: Dispatcher,
        rerouting: Rerouting,
    ) -> None:
        self._parts = parts
        self._records = parts.records
        self._jobs = jobs
        self._dispatcher = dispatcher
        self._rerouting = rerouting

    async def complete(self, call: ClientCall, route: Route, sink: Sink | None) -> str | None:
        """Runs all single requests of a call and returns the model's name.

        The answers are in the singles' generations.

        Raises:
            RoseError: the first error of any single request; the others are cancelled.
        """
        async with self._jobs.abortable(route.job, time.monotonic()):
            if len(call.singles) == 1:  # the common case needs no task of its own
                return await self._run(call.singles[0], 1, route, sink)
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._run(single, len(call.singles), route, sink))
                        for single in call.singles
                    ]
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
            return tasks[0].result()

    async def _run(self, single: Single, num_singles: int, route: Route, sink: Sink | None) -> str | None:
        journey = self._records.begin(route, single, num_singles)
        result = CANCELLED
        try:
            await self._attempt_until_finished(single, journey, sink)
            if sink is not None:
                await sink.end(single, journey.served_model)
            result = FINISHED
            return journey.served_model
        except RoseError as error:
            result = type(error).__name__
            raise
        finally:
            self._records.ended(journey, result, single)

    async def _attempt_until_finished(self, single: Single, journey: Journey, sink: Sink | None) -> None:
        generation = single.generation
        while not (generation.token_ids and generation.is_exhausted):
            if journey.num_attempts:
                self._begin_next(single, journey, is_streamed=sink is not None)
            is_begun_stream = sink is not None and generation.token_ids
            if generation.is_told_reasoning or (is_begun_stream and generation.continues_state):
                self._dispatcher.keep_to_takers(journey)
            first_version = generation.spans[0].weight_version if generation.spans else None
            place = await self._dispatcher.place(journey, first_version)
            is_pinned, model = self._dispatcher.pins_versions, journey.route.model
            version = answering_version(place.worker, model) if is_pinned else None
            try:
                if generation.token_ids:
                    self._resume_on(place.worker, single, is_streamed=sink is not None)
                ending = await TurnAttempt(self._parts, single, place, journey, sink, version).run()
            finally:
                self._dispatcher.release(place, place.num_tokens)
            if ending.kind is EndKind.FINISHED:
                return
            self._rerouting.after(ending, place.worker, journey, place.num_tokens)
        generation.finish("length", None)  # it alone was lost, with a worker or with another router

    def _begin_next(self, single: Single, journey: Journey, *, is_streamed: bool) -> None:
        """Prepares the next attempt: it resumes where the last one was cut, or starts again.

        Raises:
            WorkerError: the turn has to start again, but its client has been sent tokens.
        """
        generation, num_tokens = single.generation, single.generation.num_tokens
        if is_streamed and num_tokens and generation.must_restart:
            raise WorkerError(_CANT_RESUME)
        restarts = generation.num_restarts
        generation.begin()
        if generation.num_restarts > restarts:
            self._count_restart(num_tokens)
        journey.prompt_tokens = about_tokens(single.prompt) + generation.num_tokens

    def _resume_on(self, worker: Worker, single: Single, *, is_streamed: bool) -> None:
        """Makes sure that the worker can take over the turn's state; if it can't, the turn starts again.

        Raises:
            WorkerError: the turn has to start again, but its client has been sent tokens.
        """
        generation, num_tokens = single.generation, single.generation.num_tokens
        if generation.continues_state and not worker.continues_state:
            if is_streamed:
                raise WorkerError(_CANT_RESUME)
            generation.restart()
            self._count_restart(num_tokens)
        else:
            self._records.counters.resumed += 1
            self._records.counters.tokens_kept += num_tokens

    def _count_restart(self, num_tokens: int) -> None:
        self._records.counters.restarted += 1
        self._records.counters.tokens_dropped += num_tokens
