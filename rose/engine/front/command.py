"""`rose front`: vLLM's own API server, whose engine is the router.

Owns the command and the process. Promises that routes, templates, parsers and detokenizer are vLLM's own and
take vLLM's own flags. What can't work is refused with one line before anything is served.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx

from rose.arguments import CommandParser, add_insecure_flag, model_name, run_command
from rose.config import Settings
from rose.engine.front.agreement import RouterQuestions
from rose.errors import ConfigError
from rose.http import http_client, urls_of
from rose.ports import check_exposure

_MIDDLEWARE = ("rose.engine.front.caller.NotesCaller", "rose.engine.front.adapters.AsksResolvers")
_ASK_S = 30.0
_LISTENS_S = 5.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_EXAMPLE = (
    "rose front --router http://127.0.0.1:8100 --model ./models/policy --port 8200"
    " --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3"
)


def main(argv: Sequence[str]) -> int:
    """Serves until a stop signal. Raises: ConfigError for bad input."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    own, vllm_argv = _parser().parse_known_args(argv)
    if own.stop_with_stdin:
        stop_with_stdin()
    settings = Settings.from_environment()
    try:
        router_urls = urls_of(own.router)
    except ValueError as error:
        raise ConfigError(f"--router {error}") from error
    listening = _listening(router_urls, settings.tls_ca)
    router_url = listening[0]
    args = _vllm_arguments(own.model, vllm_argv)
    _check_exposure(args, settings.router_api_key, is_insecure=own.insecure)
    key, ca = settings.router_api_key, settings.tls_ca
    with http_client(router_url, key=key, timeout=_ASK_S, ca=ca) as client:
        questions = RouterQuestions(client)
        card = questions.card(args.served_model_name or [], args.model)
        for url in listening:
            if questions.is_open(url):
                _check_exposure(args, None, is_insecure=own.insecure, router=url)
        args.served_model_name = args.served_model_name or [card["id"]]
        if (context := card.get("max_model_len")) is not None and args.max_model_len is None:
            args.max_model_len = context
        from rose.engine.front.server import front_config, serve, tokenizer_of
        from rose.engine.front.token_plane import TokenPlane

        config = front_config(args)
        _check_context(config.model_config.max_model_len, context, router_url)
        questions.check_tokenizer(card["id"], tokenizer_of(config))
    serve(config, args, TokenPlane(router_urls, card["id"], settings.front_secret, ca))
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose front",
        "Runs vLLM's own API server before a router. Chats, responses and messages with tools, reasoning and "
        "structured output become token-level turns, which the router places, watches, moves and resumes.\n"
        "Other flags are vLLM's own (vllm serve --help); give the same parsers and templates as the workers.",
        _EXAMPLE,
    )
    parser.add_argument(
        "--router",
        required=True,
        metavar="URL[,URL...]",
        help="address of rose router, or of several before the same workers; if one is lost, its turns go on "
        "at the next",
    )
    parser.add_argument(
        "--model",
        type=model_name,
        required=True,
        metavar="DIR",
        help="the workers' model; its weights are not loaded",
    )
    parser.add_argument(
        "--stop-with-stdin",
        action="store_true",
        help="end when standard input ends, as when the process that started it dies",
    )
    add_insecure_flag(parser)
    return parser


def _vllm_arguments(model: str, argv: Sequence[str]) -> argparse.Namespace:
    """Reads vLLM's flags as `vllm serve` does. Raises: ConfigError."""
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.launchers.launcher import validate_api_server_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ModuleNotFoundError as error:
        if error.name == "vllm":
            raise
        raise ConfigError(f"this vLLM has no {error.name}; rose front runs with vLLM 0.32") from error
    parser = make_arg_parser(FlexibleArgumentParser(prog="rose front"))
    args: argparse.Namespace = parser.parse_args(["--model", model, *argv])
    args.model = model
    args.middleware = [*args.middleware, *_MIDDLEWARE]
    args.disable_log_stats = True  # its figures are of an engine core; the router's /metrics has the turns'
    if args.disable_access_log_for_endpoints is None:
        args.disable_access_log_for_endpoints = "/health"  # the router asks for it every few seconds
    args.host = args.host if args.host is not None else "127.0.0.1"
    if args.reasoning_parser:
        args.structured_outputs_config.reasoning_parser = args.reasoning_parser
    try:
        validate_parsed_serve_args(args)
        validate_api_server_args(args)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(str(error.args[0] if error.args else error)) from error
    return args


def _check_exposure(
    args: argparse.Namespace, router_key: str | None, *, is_insecure: bool, router: str = "the router"
) -> None:
    """Raises: ConfigError if others than this machine would reach the router through the front without a key.

    router_key: what the router asks every client for; None: nothing. vLLM's --api-key is no substitute, as it
    leaves /invocations open.
    """
    if args.uds is None:
        keys = {f"ROSE_ROUTER_API_KEY at {router} and front": router_key}
        check_exposure("--host", args.host, keys, is_insecure=is_insecure)


def _listening(router_urls: Sequence[str], ca: Path | None) -> list[str]:
    """Returns the routers that listen; the first of all if none does yet."""
    found = []
    for url in router_urls if len(router_urls) > 1 else ():
        client = http_client(url, key=None, timeout=_LISTENS_S, ca=ca)
        with contextlib.suppress(httpx.HTTPError), client:
            client.get("/health")
            found.append(url)
    return found or [router_urls[0]]


def _check_context(own: int, theirs: int | None, router_url: str) -> None:
    if theirs is not None and own > theirs:
        raise ConfigError(
            f"--max-model-len {own}: the workers behind {router_url} have a context of {theirs}; leave it out"
        )


def stop_with_stdin() -> None:
    """Ends this process with the one that started it, however that ended, and by no signal before.

    A service manager signals every process of a service at once, and the starter still needs this one while
    it drains. Call it before any thread is started: they inherit the blocked signals.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    threading.Thread(target=_stop_at_end_of_stdin, name="rose-stdin", daemon=True).start()


def _stop_at_end_of_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # in this thread alone, which is enough
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run_command("front", main, sys.argv[1:]))
