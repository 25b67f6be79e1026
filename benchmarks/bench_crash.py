"""A crash of a job, the scheduler or Redis costs the others next to nothing, and its own job one iteration.

Real processes under `rose sched serve`, killed by SIGKILL. Redis is started again at once by this benchmark,
as an operator's supervisor would; the scheduler by `rose sched serve`.

  kill_recovery_s[permit holder]  from the kill until the job that waited for the same nodes has begun
  kill_recovery_s[scheduler], [redis]  from the kill until the next phase of any job has begun; one is due
                          every 0.3 s
  others_slowdown[*]      WEAVE's Figure 19: three jobs share a training node, a kill in mid-run; iteration
                          time of the jobs that were not killed over theirs alone on the same nodes
  lost_iterations[*]      iterations whose training was finished twice or never, over all three jobs

    python benchmarks/bench_crash.py --redis-server redis-server --json crash.json
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from bench_mux import SLO
from lib.cluster.redis_server import RedisServer, redis_server
from lib.cluster.rig import ClusterRig, RigJob
from lib.faults.signals import kill
from lib.harness import median_figure, run_benchmark

from rose.errors import WorkerError
from rose.measure.figures import Figure

CASES = ("permit holder", "scheduler", "redis")
PATIENCE_S = 120.0
SCALE = 1 / 200
"""The fraction of the paper's phase times at which the others' slowdown is measured."""


def measure(args: argparse.Namespace) -> list[Figure]:
    num_kills, num_iterations = (2, 6) if args.quick else (6, 12)
    alone_s = _alone(num_iterations)
    figures = []
    cases = [args.only] if args.only is not None else CASES
    for case in cases:
        if case != "redis":
            figures += _case(case, num_kills, num_iterations, alone_s, None)
            continue
        with redis_server(args.redis_server) as server:
            if server is None:
                figures.append(Figure(name="kill_recovery_s[redis]", value=None, unit="s", target="<= 2"))
            else:
                figures += _case(case, num_kills, num_iterations, alone_s, server)
    return figures


def _case(
    case: str, num_kills: int, num_iterations: int, alone_s: float, server: RedisServer | None
) -> list[Figure]:
    recoveries = _recoveries(case, num_kills, server)
    slowdowns, num_lost = _figure_19(case, num_iterations, alone_s, server)
    return [
        median_figure(f"kill_recovery_s[{case}]", recoveries, "s", target="<= 2"),
        median_figure(f"others_slowdown[{case}]", slowdowns, "x solo", target="<= 1.05"),
        Figure(name=f"lost_iterations[{case}]", value=num_lost, unit="iterations", target="<= 0"),
    ]


def _url(server: RedisServer | None, channel: str) -> str | None:
    return f"{server.url}?channel={channel}" if server is not None else None


def _kill_redis(server: RedisServer | None) -> float:
    """When it was killed; it is started again at once."""
    assert server is not None
    killed_s = kill(server.pid, whole_group=False)
    server.start_again()
    return killed_s


# Recovery -------------------------------------------------------------------------------------------------


def _recoveries(case: str, num_kills: int, server: RedisServer | None) -> list[float]:
    """Two jobs of which one always waits for the other's training."""
    with ClusterRig(1, 1, _url(server, "recovery")) as rig:
        for name in ("x", "y"):
            rig.submit(RigJob(name=name, rollout=0.05, train=0.3, num_iterations=10_000), slo=SLO)
        return [_one_kill(case, rig, server) for _ in range(num_kills)]


def _one_kill(case: str, rig: ClusterRig, server: RedisServer | None) -> float:
    _wait_for_steps(rig)
    if case == "scheduler":
        pid = rig.scheduler_pid()
        assert pid is not None
        killed_s = kill(pid, whole_group=False)
    elif case == "redis":
        killed_s = _kill_redis(server)
    else:
        holder, pid = _wait_for_holder(rig)
        killed_s = kill(pid, whole_group=False)
        return _first_begin(rig, killed_s, lambda note: note["job"] != holder and note["phase"] == "train")
    return _first_begin(rig, killed_s, lambda note: True)


def _wait_for_steps(rig: ClusterRig) -> None:
    """Waits until both jobs' present processes have finished two more phases of training."""
    begin_s = time.monotonic()

    def have_run() -> bool:
        ends = Counter(each.job for each in rig.phases() if each.phase == "train" and each.end_s > begin_s)
        return len(ends) == 2 and min(ends.values()) >= 2

    rig.wait_until(have_run, "both jobs' phases", PATIENCE_S)


def _wait_for_holder(rig: ClusterRig) -> tuple[str, int]:
    """A job in training, and its pid, while the other one waits for it."""
    found: list[tuple[str, int]] = []

    def is_waited_for() -> bool:
        jobs = {each["name"]: each for each in rig.status()["jobs"]}
        behind = [name for name, each in jobs.items() if each["waits_for"] == "train" and each["behind"]]
        last = next(note for note in reversed(rig.notes()) if note["phase"] == "train")
        if behind and last["what"] == "begin" and last["job"] not in behind:
            found.append((last["job"], last["pid"]))
        return bool(found)

    rig.wait_until(is_waited_for, "a holder that is waited for", PATIENCE_S)
    return found[0]


def _first_begin(rig: ClusterRig, since_s: float, counts: Callable[[dict[str, Any]], bool]) -> float:
    """Returns the seconds until the first phase that counts has begun."""
    found: list[float] = []

    def has_begun() -> bool:
        found.extend(
            note["at_s"]
            for note in rig.notes()
            if note["what"] == "begin" and note["at_s"] > since_s and counts(note)
        )
        return bool(found)

    rig.wait_until(has_begun, "phase after the kill", PATIENCE_S)
    return found[0] - since_s


# Figure 19 ------------------------------------------------------------------------------------------------


def _jobs(num_iterations: int) -> list[RigJob]:
    """WEAVE's Train Mux: each its own rollout node, one training node for all."""
    lengths = {"d1": (375.3, 150.1), "d2": (375.3, 150.1), "e": (450.3, 75.1)}
    return [
        RigJob(
            name=name,
            rollout=rollout_s * SCALE,
            train=train_s * SCALE,
            num_iterations=num_iterations,
            rollout_nodes=(node,),
        )
        for node, (name, (rollout_s, train_s)) in enumerate(lengths.items())
    ]


def _alone(num_iterations: int) -> float:
    """An iteration of d1 with the nodes to itself; d2 is the same."""
    with ClusterRig(3, 1) as rig:
        rig.submit(_jobs(num_iterations)[0], slo=SLO)
        rig.wait_done({"d1"}, PATIENCE_S)
        return _iteration_s(rig, "d1")


def _iteration_s(rig: ClusterRig, job: str) -> float:
    """Mean time between the ends of a job's iterations."""
    ends = [each.end_s for each in rig.phases() if (each.job, each.phase) == (job, "train")]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def _figure_19(
    case: str, num_iterations: int, alone_s: float, server: RedisServer | None
) -> tuple[list[float], int]:
    """The others' slowdowns, and how many iterations too many or too few were run."""
    with ClusterRig(3, 1, _url(server, "figure19")) as rig:
        for job in _jobs(num_iterations):
            rig.submit(job, slo=SLO)
        rig.wait_until(lambda: len(_trained(rig, "e")) >= num_iterations // 3, "third of the run", PATIENCE_S)
        if case == "scheduler":
            pid = rig.scheduler_pid()
            assert pid is not None
            kill(pid, whole_group=False)
        elif case == "redis":
            _kill_redis(server)
        else:
            rig.wait_until(
                lambda: rig.status()["groups"]["main"]["holders"].get("e") is not None, "e's permit"
            )
            kill(next(note["pid"] for note in reversed(rig.notes()) if note["job"] == "e"), whole_group=False)
        rig.wait_done({"d1", "d2", "e"}, PATIENCE_S)
        num_lost = sum(_lost(rig, name, num_iterations) for name in ("d1", "d2", "e"))
        restarts = {each["name"]: each["restarts"] for each in rig.status()["jobs"]}
        if restarts != {"d1": 0, "d2": 0, "e": int(case == "permit holder")}:
            raise WorkerError(f"restarts after the kill of the {case}: {restarts}")
        return [_iteration_s(rig, name) / alone_s for name in ("d1", "d2")], num_lost


def _trained(rig: ClusterRig, job: str) -> list[int]:
    return [each.iteration for each in rig.phases() if (each.job, each.phase) == (job, "train")]


def _lost(rig: ClusterRig, job: str, num_iterations: int) -> int:
    """Iterations whose training was finished twice or never."""
    times = Counter(_trained(rig, job))
    return sum(abs(times[iteration] - 1) for iteration in range(num_iterations))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--redis-server", default="redis-server", help="its program (%(default)s)")


if __name__ == "__main__":
    raise SystemExit(run_benchmark(__doc__, measure, _add_arguments))
