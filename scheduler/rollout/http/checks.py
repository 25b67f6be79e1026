"""Checks of a request before any worker sees it.

Owns: the checks of model names and prompt lengths.
Promises: a request that fails here would fail on every worker. One that passes may still be refused by a
worker.
Never does: parse bodies (formats/).
"""

from rose.errors import NoWorkerError
from rose.scheduler.rollout.formats.bodies import BadRequest, TokenIds
from rose.scheduler.rollout.formats.completions import Call
from rose.scheduler.rollout.http.errors import NotFound
from rose.scheduler.rollout.workers.registry import Registry

_NEAR = 0.7
"""A prompt whose estimated length is below this fraction of the context is not counted."""


class Checks:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def model(self, given: object) -> str | None:
        """Returns the model that a request with `given` as its `model` is for; None: any worker will do.

        Raises:
            BadRequest: `given` is not a name, or it is missing where workers serve different models.
            NotFound: no worker serves the model.
            NoWorkerError: all workers that served the model were removed.
        """
        catalogue = self._registry.catalogue
        if given is None:
            return catalogue.default()
        if not isinstance(given, str):
            raise BadRequest(f"model: want a name, got {given!r}")
        if given in catalogue or self._may_serve_any():
            return given
        await self._registry.refresh_models()  # the model may have been loaded meanwhile
        if given in catalogue:
            return given
        if catalogue.is_removed(given):
            raise NoWorkerError(f"all workers that served model {given} were removed")
        raise NotFound(f"model {given} is served by no worker; known: {', '.join(catalogue.names)}")

    def _may_serve_any(self) -> bool:
        """Whether some live worker doesn't say what it serves, or no worker is alive."""
        alive = [worker for worker in self._registry.workers() if worker.is_alive]
        return not alive or any(worker.models is None for worker in alive)

    def lengths(self, call: Call, model: str | None) -> None:
        """Raises: BadRequest if a prompt does not fit into any worker's context."""
        limit = self._registry.catalogue.context(model)
        if limit is None or call.body.get("truncate_prompt_tokens"):
            return
        for single in call.singles[:: call.n]:
            prompt = single.prompt
            if isinstance(prompt, TokenIds) and prompt.about() > _NEAR * limit and prompt.count() >= limit:
                raise BadRequest(f"prompt: {prompt.count()} tokens, the model's context is {limit}")
