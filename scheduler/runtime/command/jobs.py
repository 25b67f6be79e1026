"""`rose sched submit|cancel|hold|release|drain|logs|events`: what people ask of a scheduler.

Answers are JSON on stdout. A refusal is one line on stderr and exit status 2.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rose.errors import ConfigError
from rose.scheduler.runtime.channel.messages import (
    NUM_EVENTS,
    Cancel,
    Drain,
    History,
    HoldJob,
    ReleaseJob,
    Status,
    Submit,
)
from rose.scheduler.runtime.command.connection import ask, channel_parser, connect, print_json
from rose.scheduler.runtime.command.status import WAITING
from rose.scheduler.runtime.job.spec import EXAMPLE, read_job

FOLLOW_S = 0.5


def submit(argv: Sequence[str]) -> int:
    """``rose sched submit JOB.yaml``."""
    indented = "".join(f"  {line}\n" for line in EXAMPLE.splitlines())
    parser = channel_parser(
        "submit",
        "Starts a job, or queues it until there is room.\n\n"
        f"a complete JOB.yaml:\n{indented}\n"
        "`seconds` are worst-case times; `rose sched profile` measures them.",
        "rose sched submit job.yaml --dry-run",
    )
    parser.add_argument("job", type=Path, metavar="JOB.yaml", help="the job's file (see examples/job.yaml)")
    parser.add_argument(
        "--priority",
        type=int,
        help="queued jobs of higher priority are placed first (default: the file's, or 0)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say whether and how the job would run")
    arguments = parser.parse_args(argv)
    content, spec = read_job(arguments.job)
    if arguments.priority is not None:
        content["priority"] = arguments.priority
    # A relative folder is relative to the job's file: the runner runs somewhere else.
    content["folder"] = str((arguments.job.parent / spec.folder).resolve())
    with connect(arguments.channel) as client:
        print_json(ask(client, Submit(seq=client.next_seq(), spec=content, dry_run=arguments.dry_run)))
    return 0


def events(argv: Sequence[str]) -> int:
    """``rose sched events``."""
    parser = channel_parser(
        "events", "Prints what has happened, one JSON object a line.", "rose sched events --last 100"
    )
    parser.add_argument(
        "--last",
        type=int,
        default=1000,
        metavar="N",
        help=f"print the latest N events (default: %(default)s; {NUM_EVENTS} are kept)",
    )
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.last <= NUM_EVENTS:
        parser.error(f"--last {arguments.last}: expected a number from 1 to {NUM_EVENTS}")
    with connect(arguments.channel) as client:
        for event in ask(client, History(seq=client.next_seq(), last=arguments.last))["events"]:
            print_json(event)
    return 0


def cancel(argv: Sequence[str]) -> int:
    """``rose sched cancel JOB``."""
    return _tell("cancel", Cancel, "Ends a job and frees its nodes and its host memory.", argv)


def hold(argv: Sequence[str]) -> int:
    """``rose sched hold JOB``."""
    return _tell("hold", HoldJob, "Keeps a queued job from starting until it is released.", argv)


def release(argv: Sequence[str]) -> int:
    """``rose sched release JOB``."""
    return _tell("release", ReleaseJob, "Puts a held job back where it was in the queue.", argv)


def _tell(name: str, call: type[Cancel | HoldJob | ReleaseJob], summary: str, argv: Sequence[str]) -> int:
    parser = channel_parser(name, summary, f"rose sched {name} grpo-7b")
    parser.add_argument("job", metavar="JOB", help="the job's name, as rose sched status shows it")
    arguments = parser.parse_args(argv)
    with connect(arguments.channel) as client:
        print_json(ask(client, call(seq=client.next_seq(), job=arguments.job)))
    return 0


def drain(argv: Sequence[str]) -> int:
    """``rose sched drain NODE``."""
    parser = channel_parser(
        "drain",
        "Places no more jobs on a node. The jobs that use it run to their ends.",
        "rose sched drain rollout-0 --group main",
    )
    parser.add_argument(
        "node", metavar="NODE", help="train, or one of rollout-0, rollout-1, ... in the group"
    )
    parser.add_argument("--group", default="main", help="the node's group (default: %(default)s)")
    parser.add_argument("--undo", action="store_true", help="let jobs be placed on the node again")
    arguments = parser.parse_args(argv)
    with connect(arguments.channel) as client:
        call = Drain(seq=client.next_seq(), group=arguments.group, node=arguments.node, undo=arguments.undo)
        print_json(ask(client, call))
    return 0


def logs(argv: Sequence[str]) -> int:
    """``rose sched logs JOB``, on the host of `rose sched serve`."""
    parser = channel_parser(
        "logs",
        "Prints what all attempts of a job have written to stdout and stderr.",
        "rose sched logs grpo-7b --follow",
    )
    parser.add_argument("job", metavar="JOB", help="the job's name, as rose sched status shows it")
    parser.add_argument("--follow", action="store_true", help="go on until the job is over")
    arguments = parser.parse_args(argv)
    with connect(arguments.channel) as client:
        body = ask(client, Status(seq=client.next_seq(), job=arguments.job))
        job = body["jobs"][0]
        path = Path(job["log"])
        if not path.exists() and job["state"] in WAITING and not job["attempt"]:
            raise ConfigError(f"{job['name']} is {job['state']} and has printed nothing yet: {job['why']}")
        if not path.exists():
            raise ConfigError(
                f"{path}: no such file on this host; {arguments.job} has not started, or the "
                "scheduler is on another host"
            )
        with path.open("r", errors="replace") as log:
            _copy(log.read())
            while arguments.follow and not body["jobs"][0]["is_over"]:
                time.sleep(FOLLOW_S)
                _copy(log.read())
                body = ask(client, Status(seq=client.next_seq(), job=arguments.job))
            _copy(log.read())
    return 0


def _copy(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
