"""What an attempt that did not finish means for its worker and for the rest of its request.

Owns: the consequences of each kind of ending. Promises: after each reroute the request avoids that worker for
`avoid_s`. If only the lease lacked room, it waits until the worker has answered with the next lease. Other
turns keep a worker that can't answer this request. Never does: choose the next worker (placing/policy.py).
"""

import logging
import time

from rose.errors import NoWorkerError, WorkerError
from rose.scheduler.rollout.router_config import RouterConfig
from rose.scheduler.rollout.turn.attempt.endings import Ending, EndKind
from rose.scheduler.rollout.turn.counters import Counters
from rose.scheduler.rollout.turn.journey import Journey, Refused
from rose.scheduler.rollout.workers.models import Catalogue
from rose.scheduler.rollout.workers.worker import Worker

logger = logging.getLogger(__name__)

_WORKERS_FAULT = (EndKind.STALLED, EndKind.LOST, EndKind.FAILED)
_SERVING_NEEDS_IT = (EndKind.RECLAIMED, EndKind.ENGINE_STALL, EndKind.ABORTED)
_COUNTED_FAILURES = (EndKind.LOST, EndKind.FAILED)


class Rerouting:
    """Lives on the router's event loop."""

    def __init__(self, config: RouterConfig, counters: Counters, catalogue: Catalogue) -> None:
        self._config = config
        self._catalogue = catalogue
        self._counters = counters

    def after(self, ending: Ending, worker: Worker, journey: Journey, num_tokens: int = 0) -> None:
        """Notes why an attempt ended after `num_tokens`, so that the request can be placed again.

        Raises:
            Refused: the worker says that the request itself is wrong.
            WorkerError: workers have failed this request `max_failures` times.
            NoWorkerError: for `weights_s` each worker has said that it lacks the request's adapter.
        """
        is_refusal = ending.kind in (EndKind.REFUSED, EndKind.TOO_LONG)
        if is_refusal and not (ending.kind is EndKind.TOO_LONG and self._goes_to_longer(worker, journey)):
            raise Refused(ending.status, ending.detail)
        self._counters.reroutes[ending.kind.value] += 1
        logger.info("rerouting cause=%s worker=%s session=%s", ending.kind.value, worker.id, journey.session)
        if ending.kind is EndKind.UNLEASED:
            worker.unleased()
        if ending.kind in (EndKind.UNLEASED, EndKind.TOO_LONG):
            return
        now = time.monotonic()
        self._check_adapter(ending, worker, journey, now)
        journey.avoid_until[worker.id] = now + self._config.avoid_s
        # Steps that serving lets through one by one may make tokens too seldom for the router's own clock.
        is_held = ending.kind is EndKind.STALLED and worker.is_held_by_serving
        worker.num_errors += ending.kind is EndKind.FAILED and not num_tokens
        if ending.kind in _SERVING_NEEDS_IT or is_held:
            worker.yielded()
        elif ending.kind in _WORKERS_FAULT and (num_tokens or not self._fails_alone(ending, worker, now)):
            worker.suspect(now, self._config)
        if ending.kind is EndKind.DEACTIVATED:
            worker.deactivated()
        if ending.kind in _COUNTED_FAILURES:
            journey.num_failures += 1
            if journey.num_failures >= self._config.max_failures:
                raise WorkerError(f"{journey.num_failures} attempts failed, the last: {ending.detail}")

    def _goes_to_longer(self, worker: Worker, journey: Journey) -> bool:
        """Asks for a longer context than this worker's, in which a request did not fit. Returns whether there
        is one that has not been asked for yet."""
        model = journey.route.model
        context = (worker.models or {}).get(model) if model is not None else None
        if context is None or (journey.least_context or 0) > context:
            return False
        longer = self._catalogue.least_context(model, context + 1)
        if longer is None or longer <= context:
            return False
        journey.least_context = longer
        return True

    def _fails_alone(self, ending: Ending, worker: Worker, now: float) -> bool:
        """Whether a worker answers a request with an error while it makes tokens for others. One that answers
        every new turn so is at fault itself, although turns that it took earlier go on."""
        config, is_error = self._config, ending.kind is EndKind.FAILED
        makes_tokens = now - worker.last_token_at < config.stall_s
        return is_error and makes_tokens and worker.num_errors <= config.max_failures

    def _check_adapter(self, ending: Ending, worker: Worker, journey: Journey, now: float) -> None:
        """Asks a worker at once which adapters it holds, if it lacks that of the request. Raises:
        NoWorkerError."""
        if ending.kind is not EndKind.UNLOADED:
            journey.unloaded_since = None
            return
        worker.is_due.set()
        if journey.unloaded_since is None:
            journey.unloaded_since = now
        elif now - journey.unloaded_since >= self._config.weights_s:
            raise NoWorkerError(
                f"for {self._config.weights_s:g} s workers have answered 404 for model "
                f"{journey.route.model}, a LoRA adapter that their status names; the last: {ending.detail}. "
                "Publish a version of the run, or restart the worker"
            )
