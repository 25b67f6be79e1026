"""What people are told of jobs and groups, and every fact that the dashboard shows, in one answer.

That answer costs one dictionary for each running job and for the latest ended ones. The dashboard's process
computes timetables and sums from it (rose.scheduler.dashboard). Pure.
"""

from dataclasses import asdict
from typing import Any

from rose.scheduler.cluster.pools import Pool
from rose.scheduler.group.model import Job
from rose.scheduler.runtime.decide.records import JobState
from rose.scheduler.runtime.decide.state import State


def overview(state: State, pid: int, now: float) -> dict[str, Any]:
    """Returns all running jobs, the latest ended ones, groups, pools and counts."""
    cluster = state.cluster
    pools = cluster.to_pools()
    return {
        "scheduler_pid": pid,
        "uptime_s": now - state.meter.started_s,
        "policy": cluster.policy,
        "has_runner": state.runner is not None,
        "pools": {"rollout": _pool(pools.rollout), "train": _pool(pools.train)},
        "groups": {name: _group(state, name) for name in state.groups.by_name},
        "states": {each.value: num for each, num in state.num_in_state.items() if num},
        "jobs": [_job(state, _model(state, name), now) for name in state.shown()],
        "meter": state.meter.to_json(),
    }


def _model(state: State, name: str) -> Job:
    found = state.models.get(name)
    return found if found is not None else state.spec_of(name).to_job(state.cluster.to_pools())


def _pool(pool: Pool) -> dict[str, Any]:
    return {
        "name": pool.name,
        "dollars_per_node_hour": pool.dollars_per_node_hour,
        "num_nodes": pool.num_nodes,
    }


def _group(state: State, name: str) -> dict[str, Any]:
    return {**describe_group(state, name), "order": state.permits_in(name).order_of_jobs}


def _job(state: State, job: Job, now: float) -> dict[str, Any]:
    name = job.name
    seen = state.meter.iterations.get(name)
    return {
        **describe_job(state, name, now),
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


def describe_group(state: State, name: str) -> dict[str, Any]:
    """Returns a group's nodes, its jobs, who holds nodes now, and what is drained."""
    group = state.groups.by_name[name]
    return {
        "num_rollout_nodes": group.num_rollout_nodes,
        "num_train_nodes": group.num_train_nodes,
        "jobs": {each.job.name: list(each.rollout_nodes) for each in group.members},
        "holders": {each.job: each.phase for each in state.permits_in(name).holds.values()},
        "drained": state.groups.drained.get(name, []),
        "limits_s": state.permits_in(name).limits_s(),
    }


def describe_job(state: State, name: str, now: float) -> dict[str, Any]:
    """Returns a job's state, its place, what it holds and what it waits for, and its history."""
    record, spec = state.jobs[name], state.spec_of(name)
    permits = state.permits_of(name) if record.state.is_placed else None
    hold = permits.holds.get(name) if permits is not None else None
    progress = state.progress.get(name)
    log_folder = state.runner.log_folder if state.runner is not None else ""
    return {
        "name": name,
        "state": record.state,
        "is_over": record.state.is_over,
        "places": record.places if record.state.is_placed else [],
        "host": record.host if not record.state.is_waiting else None,
        "log": f"{log_folder}/{name}.log",
        "group": record.group,
        "rollout_nodes": list(record.rollout_nodes),
        "asked_nodes": spec.asked_nodes,
        "why": record.why,
        "iterations": [record.num_done, spec.iterations],
        "attempt": record.attempt,
        "restarts": record.num_restarts,
        "num_ranks": record.num_ranks,
        "holds": hold.phase if hold is not None else None,
        "ranks_holding": sorted(hold.until_s) if hold is not None else [],
        "ranks_waiting": sorted(record.waiting.callers) if record.waiting is not None else [],
        "ranks_unheard": sorted(set(range(record.num_ranks)) - set(record.heard))
        if name in state.hung_s
        else [],
        "waits_for": record.waiting.phase if record.waiting is not None else None,
        "behind": permits.holders_before(name) if permits is not None else [],
        "priority": spec.priority,
        "ahead": state.queue.index(name) if record.state is JobState.QUEUED else None,
        "num_overtaken": record.num_overtaken,
        "progress": list(progress) if progress is not None else None,
        "moving_to": record.next_place.group if record.next_place is not None else None,
        "moves": [each.describe() for each in record.moves],
        "note": record.note,
        "serving_gpus": state.loans.num_gpus(name),
        "serving_gpu_s": record.borrowed.gpu_s,
        "serving_dollars": record.borrowed.gpu_s / 3600 * state.cluster.pools.serving_dollars_per_gpu_hour,
        **_preemption(state, name, now),
    }


def _preemption(state: State, name: str, now: float) -> dict[str, Any]:
    """Returns whose places the job takes, who takes its own and when at the earliest, and what has been."""
    record = state.jobs[name]
    return {
        "takes_place_of": [
            {
                "job": each,
                "iteration": state.jobs[each].num_done,
                "not_before_s": _not_before_s(state, each, now),
            }
            for each in state.takeovers.get(name, ())
        ],
        "gives_way": {
            "to": record.gives_way.to,
            "why": record.gives_way.why,
            "not_before_s": _not_before_s(state, name, now),
        }
        if record.gives_way is not None
        else None,
        "preemptions": [each.describe() for each in record.preemptions],
    }


def _not_before_s(state: State, name: str, now: float) -> float:
    """Returns how long the job must still run before it gives its place away."""
    return max(0.0, state.cluster.preemption.min_run_s - state.jobs[name].ran_s(now))
