"""What can be said of a request before any worker sees it.

Owns: unknown and ambiguous models, prompts over the context.
Promises: what passes here may still be refused by a worker; what is refused here every worker would refuse.
Never does: parse (bodies.py, completions.py).
"""

from rose.errors import NoWorkerError
from rose.scheduler.rollout.formats.bodies import BadRequest, TokenIds
from rose.scheduler.rollout.formats.completions import Call
from rose.scheduler.rollout.turn.errors import UnknownModel
from rose.scheduler.rollout.workers.registry import Registry

_NEAR = 0.7
"""Below this part of the limit an estimated length needs no counting."""


class Checks:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def model(self, given: object) -> str | None:
        """The model that a request is for, whose body has `given`; None: any, as nobody says what it serves.

        Raises:
            BadRequest: no name, or none given where workers serve different models.
            UnknownModel: no worker serves it.
            NoWorkerError: none does any more.
        """
        catalogue = self._registry.catalogue
        if given is None:
            return catalogue.default()
        if not isinstance(given, str):
            raise BadRequest(f"model: want a name, got {given!r}")
        if given in catalogue or self._may_serve_any():
            return given
        await self._registry.refresh_models()  # it may have been loaded meanwhile
        if given in catalogue:
            return given
        if catalogue.is_removed(given):
            raise NoWorkerError(f"the workers that served model {given} were removed")
        raise UnknownModel(f"model {given} is served by no worker; known: {', '.join(catalogue.names)}")

    def _may_serve_any(self) -> bool:
        """Whether a worker doesn't say what it serves, or none is there to say."""
        alive = [worker for worker in self._registry.workers() if worker.is_alive]
        return not alive or any(worker.models is None for worker in alive)

    def lengths(self, call: Call, model: str | None) -> None:
        """Raises: BadRequest if a prompt is longer than any worker's context."""
        limit = self._registry.catalogue.context(model)
        if limit is None or call.body.get("truncate_prompt_tokens"):
            return
        for single in call.singles[:: call.n]:
            prompt = single.prompt
            if isinstance(prompt, TokenIds) and prompt.about() > _NEAR * limit and prompt.count() >= limit:
                raise BadRequest(f"prompt: {prompt.count()} tokens, the model's context is {limit}")
