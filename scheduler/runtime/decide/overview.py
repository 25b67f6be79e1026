"""Every fact that the dashboard shows of a running scheduler, in one answer.

The answer costs one dictionary for each running job and for the latest ended ones. The dashboard's process
computes timetables and sums from it (rose.scheduler.dashboard). Pure.
"""

from dataclasses import asdict
from typing import Any

from rose.scheduler.cluster.pools import Pool
from rose.scheduler.group.model import Job
from rose.scheduler.runtime.decide.state import State


def overview(state: State, pid: int, now: float) -> dict[str, Any]:
    """Returns all running jobs, the latest ended ones, groups, pools and counts."""
    cluster = state.cluster
    pools = cluster.pools.to_pools()
    return {
        "scheduler_pid": pid,
        "uptime_s": now - state.meter.started_s,
        "policy": cluster.policy,
        "has_runner": any(host.is_alive for host in state.hosts.by_name.values()),
        "pools": {"rollout": _pool(pools.rollout), "train": _pool(pools.train)},
        "groups": {name: _group(state, name) for name in state.groups.by_name},
        "states": {each.value: num for each, num in state.num_in_state.items() if num},
        "jobs": [_job(state, _model(state, name), now) for name in state.shown()],
        "meter": state.meter.to_json(),
    }


def _model(state: State, name: str) -> Job:
    found = state.models.get(name)
    return found if found is not None else state.spec_of(name).to_job(state.cluster.pools.to_pools())


def _pool(pool: Pool) -> dict[str, Any]:
    return {
        "name": pool.name,
        "dollars_per_node_hour": pool.dollars_per_node_hour,
        "num_nodes": pool.num_nodes,
    }


def _group(state: State, name: str) -> dict[str, Any]:
    return {**state.describe_group(name), "order": state.permits_in(name).order_of_jobs}


def _job(state: State, job: Job, now: float) -> dict[str, Any]:
    name = job.name
    seen = state.meter.iterations.get(name)
    return {
        **state.describe(name),
        "waited_s": state.meter.waited_s(name, now),
        "held_s": state.meter.held_s(name, now),
        "rollout_s": job.rollout_s,
        "train_s": job.train_s,
        "after_rollout_s": job.after_rollout_s,
        "after_train_s": job.after_train_s,
        "num_rollout_nodes": job.num_rollout_nodes,
        "num_train_nodes": job.num_train_nodes,
        "slo": job.slo,
        "slo_kind": job.slo_kind.value,
        "observed": asdict(seen) if seen is not None else None,
    }
