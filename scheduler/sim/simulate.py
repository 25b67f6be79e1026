"""`rose sched simulate`: what a policy of the cluster level would do with a trace, in simulated figures."""

import json
from collections.abc import Sequence
from pathlib import Path

from rose.arguments import CommandParser
from rose.scheduler.cluster.choice import POLICIES
from rose.scheduler.group.model import SloKind
from rose.scheduler.sim.live import Replay
from rose.scheduler.sim.loop import Result, Simulation
from rose.scheduler.sim.progress import Progress
from rose.scheduler.sim.workloads import Workload, generate_trace, read_trace, submissions


def simulate_cluster(argv: Sequence[str]) -> int:
    """Prints dollars, attainment and moves of one policy."""
    parser = CommandParser(
        "rose sched simulate",
        "Plays a trace of jobs against a policy. No real job is placed.\n\n"
        "--level group plays the permits of a file's groups instead, --level node requests and training "
        "tasks on nodes, and --level gpu two pipelines on the same GPUs. Each has options of its own: "
        "rose sched simulate --level node --help.",
        "rose sched simulate --trace jobs.csv --policy lifetime --workload mixed",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="CSV", help="columns arrival_s,duration_s (default: a generated trace)"
    )
    parser.add_argument("--policy", choices=sorted(POLICIES), default="lifetime")
    parser.add_argument("--workload", choices=[each.value for each in Workload], default=Workload.MIXED.value)
    parser.add_argument(
        "--slo-kind", choices=[each.value for each in SloKind], default=SloKind.ITERATION.value
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--stretch",
        action="store_true",
        help="let slowed jobs stay longer (default: they leave when the trace says)",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="play it through the scheduler itself: every phase, permit and move (minutes)",
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(list(argv))
    trace = read_trace(arguments.trace) if arguments.trace is not None else generate_trace(arguments.seed)
    jobs = submissions(
        trace, Workload(arguments.workload), arguments.seed, slo_kind=SloKind(arguments.slo_kind)
    )
    progress, keeps_ends = Progress(f"policy {arguments.policy}"), not arguments.stretch
    if arguments.live:
        result = Replay(jobs, arguments.policy, keeps_ends=keeps_ends, progress=progress).run()
    else:
        policy = POLICIES[arguments.policy](arguments.seed)
        result = Simulation(jobs, policy, keeps_ends=keeps_ends, progress=progress).run()
    report = _report(result)
    if arguments.json:
        print(json.dumps({"kind": "simulated", "policy": arguments.policy} | report, indent=2))
    else:
        print(
            f"simulated, policy {arguments.policy}: "
            + ", ".join(f"{key} {value}" for key, value in report.items())
        )
    return 0


def _report(result: Result) -> dict[str, object]:
    return {
        "dollars": round(result.dollars, 2),
        "dollars_per_hour": round(result.dollars_per_hour, 2),
        "peak_dollars_per_hour": round(result.peak_dollars_per_hour, 2),
        "jobs": result.num_jobs,
        "attainment": result.attainment,
        "moves": result.num_moves,
        "placements": {kind.value: num for kind, num in result.kinds.items()},
    }
