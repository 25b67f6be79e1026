"""`rose sched profile`: measures how long a job's phases take, and writes the times into its file.

Bad input is refused before anything runs. The file is written only after a whole run, and no file is
overwritten. solo_run.py runs the job, and rose.scheduler.runtime.job.profile computes the figures.
"""

import json
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from rose.arguments import CommandParser, check_output, positive_seconds
from rose.config import Settings, load_yaml
from rose.errors import ConfigError, install_hint
from rose.jobs.solo_run import measure
from rose.node.signals import StopOnSignals
from rose.scheduler.runtime.channel.opening import ChannelUrl
from rose.scheduler.runtime.command.connection import add_channel_flag
from rose.scheduler.runtime.job.profile import NUM_WARM_UP, JobProfile, filled
from rose.scheduler.runtime.job.spec import RayClusterSpec, RunSpec, ServeSpec, TailSpec, read_job

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """``rose sched profile JOB.yaml``."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    content, spec = read_job(arguments.job)
    spec = spec.model_copy(update={"folder": str((arguments.job.parent / spec.folder).resolve())})
    output = _output(arguments.output, arguments.job)
    ray, redis = _ray(arguments.cluster, arguments.channel)
    if arguments.dry_run:
        print(json.dumps(_plan(spec, arguments.iterations, output)))
        return 0
    with StopOnSignals():
        profile = measure(
            spec,
            arguments.iterations,
            timeout_s=arguments.timeout_s,
            settings=Settings.from_environment(),
            ray=ray,
            redis=redis,
        )
        written = filled(content, spec, profile)
        if output.resolve().parent != arguments.job.resolve().parent:
            written["folder"] = spec.folder  # was relative to the other file
        output.write_text(_header(profile) + yaml.safe_dump(written, sort_keys=False))
        if not profile.has_asked_tokens:
            logger.warning("%s", _warning(profile))
        if arguments.json:
            print(json.dumps(profile.to_json() | {"output": str(output)}))
        else:
            console = Console()
            console.print(_table(profile))
            if profile.tail is not None:
                console.print(_speed(profile.tail), soft_wrap=True)
            console.print(f"written: {output}  (rose sched submit {output})", soft_wrap=True)
        return 0
    return 130  # a signal


def _output(given: Path | None, job: Path) -> Path:
    """Checks the output path before minutes are spent on measuring. Raises: ConfigError."""
    output = given if given is not None else job.with_name(f"{job.stem}.profiled.yaml")
    check_output(output)
    return output


def _ray(cluster: Path | None, channel: str) -> tuple[RayClusterSpec | None, str | None]:
    """Returns the Ray cluster to run on, and the Redis of its channel. Raises: ConfigError."""
    if cluster is None:
        return None, None
    ray = load_yaml(cluster, ServeSpec).ray
    if ray is None:
        raise ConfigError(f"--cluster {cluster}: has no `ray`; leave --cluster out to run on this machine")
    if find_spec("ray") is None:
        raise ConfigError(f"--cluster {cluster}: has `ray`, which is not installed; {install_hint('ray')}")
    return ray, None if channel.startswith("unix:") else ChannelUrl.parse(channel).url


def _plan(spec: RunSpec, num_iterations: int, output: Path) -> dict[str, Any]:
    return {
        "job": spec.name,
        "state": "would run",
        "command": list(spec.command),
        "folder": spec.folder,
        "phases": list(spec.phases),
        "max_tokens": spec.max_tokens,
        "warm_up_iterations": NUM_WARM_UP,
        "iterations": num_iterations,
        "output": str(output),
    }


def _header(profile: JobProfile) -> str:
    note = "" if profile.has_asked_tokens else f"# {_warning(profile)}\n"
    return (
        f"# seconds: the longest of {profile.num_iterations} iterations alone, at {profile.max_tokens} "
        f"tokens, as rose sched profile measured them.\n{note}"
    )


def _warning(profile: JobProfile) -> str:
    return (
        f"{profile.job} never read progress.forced_tokens: its responses had their ordinary lengths, so "
        f"these are no worst-case times unless each of them always has {profile.max_tokens} tokens"
    )


def _table(profile: JobProfile) -> Table:
    table = Table(
        "phase",
        "longest",
        "median",
        "of that loading",
        "offloading",
        "peak of own memory",
        "kept in host memory",
    )
    for name, phase in profile.phases.items():
        table.add_row(
            name,
            f"{phase.total_s.worst:.3f} s",
            f"{phase.total_s.median:.3f} s",
            f"{phase.load_s.worst:.3f} s",
            f"{phase.offload_s.worst:.3f} s",
            f"{phase.peak_own_gib:.2f} GiB",
            f"{phase.cached_bytes / 1e9:.3f} GB",
        )
    for earlier, seconds in profile.outside.items():
        table.add_row(f"outside, after {earlier}", f"{seconds.worst:.3f} s", f"{seconds.median:.3f} s")
    return table


def _speed(tail: TailSpec) -> str:
    return (
        f"a rollout node's decode step takes {tail.step_s * 1e3:.3g} ms, and {tail.request_s * 1e6:.3g} us "
        f"for each response; it prefills {tail.prefill_tokens_per_s:.4g} tokens/s"
    )


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose sched profile",
        "Runs a job alone, with every response at the token limit, and writes its file with the phases' "
        "times. The job reads `progress.forced_tokens`; let nothing else run meanwhile.",
        "rose sched profile job.yaml --output profiled.yaml && rose sched submit profiled.yaml",
    )
    parser.add_argument(
        "job",
        type=Path,
        metavar="JOB.yaml",
        help="the job's file, as for rose sched submit; its phases need no seconds",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="CLUSTER.yaml",
        help="run the job on the Ray cluster of this file, on which no scheduler runs (default: here)",
    )
    add_channel_flag(parser, "with --cluster on several hosts: a Redis that all reach, redis://HOST:PORT/DB")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help="the file to write (default: JOB.profiled.yaml beside JOB)",
    )
    parser.add_argument(
        "--iterations",
        type=_positive,
        default=3,
        help="iterations to measure, after one to warm up (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout-s",
        type=positive_seconds,
        default=3600.0,
        help="limit of the whole run, start included (default: %(default)g)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would run")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number
