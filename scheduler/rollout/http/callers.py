"""Who sends a request: the router's clients by their keys, and the job of each request.

Owns: the keys of clients and jobs, and the job, run and model that a request is for.
Promises: a job's key stands for the job, its run and its model, and headers that contradict it are refused. A
job that has a key can't be named without it, and nobody else gets the weights of its run.
Never does: guard the admin routes (guard.py).
"""

import hmac
import secrets

from aiohttp import web

from rose.http import API_KEY_HEADER, FRONT_SECRET_HEADER, JOB_HEADER, RUN_HEADER
from rose.scheduler.rollout.formats.bodies import BadRequest
from rose.scheduler.rollout.http.errors import Denied, NotFound
from rose.scheduler.rollout.placing.views import DEFAULT_JOB, NO_RUN
from rose.scheduler.rollout.turn.accounts import JobAccounts
from rose.scheduler.rollout.workers.registry import Registry

_MOST_CHARACTERS = 256
"""The longest name of a job, which is a label of metrics."""
_NAME_A_RUN = f"send {RUN_HEADER}, or set the job's run_id (jobs in the router's file, PUT /admin/jobs/JOB)"


class Callers:
    def __init__(
        self, registry: Registry, jobs: JobAccounts, api_key: str | None, run_id: str | None
    ) -> None:
        """`run_id`: the only training run of this router; None: several may use it."""
        self._registry = registry
        self._jobs = jobs
        self._api_key = api_key
        self._run_id = run_id
        self.front_key = secrets.token_hex(16) if api_key is None else api_key
        """What the router's own fronts ask it with about models and tokenizers."""
        self.front_secret = secrets.token_hex(16)
        """What the turns of the router's own fronts bring along."""

    @property
    def have_keys(self) -> bool:
        return self._api_key is not None or self._jobs.has_keys

    def are_known(self, request: web.Request) -> bool:
        """Returns whether the request has the clients' key or a job's, or clients need none."""
        if not self.have_keys:
            return True
        key = bearer(request)
        if hmac.compare_digest(key.encode(), self.front_key.encode()):
            return True
        return self._jobs.holder(key) is not None

    def is_front(self, request: web.Request) -> bool:
        """Returns whether a front of this router sends the request: a turn of a chat that the router has
        accepted."""
        given = request.headers.get(FRONT_SECRET_HEADER, "")
        return hmac.compare_digest(given.encode(), self.front_secret.encode())

    def job(self, request: web.Request) -> str:
        """Returns the request's job.

        Raises:
            BadRequest: the name is empty or too long.
            Denied: the request has another job's key, or not the key that its job has.
        """
        named = request.headers.get(JOB_HEADER)
        if named is not None and not named.strip():
            raise BadRequest(f"{JOB_HEADER}: the name is empty; name the job or leave the header out")
        if named is not None and len(named) > _MOST_CHARACTERS:
            raise BadRequest(f"{JOB_HEADER}: {len(named)} characters; at most {_MOST_CHARACTERS} are allowed")
        holder = self._jobs.holder(bearer(request))
        if holder is not None:
            if named not in (None, holder):
                raise Denied(f"{JOB_HEADER}: {named}, but the key is job {holder}'s; leave the header out")
            return holder
        job = named if named is not None else DEFAULT_JOB
        if self._jobs.spec(job).key is not None:
            raise Denied(f"{JOB_HEADER}: job {job} has a key of its own; send that key")
        return job

    def require_run(self, request: web.Request, run_id: str) -> None:
        """Raises: Denied unless the request has the key of a job with this run."""
        holder = self._jobs.holder(bearer(request))
        own = self._jobs.spec(holder).run_id if holder is not None else None
        if own != run_id:
            whose = (
                f"that of job {holder}, which has run {own}" if own is not None else "of no job with a run"
            )
            raise Denied(
                f"version: weights of run {run_id} are announced with the key of the run's job, and this key"
                f" is {whose}; send the other key, or set the job's run_id"
            )

    def model(self, job: str, given: object) -> object:
        """Returns the model that a request asks for, or its job's. Raises: Denied if they differ."""
        own = self._jobs.spec(job).model
        if own is not None and given not in (None, own):
            raise Denied(f"model: {given!r}, but job {job} has model {own}; leave it out, or change the job")
        return given if own is None else own

    def run(self, request: web.Request, job: str, model: str | None) -> str | None:
        """Returns the training run whose weights the request may use; None: any, NO_RUN: base weights alone.

        A request that names neither job nor run may use any, as long as no job has a run of its own. While
        nothing is published for the model every run is accepted, since a trainer may send its first turns
        before it publishes.

        Raises:
            BadRequest: the job names no run, and workers have weights of runs.
            Denied: the run is that of another job, or the job has another one.
            NotFound: workers have weights of other runs, and never had any of this one.
        """
        given, own = request.headers.get(RUN_HEADER), self._jobs.spec(job).run_id
        if model is not None and self._registry.newest.is_adapter(model):
            return self._adapters_run(model, job, given, own)
        if own is not None:
            if given not in (None, own):
                raise Denied(f"{RUN_HEADER}: {given!r}, but job {job} has run {own}; leave the header out")
            return own
        published = sorted(self._registry.newest.of(model))
        if given is None:
            if self._run_id is not None or (job == DEFAULT_JOB and not self._jobs.has_runs):
                return self._run_id
            if published:
                raise BadRequest(
                    f"job {job} names no training run, and workers have weights of {_listed(published)};"
                    f" {_NAME_A_RUN}"
                )
            return NO_RUN
        if (owner := self._jobs.owner(given)) is not None:
            raise Denied(f"{RUN_HEADER}: run {given} is that of job {owner}, which has a key; send that key")
        known = {*published, *((self._run_id,) if self._run_id is not None else ())}
        if known and given not in known:
            raise NotFound(
                f"{RUN_HEADER}: no worker has weights of run {given!r}; known: {_listed(sorted(known))}"
            )
        return given

    def _adapters_run(self, model: str, job: str, given: str | None, own: str | None) -> str:
        """Returns the run of a request for a LoRA adapter, which has the model's name. Raises: Denied."""
        is_adapter = f"model {model} is the LoRA adapter of run {model}"
        if given not in (None, model):
            raise Denied(f"{RUN_HEADER}: {given!r}, but {is_adapter}; leave the header out")
        if own not in (None, model):
            raise Denied(f"{is_adapter}, and job {job} has run {own}; name another model, or change the job")
        if (owner := self._jobs.owner(model)) not in (None, job):
            raise Denied(f"{is_adapter}, and that is job {owner}'s, which has a key; send that key")
        return model


def _listed(names: list[str]) -> str:
    return ", ".join(names)


def bearer(request: web.Request) -> str:
    """Returns the key that the client sent; empty if it sent none. The scheme's case means nothing, as in
    vLLM."""
    if (given := request.headers.get("Authorization")) is None:
        return request.headers.get(API_KEY_HEADER, "")
    scheme, _, key = given.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else given
