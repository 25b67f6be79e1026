"""`rose ray up|status|down`: ROSE's services on an existing Ray cluster.

`up` returns once everything answers, and prints where. `status` exits with 1 when a service is down.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rose.arguments import CommandParser, add_insecure_flag, run_command
from rose.config import Settings, load_yaml
from rose.ray.ray_config import RAY_EXAMPLE, RayConfig


def main(argv: Sequence[str]) -> int:
    """Raises: ConfigError for bad input or no room, WorkerError if a service does not start."""
    arguments = _parser().parse_args(list(argv))
    settings, config = Settings.from_environment(), None
    if arguments.action == "up":
        config = load_yaml(arguments.file, RayConfig)
        config.check_exposure(settings, is_insecure=arguments.insecure)
    from rose.ray import actors  # loads Ray, which --help and a bad file don't need

    actors.connect(arguments.address)
    if config is not None:
        endpoints = actors.up(config, settings.key_variables(), is_insecure=arguments.insecure)
        print(json.dumps({"name": config.name, **asdict(endpoints)}), flush=True)
        return 0
    if arguments.action == "down":
        stopped = actors.down(arguments.name)
        print(f"stopped {', '.join(stopped)}" if stopped else f"nothing of {arguments.name} is up")
        return 0
    return _show(arguments.name, actors.status(arguments.name), actors.num_placed(arguments.name))


def _show(name: str, services: Mapping[str, dict[str, Any] | None], num_placed: int) -> int:
    """Prints each service; returns 0 if all that were placed are up, else 1."""
    num_gone = num_placed - len(services)
    for service, told in sorted(services.items()):
        print(f"{service:<10}{_line(told)}")
    if num_gone:
        print(f"{num_gone} gone: the actor or its Ray node died")
    if not services:
        print(f"nothing of {name} is up")
    return 0 if services and not num_gone and all(map(_is_up, services.values())) else 1


def _is_up(told: dict[str, Any] | None) -> bool:
    return told is not None and told["pid"] is not None and told["exit_status"] is None


def _line(told: dict[str, Any] | None) -> str:
    if told is None:
        return "its actor does not answer"
    where = f"on {told['host']}, log {told['log']}"
    if told["exit_status"] is not None:
        return f"ended with status {told['exit_status']} {where}"
    return f"{'up' if told['urls'] else 'starting'} {' '.join(told['urls'])} pid {told['pid']} {where}"


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose ray",
        "Places relay, engines and router on a running Ray cluster. RAY.yaml:\n\n" + RAY_EXAMPLE,
        "rose ray up RAY.yaml",
    )
    actions = parser.add_subparsers(
        dest="action",
        required=True,
        metavar="up|status|down",
        prog="rose ray",
        help="what to do; `rose ray up --help` shows its options",
    )
    for action, argument, note in (
        ("up", "RAY.yaml", "Starts everything in RAY.yaml, and prints where it answers."),
        ("status", "policy", "Shows which service runs where."),
        ("down", "policy", "Stops everything of one name."),
    ):
        each = actions.add_parser(
            action, prog=f"rose ray {action}", description=note, example=f"rose ray {action} {argument}"
        )
        each.add_argument(
            "--address", default="auto", help="address of the Ray cluster (default %(default)s)"
        )
        if action == "up":
            add_insecure_flag(each)
            each.add_argument(
                "file", metavar="RAY.yaml", type=Path, help="what to place (see examples/ray.yaml)"
            )
        else:
            each.add_argument(
                "name",
                nargs="?",
                default="default",
                metavar="NAME",
                help="the name in RAY.yaml (default: %(default)s)",
            )
    return parser


if __name__ == "__main__":
    sys.exit(run_command("ray", main, sys.argv[1:]))
