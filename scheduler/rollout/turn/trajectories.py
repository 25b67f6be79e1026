"""What the router remembers of trajectories: where their turns ran, and the KV that they left there.

Owns: the tables of sessions and fingerprints, and the view of a turn that policies get.
Promises: a trajectory is found again by its session key, or by the beginning of its next prompt.
Never does: place turns (places.py), I/O.
"""

import math
import time
from collections.abc import Mapping

from rose.scheduler.rollout.formats.bodies import Json, TokenIds, encode
from rose.scheduler.rollout.formats.completions import Single
from rose.scheduler.rollout.placing.sessions import (
    Fingerprints,
    Held,
    KvWeights,
    Session,
    SessionKeys,
    SessionTable,
    prefix_of,
    scope_of,
)
from rose.scheduler.rollout.placing.views import TurnView, WorkerKind, version_for
from rose.scheduler.rollout.router_config import RouterConfig
from rose.scheduler.rollout.turn.accounts import JobAccounts
from rose.scheduler.rollout.turn.journey import Journey, Route
from rose.scheduler.rollout.workers.members import Members
from rose.scheduler.rollout.workers.worker import Worker
from rose.types import WeightVersion

_CHARACTERS_PER_TOKEN = 4


class Trajectories:
    """Lives on the router's event loop."""

    def __init__(self, config: RouterConfig, members: Members, jobs: JobAccounts) -> None:
        self._config = config
        self._members = members
        self._jobs = jobs
        self.sessions = SessionTable(config.max_sessions)
        self._keys = SessionKeys(Fingerprints(config.max_fingerprints))

    def key(self, single: Single, num_singles: int, route: Route) -> str:
        """Returns the session key of one of the single requests of a call."""
        scope = scope_of(route.job, route.model)
        return self._keys.key(route.explicit_session, single.prompt, single.index, num_singles, scope)

    def turn(self, journey: Journey, first_version: WeightVersion | None) -> TurnView:
        """Returns the journey's next attempt as policies see it.

        `first_version`: the weights that made the turn's first tokens, if there are any.
        """
        route, now = journey.route, time.monotonic()
        session = self.sessions.get(journey.session, scope_of(route.job, route.model))
        if first_version is None and session is not None:
            first_version = session.first_version
        job = self._jobs.get(route.job, now)
        return TurnView(
            session=journey.session,
            job=route.job,
            model=route.model,
            affine=session.worker if session is not None else None,
            run_id=route.run_id,
            pinned_version=first_version,
            avoid_until=journey.avoid_until,
            least_context=journey.least_context,
            prompt_tokens=journey.prompt_tokens,
            expected_tokens=job.expected_tokens(journey.max_tokens),
            cached_tokens=probably_cached(session, self._members, now, route.model),
        )

    def ended(self, single: Single, journey: Journey, worker: Worker) -> None:
        """Notes that a turn finished on this worker."""
        generation, route = single.generation, journey.route
        first = (
            generation.spans[0].weight_version if generation.spans else answering_version(worker, route.model)
        )
        num_tokens = about_tokens(single.prompt) + generation.num_tokens
        is_leased = worker.spec.kind is WorkerKind.SERVING
        until_s = time.monotonic() + self._config.lease_s if is_leased else float("inf")
        weights = kv_weights(worker, route.model)
        if isinstance(weights, tuple) and generation.spans:  # the worker may have a newer one by now
            last = generation.spans[-1].weight_version
            weights = (weights[0], last) if last is not None else weights
        held = Held(num_tokens=num_tokens, version=weights, until=until_s)
        scope = scope_of(route.job, route.model)
        if isinstance(single.prompt, str):
            said, whole = None, prefix_of(single.prompt + generation.text)
        else:
            said = whole = single.prompt.plus(generation.token_ids).prefix()
        self.sessions.record(journey.session, worker.id, first, held, scope, said)
        if route.explicit_session is None:
            self._keys.fingerprints.record(whole, journey.session, scope)

    def is_extended(self, single: Single, journey: Journey) -> bool | None:
        """Returns whether the turn's prompt begins with all tokens of the trajectory's last turn, as they
        were sampled; None for a first turn, and for prompts that are texts."""
        scope = scope_of(journey.route.job, journey.route.model)
        session = self.sessions.get(journey.session, scope)
        if session is None or isinstance(single.prompt, str):
            return None
        return session.is_extended_by(single.prompt.prefix())

    def answered_whole(self, journey: Journey, worker: Worker) -> None:
        """Notes that a request that was forwarded whole finished on this worker."""
        route = journey.route
        if route.explicit_session is not None:
            version, scope = answering_version(worker, route.model), scope_of(route.job, route.model)
            self.sessions.record(route.explicit_session, worker.id, version, scope=scope)

    def finished(self, session: str, job: str) -> None:
        """Forgets a trajectory that its client declares over, for all models."""
        served = {model for worker in self._members.values() for model in worker.models or ()}
        for model in (None, *served):
            self.sessions.forget(session, scope_of(job, model))


def probably_cached(
    session: Session | None, members: Mapping[str, Worker], now: float, model: str | None = None
) -> dict[str, float]:
    """Returns how many prompt tokens of a session's next turn each worker probably has cached."""
    if session is None:
        return {}
    known = [members[worker] for worker in session.holders if worker in members]
    return {w.id: session.cached_tokens(w.id, kv_weights(w, model), now) * w.cache_trust for w in known}


def kv_weights(worker: Worker, model: str | None) -> KvWeights:
    """Returns the weights whose KV a model's turns find in the worker's prefix cache."""
    adapter = worker.adapters.get(model) if model is not None else None
    return worker.weight_version if adapter is None else (worker.weight_version, adapter)


def answering_version(worker: Worker, model: str | None) -> WeightVersion | None:
    """Returns the version with which the worker answers a model, as far as the router knows."""
    return version_for(model, worker.weight_version, worker.adapters)


def about_tokens(prompt: str | TokenIds) -> int:
    """Estimates a prompt's length; only the worker knows how many tokens a text has."""
    return prompt.about() if isinstance(prompt, TokenIds) else max(1, len(prompt) // _CHARACTERS_PER_TOKEN)


def needed_context(single: Single) -> float:
    """Returns the tokens of a turn's prompt and answer, as far as the router knows the prompt's: a worker
    with a shorter context cuts the answer."""
    generation, prompt = single.generation, single.prompt
    if generation.request.get("truncate_prompt_tokens") is not None:
        return math.inf  # the worker's context decides what is left of the prompt
    num_prompt = prompt.count() if isinstance(prompt, TokenIds) else about_tokens(prompt)
    return num_prompt + generation.max_tokens


def needed_whole(body: Json) -> float:
    """Estimates the same for a request that goes to a worker whole, by the length of all that it says."""
    limits = [body.get("max_completion_tokens"), body.get("max_tokens")]
    limit = next((limit for limit in limits if type(limit) is int), 0)
    return len(encode(body)) // _CHARACTERS_PER_TOKEN + limit
