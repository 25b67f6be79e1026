"""LoRA adapters by name: a front renders an adapter's chats as those of its base model.

Owns which names are adapters of the front's model, as the router says. Promises that the turns name the
adapter, so that the router chooses worker and version. Never loads an adapter.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send
from vllm import envs
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

from rose.engine.front.token_plane import TokenPlane
from rose.errors import ConfigError

_SETTING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


class RoutersAdapters(LoRAResolver):
    """vLLM asks it for each name that it does not know, once until the router knows the name."""

    def __init__(self, plane: TokenPlane, base_names: Collection[str]) -> None:
        """`base_names`: the names of the front's model."""
        self._plane = plane
        self._base_names = base_names

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Returns the adapter's request; vLLM numbers it. Raises: VLLMError if no router answers."""
        for card in await self._plane.model_cards():
            if card["id"] == lora_name and card.get("parent") in self._base_names:
                return LoRARequest(lora_name, 1, lora_path=lora_name)
        return None


def register(plane: TokenPlane, base_names: Collection[str]) -> None:
    """Makes vLLM ask for adapters. Call it before vLLM's API server is built, which needs AsksResolvers.

    Raises: ConfigError if vLLM has no such setting.
    """
    if _SETTING not in envs.environment_variables:
        raise ConfigError(f"vLLM has no {_SETTING}: rose front runs with vLLM 0.32")
    LoRAResolverRegistry.register_resolver("rose", RoutersAdapters(plane, base_names))


class AsksResolvers:
    """An ASGI middleware that lets vLLM ask resolvers, once its API server is built.

    Why not by the environment's variable: while the server is built, vLLM would open its routes that load
    adapters from paths, too. vLLM 0.32.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING = True
        await self._app(scope, receive, send)
