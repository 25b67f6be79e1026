"""What can be said of a request before any worker sees it.

Owns: unknown models, prompts over the context.
Promises: what passes here may still be refused by a worker; what is refused here every worker would refuse.
Never does: parse (bodies.py, completions.py).
"""

from rose.scheduler.rollout.bodies import BadRequest, TokenIds
from rose.scheduler.rollout.completions import Call
from rose.scheduler.rollout.errors import UnknownModel
from rose.scheduler.rollout.registry import Registry

_NEAR = 0.7
"""Below this part of the limit an estimated length needs no counting."""


class Checks:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def model(self, model: object) -> None:
        """Raises: BadRequest, UnknownModel."""
        if model is None:
            return
        if not isinstance(model, str):
            raise BadRequest(f"model: want a name, got {model!r}")
        if self._serves(model):
            return
        await self._registry.refresh_models()  # it may have been loaded meanwhile
        if not self._serves(model):
            known = sorted({name for worker in self._registry.workers() for name in worker.models or ()})
            raise UnknownModel(f"model {model} is served by no worker; known: {', '.join(known)}")

    def _serves(self, model: str) -> bool:
        """Also if a worker has not said yet what it serves, or none is there to say."""
        workers = [worker for worker in self._registry.workers() if worker.is_alive]
        return not workers or any(worker.models is None or model in worker.models for worker in workers)

    def lengths(self, call: Call) -> None:
        """Raises: BadRequest if a prompt is longer than any worker's context."""
        contexts = [c for w in self._registry.workers() for c in (w.models or {"": None}).values()]
        known = [context for context in contexts if context is not None]
        if not known or len(known) < len(contexts) or call.body.get("truncate_prompt_tokens"):
            return
        limit = max(known)
        for single in call.singles[:: call.n]:
            prompt = single.prompt
            if isinstance(prompt, TokenIds) and prompt.about() > _NEAR * limit and prompt.count() >= limit:
                raise BadRequest(f"prompt: {prompt.count()} tokens, the model's context is {limit}")
