"""`rose sched status` and `rose sched explain --job`: what a running scheduler says of its jobs.

The table fits a terminal of 80 columns: a job's details stand in indented lines below its row.
"""

import math
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rose.scheduler.runtime.channel.messages import Status
from rose.scheduler.runtime.command.connection import ask, channel_parser, connect, print_json

HEADER = ("JOB", "STATE", "GROUP", "ITERATIONS", "NOW")
WAITING = ("queued", "held")
MIN_NOW = 20
"""Columns for what a job does now: longer names of jobs and groups are cut first."""


def status(argv: Sequence[str]) -> int:
    """``rose sched status [JOB]``."""
    parser = channel_parser(
        "status", "Shows every job, what it does now and what it waits for.", "rose sched status --json"
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help="show only this job")
    parser.add_argument("--json", action="store_true", help="print everything that is known, as JSON")
    arguments = parser.parse_args(argv)
    with connect(arguments.channel) as client:
        body = ask(client, Status(seq=client.next_seq(), job=arguments.job))
    if arguments.json:
        print_json(body)
    else:
        if body.get("waits_for") is not None:
            print(f"the scheduler waits for {body['waits_for']}")
        if (router := body.get("router")) is not None and router["problem"] is not None:
            print(f"borrowed GPUs: {router['problem']}; it is tried again, and jobs go on without")
        print("\n".join(status_lines(body["jobs"], shutil.get_terminal_size().columns)))
    return 0


def status_lines(jobs: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """Returns a row for each job in at most `width` columns, and indented lines for its details."""
    if not jobs:
        return ["no jobs; submit one with: rose sched submit JOB.yaml"]
    rows = [HEADER, *map(_row, jobs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER) - 1)]
    max_name = max(8, (width - MIN_NOW - widths[1] - widths[3] - 2 * len(widths)) // 2)
    widths[0], widths[2] = min(widths[0], max_name), min(widths[2], max_name)
    room = max(MIN_NOW, width - sum(widths) - 2 * len(widths))
    lines = []
    for row, job in zip(rows, [None, *jobs], strict=True):
        head = "".join(f"{_cut(cell, size):<{size}}  " for cell, size in zip(row, widths, strict=False))
        first, *more = textwrap.wrap(row[-1], room) or [""]
        lines.append(f"{head}{first}".rstrip())
        lines += [" " * len(head) + each for each in more]
        for detail in _details(job) if job is not None else ():
            lines += textwrap.wrap(detail, width, initial_indent="  ", subsequent_indent="    ")
    return lines


def _row(job: Mapping[str, Any]) -> tuple[str, ...]:
    return job["name"], job["state"], job["group"] or "-", "{} of {}".format(*job["iterations"]), _now(job)


def _cut(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _now(job: Mapping[str, Any]) -> str:
    if job["state"] in WAITING:
        return _turn(job)
    if job["is_over"]:
        return ""
    if job["holds"] is not None:
        progress = "" if job["progress"] is None else ", {} of {} responses".format(*job["progress"])
        some = _some(job, "ranks_holding")
        return f"runs {job['holds']}{progress}" + (f", {some} still in it" if some else "")
    some = _some(job, "ranks_waiting")
    if some:
        return f"{some} waiting for the others"
    if job["state"] == "preempting":
        return "ends, and goes back to the queue"
    if job["waits_for"] is not None:
        behind = f", held by {', '.join(job['behind'])}" if job["behind"] else ", not yet due"
        return f"waits for {job['waits_for']} nodes{behind}"
    if job["host"] is None:
        return "waits for a runner"
    if job["ranks_unheard"]:
        return f"waits for {_some(job, 'ranks_unheard') or 'all ranks'} to start"
    return "between two phases"


def _some(job: Mapping[str, Any], which: str) -> str:
    """Names these ranks of the job unless it is none or all of them."""
    ranks = job[which]
    if not 0 < len(ranks) < job["num_ranks"]:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {job['num_ranks']}"


def _turn(job: Mapping[str, Any]) -> str:
    """When the job is tried for a place."""
    if job["state"] == "held":
        return "starts after rose sched release"
    return f"priority {job['priority']}, {job['ahead']} ahead of it"


def _details(job: Mapping[str, Any]) -> Iterator[str]:
    yield from _preemption(job)
    if job["state"] in WAITING:
        yield job["why"]
        return
    if job["restarts"]:
        yield f"started again {job['restarts']} time{'s' if job['restarts'] > 1 else ''}"
    yield from job["places"]
    if job["serving_gpus"] is not None and not job["is_over"]:
        yield f"may borrow {job['serving_gpus']} serving GPU{'' if job['serving_gpus'] == 1 else 's'}"
    if job["serving_gpu_s"]:
        dollars = f", ${job['serving_dollars']:.2f}" if job["serving_dollars"] else ""
        yield f"has used {job['serving_gpu_s'] / 3600:.4g} GPU hours of serving GPUs{dollars}"
    for move in job["moves"]:
        pause = f"paused {move['pause_s']:.1f} s" if move["pause_s"] is not None else "on its way"
        yield f"moved from {move['from']['group']} to {move['to']['group']} ({pause})"
    if job["moving_to"] is not None:
        yield f"moves to {job['moving_to']} after this iteration"
    if job["note"]:
        yield job["note"]


def _preemption(job: Mapping[str, Any]) -> Iterator[str]:
    """Who has the job's place or gets it, and whose place it gets."""
    for each in job["preemptions"]:
        waited = f", waited {each['waited_s']:.0f} s" if each["waited_s"] is not None else ""
        yield f"preempted by {each['by']} before iteration {each['iteration']}{waited}: {each['why']}"
    if (gives_way := job["gives_way"]) is not None:
        now = job["state"] == "preempting"
        when = "now" if now else f"after iteration {job['iterations'][0]}{_not_before(gives_way)}"
        yield f"gives its place to {gives_way['to']} {when}: {gives_way['why']}"
    for each in job["takes_place_of"]:
        yield f"takes the place of {each['job']} after its iteration {each['iteration']}{_not_before(each)}"


def _not_before(facts: Mapping[str, Any]) -> str:
    left_s = facts["not_before_s"]
    return f" or a later one, in {math.ceil(left_s)} s at the earliest" if left_s > 0 else ""


def earliest_line(earliest: Mapping[str, Any] | None) -> str:
    """Returns when a queued job could start."""
    if earliest is None:
        return "when it could start is not known"
    minutes = max(1, math.ceil(earliest["in_s"] / 60))
    time = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
    what = "gives its place away" if earliest.get("is_preempted") else "ends"
    return f"it could start in {time} at the earliest, when {earliest['after']} {what}"


def explain_running(job: str, channel: str, *, as_json: bool) -> int:
    """``rose sched explain --job JOB``."""
    with connect(channel) as client:
        [found] = ask(client, Status(seq=client.next_seq(), job=job))["jobs"]
    shown = (
        *("name", "state", "group", "rollout_nodes", "asked_nodes", "why", "note", "moving_to", "moves"),
        *("priority", "ahead", "num_overtaken", "earliest"),
        *("takes_place_of", "gives_way", "preemptions"),
    )
    if as_json:
        print_json({key: found.get(key) for key in shown})
        return 0
    if found["state"] in WAITING:
        print(f"{job} is {found['state']}: {found['why']}")
        print(f"  {_turn(found)}, overtaken by {found['num_overtaken']} jobs")
        print("".join(f"  {line}\n" for line in _preemption(found)), end="")
        if found["state"] == "queued":
            print(f"  {earliest_line(found['earliest'])}")
        return 0
    if found["group"] is None:  # on a device that it shares with another job, or over
        print(f"{job} is {found['state']}: {found['why']}")
        return 0
    nodes = ", ".join(map(str, found["rollout_nodes"]))
    print(f"{job} is {found['state']} in {found['group']}, on rollout nodes {nodes}: {found['why']}")
    if len(found["rollout_nodes"]) < found.get(
        "asked_nodes", 0
    ):  # absent from a scheduler of an earlier version
        print(f"  keeps {len(found['rollout_nodes'])} of the {found['asked_nodes']} it asked for, with loans")
    for move in found["moves"]:
        pause = f"{move['pause_s']:.1f} s" if move["pause_s"] is not None else "not over yet"
        start = "warm" if move["is_warm"] else "cold"
        print(
            f"  before iteration {move['iteration']} from {move['from']['group']} to {move['to']['group']}, "
            f"{start} start, pause {pause}: {move['why']}"
        )
    print("".join(f"  {line}\n" for line in _preemption(found)), end="")
    if found["moving_to"] is not None:
        print(f"  moves to {found['moving_to']} when its iteration {found['iterations'][0]} is done")
    return 0
