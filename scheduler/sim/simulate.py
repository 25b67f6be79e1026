"""`rose sched simulate`: what a policy of the cluster level would do with a trace, in simulated figures."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rose.arguments import CommandParser
from rose.config import load_yaml
from rose.errors import ConfigError
from rose.scheduler.cluster.choice import POLICIES
from rose.scheduler.cluster.groups import PAUSE_S
from rose.scheduler.cluster.spec import DEFAULT_POLICY
from rose.scheduler.group.model import SloKind
from rose.scheduler.runtime.job.spec import ServeSpec
from rose.scheduler.sim.live import SchedulerReplay
from rose.scheduler.sim.loop import Simulation, SimulationResult
from rose.scheduler.sim.progress import ProgressLines, table
from rose.scheduler.sim.workloads import Submission, Workload, generate_trace, read_trace, submissions


def simulate_cluster(argv: Sequence[str]) -> int:
    """Prints dollars, attainment and moves of one policy."""
    arguments = _parser().parse_args(list(argv))
    trace = read_trace(arguments.trace) if arguments.trace is not None else generate_trace(arguments.seed)
    jobs = submissions(
        trace, Workload(arguments.workload), arguments.seed, slo_kind=SloKind(arguments.slo_kind)
    )
    cluster = load_yaml(arguments.cluster, ServeSpec) if arguments.cluster is not None else None
    name = arguments.policy or (cluster.policy if cluster is not None else DEFAULT_POLICY)
    _check_teams(jobs, cluster)
    result = _play(jobs, name, cluster, arguments)
    if arguments.json:
        print(json.dumps({"kind": "simulated", "policy": name} | _report(result), indent=2))
    else:
        print(f"simulated: {result.num_jobs} jobs under policy {name}")
        print("\n".join(table(_facts(result))))
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose sched simulate",
        "Plays a trace of jobs against a policy. No real job is placed.\n\n"
        "--level group plays the permits of a file's groups instead, --level node requests and training "
        "tasks on nodes, and --level gpu two pipelines on the same GPUs. Each has options of its own, as "
        "`rose sched simulate --level node --help` shows.",
        "rose sched simulate --trace jobs.csv --policy lifetime --workload mixed",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="CSV",
        help="arrivals of the jobs: columns arrival_s,duration_s and, if wanted, priority,team "
        "(default: generated)",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="CLUSTER.yaml",
        help="the file of rose sched serve: its pools, teams and preemption (default: nodes without limit)",
    )
    parser.add_argument(
        "--policy",
        choices=sorted(POLICIES),
        metavar="POLICY",
        help="the policy that places jobs: %(choices)s (default: that of the cluster's file, else "
        f"{DEFAULT_POLICY})",
    )
    parser.add_argument(
        "--workload",
        choices=[each.value for each in Workload],
        default=Workload.MIXED.value,
        metavar="KIND",
        help="the kind of jobs that the trace's arrivals become: %(choices)s (default: %(default)s)",
    )
    parser.add_argument(
        "--slo-kind",
        choices=[each.value for each in SloKind],
        default=SloKind.ITERATION.value,
        help="what each job's SLO bounds: every iteration, or its whole life (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random numbers (default: %(default)s)"
    )
    parser.add_argument(
        "--stretch",
        action="store_true",
        help="let slowed jobs stay longer (default: they leave when the trace says)",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="play the trace through the scheduler itself, with every phase, permit and move; takes minutes",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _play(
    jobs: Sequence[Submission], name: str, cluster: ServeSpec | None, arguments: argparse.Namespace
) -> SimulationResult:
    progress, keeps_ends = ProgressLines(f"policy {name}"), not arguments.stretch
    if arguments.live:
        return SchedulerReplay(jobs, name, keeps_ends=keeps_ends, progress=progress, cluster=cluster).run()
    return Simulation(
        jobs,
        POLICIES[name](arguments.seed),
        cluster.pools.to_pools() if cluster is not None else None,
        keeps_ends=keeps_ends,
        pause_s=cluster.move_pause_s if cluster is not None else PAUSE_S,
        progress=progress,
        preemption=cluster.to_preemption() if cluster is not None else None,
    ).run()


def _check_teams(jobs: Sequence[Submission], cluster: ServeSpec | None) -> None:
    """Raises: ConfigError for a team of the trace that the cluster's file lacks."""
    known = cluster.teams if cluster is not None else {}
    lacking = sorted({one.team for one in jobs if one.team is not None} - known.keys())
    if lacking:
        raise ConfigError(
            f"the trace's teams {', '.join(lacking)} are not in the cluster's file, which has "
            f"{', '.join(known) or 'none'}: add them to `teams` of the file that --cluster names"
        )


def _report(result: SimulationResult) -> dict[str, object]:
    return {
        "dollars": round(result.dollars, 2),
        "dollars_per_hour": round(result.dollars_per_hour, 2),
        "peak_dollars_per_hour": round(result.peak_dollars_per_hour, 2),
        "jobs": result.num_jobs,
        "attainment": result.attainment,
        "moves": result.num_moves,
        "preemptions": result.num_preemptions,
        "mean_wait_s": {str(priority): round(wait_s) for priority, wait_s in result.waited_s.items()},
        "placements": {kind.value: num for kind, num in result.kinds.items()},
    }


def _facts(result: SimulationResult) -> Iterator[tuple[str, str]]:
    per_hour = f"${result.dollars_per_hour:,.2f} an hour, ${result.peak_dollars_per_hour:,.2f} at most"
    yield "cost", f"${result.dollars:,.2f}; {per_hour}"
    yield "duration", f"{result.duration_s / 3600:,.1f} h"
    yield "SLO kept", f"by {result.num_attained} of {result.num_jobs} jobs ({result.attainment:.1%})"
    yield "moves", str(result.num_moves)
    yield "preemptions", str(result.num_preemptions)
    for priority, wait_s in sorted(result.waited_s.items(), reverse=True):
        yield f"mean wait, priority {priority}", f"{wait_s:,.0f} s in the queue"
    for kind, num in result.kinds.items():
        yield f"placed by {kind.value}", str(num)
