"""The process of a front: vLLM's configuration without an engine, and its API server on a token plane.

Owns the order in which vLLM's parts are made. Promises that no engine core is started and no weights are
loaded, so that a front needs neither a GPU nor the model's memory. It has run with vLLM 0.32.
"""

from __future__ import annotations

import argparse
import socket
from typing import Any

import uvloop
from vllm import AsyncEngineArgs
from vllm.config import LoRAConfig, VllmConfig
from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient

from rose.engine.front import adapters
from rose.engine.front.token_plane import TokenPlane
from rose.errors import ConfigError
from rose.scheduler.rollout.http.handshakes import end_unread


def front_config(args: argparse.Namespace) -> VllmConfig:
    """Returns vLLM's configuration as `vllm launch render` makes it, which needs no device.

    Raises: ConfigError if vLLM can't use the model.
    """
    engine_args = AsyncEngineArgs.from_cli_args(args)
    try:
        model_config = engine_args.create_model_config()
        model_config.quantization = None  # weights are the workers' affair
        return VllmConfig(
            model_config=model_config,
            lora_config=LoRAConfig(),  # without it vLLM refuses every adapter
            structured_outputs_config=engine_args.create_structured_outputs_config(),
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--model {args.model}: vLLM can't use it ({reason:.300})") from error


def tokenizer_of(config: VllmConfig) -> Any:
    return cached_tokenizer_from_config(config.model_config)


def serve(config: VllmConfig, args: argparse.Namespace, plane: TokenPlane) -> None:
    """Serves until SIGTERM or SIGINT."""
    uvloop.run(_serve(config, args, plane))


def listen(args: argparse.Namespace) -> tuple[str, socket.socket]:
    """Returns the front's address and its listener. A client that reads nothing for a minute is cut off."""
    address, listener = setup_server(args, reuse_port=False)
    if listener.family != socket.AF_UNIX:  # there the router has the clients
        end_unread(listener.fileno())
    return address, listener


async def _serve(config: VllmConfig, args: argparse.Namespace, plane: TokenPlane) -> None:
    listen_address, listener = listen(args)
    engine = _engine(config, plane)
    adapters.register(plane, args.served_model_name)
    try:
        stopped = await build_and_serve(engine, listen_address, listener, args)
        await stopped
    finally:
        engine.shutdown()
        listener.close()


def _engine(config: VllmConfig, plane: TokenPlane) -> AsyncLLM:
    """Makes vLLM's AsyncLLM on the plane.

    Why the patch: AsyncLLM makes the client of its engine core itself, and takes none.
    This process has no other engine. vLLM 0.32.
    """
    if not hasattr(EngineCoreClient, "make_async_mp_client"):
        raise ConfigError("vLLM has no EngineCoreClient.make_async_mp_client: rose front runs with vLLM 0.32")
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: plane)
    engine = AsyncLLM(config, executor_class=None, log_stats=False, log_requests=False)
    plane.processor = engine.output_processor
    return engine
