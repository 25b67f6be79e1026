"""The demo's RL trainer process: real GRPO, rollouts from an endpoint, weights into a relay.

Owns: the command line and the wiring of `rose.demo.grpo` to a router and a relay. Promises: float32 master
weights, published as bfloat16, the first version before the first rollout; SIGTERM, SIGINT and the time
limit end it with status 0, bad input with status 2 and one line. Never generates a token itself.
``python -m rose.demo.trainer --model DIR --endpoint http://127.0.0.1:8100 --relay URL --events e.jsonl``
"""

import argparse
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rose.config import Settings
from rose.demo.grpo import FrozenLakeRollouts, Publish, TrainingConfig, load_master, run_training
from rose.errors import RoseError
from rose.measure.turns import TurnEndpoint
from rose.trainers.router import router_announcer
from rose.transfer.format.manifest import worker_name
from rose.transfer.publish.publisher import SyncReport, WeightPublisher

logger = logging.getLogger(__name__)

ACK_TIMEOUT_S = 600.0
_START_POLL_S = 0.1


def relay_publisher(publisher: WeightPublisher, worker_urls: Sequence[str]) -> Publish:
    """Publishes, then waits until every worker runs the new weights."""
    workers = [worker_name(url) for url in worker_urls]

    def publish() -> dict[str, Any]:
        report = publisher.publish()
        publisher.wait_acked(report.version, workers, ACK_TIMEOUT_S)
        acks = publisher.acks()
        hashes = {worker: acks[worker].state_hash for worker in workers}
        return {**_loggable(report), "engine_state_hashes": hashes}

    return publish


def _loggable(report: SyncReport) -> dict[str, Any]:
    return {**asdict(report), "version": str(report.version)}


def _parser() -> argparse.ArgumentParser:
    defaults = TrainingConfig(model_dir=Path())
    parser = argparse.ArgumentParser(
        prog="python -m rose.demo.trainer", description="GRPO on FrozenLake over a rollout endpoint."
    )
    parser.add_argument("--model", required=True, type=Path, help="checkpoint to start from")
    parser.add_argument(
        "--endpoint", required=True, help="router (or one engine), e.g. http://127.0.0.1:8100"
    )
    parser.add_argument("--served-model", default="rollout", help="the model's name at the endpoint")
    parser.add_argument("--relay", help="where weights go, e.g. embedded://127.0.0.1:8200; none: no publish")
    parser.add_argument("--run-id", help="name of this run in the relay; default: a random one")
    parser.add_argument("--worker", action="append", default=[], help="URL of a worker whose ack is awaited")
    parser.add_argument(
        "--no-rl-step", action="store_true", help="the endpoint is no router: announce no steps"
    )
    parser.add_argument("--events", required=True, type=Path, help="one JSON line per step is appended here")
    parser.add_argument("--start-file", type=Path, help="load everything now, begin once this file exists")
    parser.add_argument("--steps", type=int, default=defaults.num_steps)
    parser.add_argument("--time-limit-s", type=float, default=defaults.time_limit_s)
    parser.add_argument("--group-size", type=int, default=defaults.group_size)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    return parser


def _training_config(args: argparse.Namespace) -> TrainingConfig:
    if not (args.model / "config.json").is_file():
        raise ValueError(f"--model {args.model}: no checkpoint there")
    return TrainingConfig(
        model_dir=args.model,
        num_steps=args.steps,
        time_limit_s=args.time_limit_s,
        group_size=args.group_size,
        seed=args.seed,
    )


def _train(args: argparse.Namespace, config: TrainingConfig) -> None:
    settings = Settings.from_environment()
    model, tokenizer = load_master(config.model_dir)
    publisher: WeightPublisher | None = None
    announce = None
    if not args.no_rl_step:
        announce = router_announcer(
            args.endpoint, settings.admin_key, lambda: publisher.version if publisher is not None else None
        )
    endpoint = TurnEndpoint(args.endpoint, args.served_model)
    rollouts = FrozenLakeRollouts(config, tokenizer, endpoint, announce)
    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: rollouts.stop()))
        stack.callback(rollouts.close)
        while args.start_file is not None and not args.start_file.exists():
            if rollouts.is_stopping:
                return
            time.sleep(_START_POLL_S)
        publish: Publish | None = None
        if args.relay is not None:
            publisher = WeightPublisher(model, args.relay, args.run_id)
            stack.callback(publisher.close)
            publish = relay_publisher(publisher, args.worker)
            logger.info("first publish: %s", json.dumps(publish()))
        events = stack.enter_context(args.events.open("a"))
        run_training(config, model, tokenizer, rollouts, events, publish)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; status 0 when trained or stopped, 1 when the world failed, 2 on bad input."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)  # the serving engine needs the other cores
    try:
        config = _training_config(args)
    except ValueError as error:
        print(f"rose.demo.trainer: {error}", file=sys.stderr)
        return 2
    try:
        with redirect_stdout(sys.stderr):  # transformers prints its metrics
            _train(args, config)
    except RoseError as error:
        print(f"rose.demo.trainer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # Before the first step and after the last, a stop signal ends it at once, and is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sys.exit(main())
