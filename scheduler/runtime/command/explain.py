"""`rose sched explain`: why a job of a file would run where it would, or why a running job runs where it
does.

Every group's verdict comes from the checks that decide.
"""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rose.arguments import CommandParser
from rose.config import load_yaml
from rose.errors import ConfigError
from rose.scheduler.cluster.borrowed import lend
from rose.scheduler.cluster.candidates import Candidate, Rejection
from rose.scheduler.cluster.choice import MULTI_RATE, POLICIES
from rose.scheduler.cluster.groups import Cluster, Rearrangement
from rose.scheduler.cluster.policies import explain
from rose.scheduler.cluster.right_sizing import fewest_certified
from rose.scheduler.cluster.spec import DEFAULT_POLICY, JOBS_EXAMPLE, ClusterSpec
from rose.scheduler.group.cycle import promised_s
from rose.scheduler.group.model import Job
from rose.scheduler.runtime.command.connection import add_channel_flag
from rose.scheduler.runtime.command.status import explain_running


def main(argv: Sequence[str]) -> int:
    """Places the file's jobs in order, and explains the last or the named one; or explains one that runs."""
    parser = CommandParser(
        "rose sched explain",
        "Says why a running job runs where it runs, or where a job of a file would go.\n\n"
        "--level group explains the orders of a file's groups, --level node the first decisions on nodes, "
        "and --level gpu the plan of two pipelines. `rose sched explain --level gpu --help` shows its "
        "options.\n\n"
        f"a complete JOBS.yaml:\n{textwrap.indent(JOBS_EXAMPLE, '  ')}",
        "rose sched explain --job math-7b",
    )
    parser.add_argument(
        "cluster",
        nargs="?",
        type=Path,
        metavar="JOBS.yaml",
        help="a file whose jobs are placed in their order (default: ask the running scheduler)",
    )
    parser.add_argument(
        "--job", metavar="NAME", help="the job to explain (default: the last one of the file)"
    )
    add_channel_flag(parser)
    parser.add_argument(
        "--policy",
        choices=sorted(set(POLICIES) - {"exact"}),
        default=DEFAULT_POLICY,
        metavar="POLICY",
        help="the policy that places jobs: %(choices)s (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args(list(argv))
    if arguments.cluster is None:
        if arguments.job is None:
            parser.error("name a running job with --job, or give a JOBS.yaml")
        return explain_running(arguments.job, arguments.channel, as_json=arguments.json)
    spec = load_yaml(arguments.cluster, ClusterSpec)
    jobs = spec.to_jobs()
    names = [job.name for job in jobs]
    wanted = arguments.job if arguments.job is not None else (names[-1] if names else None)
    if wanted not in names:
        raise ConfigError(f"{arguments.cluster}: no job {wanted}; the jobs are: {', '.join(names) or 'none'}")
    report = explanation(Cluster(spec.pools.to_pools()), jobs[: names.index(wanted) + 1], arguments.policy)
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(_lines(report)))
    return 0


def explanation(cluster: Cluster, jobs: Sequence[Job], policy_name: str) -> dict[str, object]:
    """Places `jobs` one after the other, and tells of the last: where it goes, and every group's verdict."""
    policy = POLICIES[policy_name](0)
    *earlier, job = jobs
    for one in earlier:
        cluster.submit(one, 0.0)
        cluster.apply(Rearrangement(groups=(policy.place(cluster, one, 0.0).group,)), 0.0)
    verdicts = explain(
        cluster, job, prune_saturated=policy_name == "weave", multi_rate=policy_name == MULTI_RATE
    )
    candidate = policy.place(cluster, job, 0.0)
    promises = promised_s(candidate.group)
    mine = next(k for k, member in enumerate(candidate.group.members) if member.job.name == job.name)
    return {
        "job": job.name,
        "policy": policy_name,
        "group": candidate.group.name,
        "kind": candidate.kind.value,
        "rollout_nodes": candidate.group.members[mine].rollout_nodes,
        "beside": [member.job.name for member in candidate.group.members if member.job.name != job.name],
        "dollars_per_hour_more": round(candidate.dollars_per_hour, 2),
        "iteration_s": round(promises[mine], 1),
        "limit_s": round(cluster.limit_s(job), 1),
        "borrowed_serving_gpus": _borrowed(cluster, candidate),
        "asked_rollout_nodes": job.num_rollout_nodes,
        "fewest_rollout_nodes": fewest_certified(
            candidate.group, job, cluster.pools, cluster.limit_s, multi_rate=policy_name == MULTI_RATE
        ),
        "considered": [_verdict(verdict) for verdict in verdicts],
    }


def _borrowed(cluster: Cluster, candidate: Candidate) -> int:
    """The serving GPUs that the job would borrow. Its certificate does not count on them."""
    others = [group for group in cluster.groups.values() if group.name != candidate.group.name]
    return lend([*others, candidate.group], cluster.pools).get(candidate.job.name, 0)


def _verdict(verdict: Candidate | Rejection) -> dict[str, object]:
    if isinstance(verdict, Rejection):
        return {
            "group": verdict.group,
            "kind": verdict.kind.value,
            "rejected_by": verdict.constraint.value,
            "because": verdict.text,
        }
    nodes = next(m.rollout_nodes for m in verdict.group.members if m.job.name == verdict.job.name)
    return {
        "group": verdict.group.name,
        "kind": verdict.kind.value,
        "rollout_nodes": nodes,
        "dollars_per_hour_more": round(verdict.dollars_per_hour, 2),
    }


def _lines(report: dict[str, object]) -> list[str]:
    num_borrowed = report["borrowed_serving_gpus"]
    keeps = _keeps(report)
    borrows = f"; borrows {num_borrowed} serving GPUs while they are free" if num_borrowed or keeps else ""
    lines = [
        f"{report['job']} goes to {report['group']} ({report['kind']}, policy {report['policy']}): "
        f"${report['dollars_per_hour_more']}/h more",
        f"  promised {report['iteration_s']} s an iteration, {report['limit_s']} s allowed; "
        f"beside {', '.join(map(str, _list(report['beside']))) or 'nobody'}{borrows}{keeps}",
    ]
    for verdict in _list(report["considered"]):
        assert isinstance(verdict, dict)
        said = (
            f"refused, {verdict['rejected_by']}: {verdict['because']}"
            if "rejected_by" in verdict
            else f"possible at ${verdict['dollars_per_hour_more']}/h more"
        )
        lines.append(f"  {verdict['group']} {verdict['kind']}: {said}")
    return lines


def _keeps(report: dict[str, object]) -> str:
    fewest, num = report["fewest_rollout_nodes"], report["asked_rollout_nodes"]
    return f", and keeps at least {fewest} of its {num} rollout nodes" if fewest != num else ""


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value
