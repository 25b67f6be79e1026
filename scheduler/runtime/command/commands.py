"""`rose sched submit|status|events|cancel|logs|drain`: what people ask a running cluster scheduler.

Owns: these command lines and what they print. Promises: one JSON object per answer on stdout with --json, and
for `submit`, `cancel` and `drain` always; a refusal is one line on stderr and exit status 2.
Never: decides anything itself.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rose.arguments import CommandParser
from rose.config import Settings, parse_config, read_yaml
from rose.errors import ChannelError, ConfigError
from rose.scheduler.runtime.channel.client import ControlClient
from rose.scheduler.runtime.channel.messages import (
    NUM_EVENTS,
    Answer,
    Call,
    Cancel,
    Drain,
    History,
    Status,
    Submit,
)
from rose.scheduler.runtime.channel.opening import ChannelUrl
from rose.scheduler.runtime.job.spec import RunSpec

CONNECT_S = 5.0
ANSWER_S = 30.0
FOLLOW_S = 0.5


def submit(argv: Sequence[str]) -> int:
    """``rose sched submit JOB.yaml``."""
    parser = _parser("submit", "Places a job and starts it.", "rose sched submit job.yaml --dry-run")
    parser.add_argument("job", type=Path, help="name, command, phases' worst-case times, group")
    parser.add_argument("--dry-run", action="store_true", help="only say whether and how it would run")
    arguments = parser.parse_args(argv)
    # A relative folder is meant from where the file lies, not from where the runner happens to run.
    content = read_yaml(arguments.job, RunSpec)
    spec = parse_config(content, RunSpec, str(arguments.job))
    content["folder"] = str((arguments.job.parent / spec.folder).resolve())
    with _client(arguments.channel) as client:
        _print(_ask(client, Submit(seq=client.next_seq(), spec=content, dry_run=arguments.dry_run)))
    return 0


def status(argv: Sequence[str]) -> int:
    """``rose sched status [JOB]``."""
    parser = _parser("status", "Jobs, what they hold and what they wait for.", "rose sched status --json")
    parser.add_argument("job", nargs="?", help="only this one")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    with _client(arguments.channel) as client:
        body = _ask(client, Status(seq=client.next_seq(), job=arguments.job))
    if arguments.json:
        _print(body)
    else:
        Console().print(_table(body["jobs"]))
    return 0


def explain_running(job: str, channel: str, *, as_json: bool) -> int:
    """``rose sched explain --job JOB``."""
    with _client(channel) as client:
        [found] = _ask(client, Status(seq=client.next_seq(), job=job))["jobs"]
    report = {
        key: found[key] for key in ("name", "state", "group", "rollout_nodes", "why", "moving_to", "moves")
    }
    if as_json:
        _print(report)
        return 0
    nodes = ", ".join(map(str, found["rollout_nodes"]))
    print(f"{job} is {found['state']} in {found['group']}, on rollout nodes {nodes}: {found['why']}")
    for move in found["moves"]:
        pause = f"{move['pause_s']:.1f} s" if move["pause_s"] is not None else "not over yet"
        start = "warm" if move["is_warm"] else "cold"
        print(
            f"  before iteration {move['iteration']} from {move['from']['group']} to {move['to']['group']}, "
            f"{start}, pause {pause}: {move['why']}"
        )
    if found["moving_to"] is not None:
        print(f"  goes to {found['moving_to']} when its iteration {found['iterations'][0]} is done")
    return 0


def events(argv: Sequence[str]) -> int:
    """``rose sched events``."""
    parser = _parser("events", "What has happened, one JSON object a line.", "rose sched events --last 100")
    parser.add_argument(
        "--last", type=int, default=1000, help=f"at most (%(default)s; {NUM_EVENTS} are kept)"
    )
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.last <= NUM_EVENTS:
        parser.error(f"--last {arguments.last}: from 1 to {NUM_EVENTS}")
    with _client(arguments.channel) as client:
        for event in _ask(client, History(seq=client.next_seq(), last=arguments.last))["events"]:
            _print(event)
    return 0


def cancel(argv: Sequence[str]) -> int:
    """``rose sched cancel JOB``."""
    parser = _parser("cancel", "Ends a job and gives its nodes and memory back.", "rose sched cancel grpo-7b")
    parser.add_argument("job")
    arguments = parser.parse_args(argv)
    with _client(arguments.channel) as client:
        _print(_ask(client, Cancel(seq=client.next_seq(), job=arguments.job)))
    return 0


def drain(argv: Sequence[str]) -> int:
    """``rose sched drain NODE``."""
    parser = _parser(
        "drain",
        "Places no more jobs on a node; those on it finish.",
        "rose sched drain rollout-0 --group main",
    )
    parser.add_argument("node", help="train, or rollout-0, rollout-1, ... of the group")
    parser.add_argument("--group", default="main")
    parser.add_argument("--undo", action="store_true", help="take jobs again")
    arguments = parser.parse_args(argv)
    with _client(arguments.channel) as client:
        call = Drain(seq=client.next_seq(), group=arguments.group, node=arguments.node, undo=arguments.undo)
        _print(_ask(client, call))
    return 0


def logs(argv: Sequence[str]) -> int:
    """``rose sched logs JOB``: on the host that runs it."""
    parser = _parser("logs", "What all attempts of a job have printed.", "rose sched logs grpo-7b --follow")
    parser.add_argument("job")
    parser.add_argument("--follow", action="store_true", help="until the job is over")
    arguments = parser.parse_args(argv)
    with _client(arguments.channel) as client:
        body = _ask(client, Status(seq=client.next_seq(), job=arguments.job))
        path = Path(body["jobs"][0]["log"])
        if not path.exists():
            raise ConfigError(
                f"{path}: no such file on this host; {arguments.job} has not started, or not here"
            )
        with path.open("r", errors="replace") as log:
            _copy(log.read())
            while arguments.follow and not body["jobs"][0]["is_over"]:
                time.sleep(FOLLOW_S)
                _copy(log.read())
                body = _ask(client, Status(seq=client.next_seq(), job=arguments.job))
            _copy(log.read())
    return 0


def _copy(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _parser(name: str, description: str, example: str) -> CommandParser:
    parser = CommandParser(f"rose sched {name}", description, example)
    parser.add_argument(
        "--channel",
        default=Settings.from_environment().channel_url,
        help="the scheduler's: unix:FOLDER or redis://HOST:PORT/DB (%(default)s, from ROSE_CHANNEL)",
    )
    return parser


def _client(channel: str) -> ControlClient:
    return ControlClient(ChannelUrl.parse(channel).join(f"command:{os.uname().nodename}"), CONNECT_S)


def _ask(client: ControlClient, call: Call) -> dict[str, Any]:
    """Raises: ConfigError for a refusal, ChannelError without an answer."""
    reply = client.ask(call, ANSWER_S)
    if not isinstance(reply, Answer):
        raise ChannelError(f"the scheduler answered {reply}")
    if reply.error is not None:
        raise ConfigError(reply.error)
    return reply.body


def _print(body: dict[str, Any]) -> None:
    print(json.dumps(body))


def _table(jobs: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "job",
        "state",
        "group",
        "host",
        "iterations",
        "holds",
        "waits for",
        "behind",
        "restarts",
        "moves",
        "note",
    )
    for job in jobs:
        table.add_row(
            job["name"],
            job["state"],
            job["group"],
            job["host"] if job["host"] is not None else "",
            "{} of {}".format(*job["iterations"]),
            job["holds"] if job["holds"] is not None else "",
            job["waits_for"] if job["waits_for"] is not None else "",
            ", ".join(job["behind"]),
            str(job["restarts"]),
            "\n".join(_moves(job)),
            job["note"],
        )
    return table


def _moves(job: dict[str, Any]) -> list[str]:
    """One line for each move, the one that is to come last."""
    lines = []
    for move in job["moves"]:
        pause_s = move["pause_s"]
        pause = f"{pause_s:.1f} s" if pause_s is not None else "on its way"
        lines.append(f"{move['from']['group']} -> {move['to']['group']} ({pause})")
    if job["moving_to"] is not None:
        lines.append(f"{job['group']} -> {job['moving_to']} (after this iteration)")
    return lines
