"""/api/v1/state: what a person wants to see of a cluster, computed from a scheduler's facts.

Owns the shape of that JSON and its sums: plain numbers, seconds and dollars an hour, and None where nothing
is known. The page formats them. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rose.scheduler.dashboard.timetable import Timetable, job_of, timetable
from rose.scheduler.group.model import Job


def state_view(facts: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`facts`: the answer to Overview. `events`: oldest first, as the channel keeps them."""
    jobs = {each["name"]: job_of(each) for each in facts["jobs"]}
    tables = {name: timetable(name, group, jobs) for name, group in facts["groups"].items()}
    prices = {kind: pool["dollars_per_node_hour"] for kind, pool in facts["pools"].items()}
    used = {name: _used(name, group, facts["jobs"]) for name, group in facts["groups"].items()}
    return {
        "scheduler": {key: facts[key] for key in ("scheduler_pid", "uptime_s", "policy", "has_runner")},
        "cost": _cost(facts, jobs, used, prices),
        "pools": {
            kind: _pool(kind, pool, facts["groups"], used, tables) for kind, pool in facts["pools"].items()
        },
        "groups": [
            _group(name, group, used[name], tables[name], prices) for name, group in facts["groups"].items()
        ],
        "devices": facts.get("devices", []),
        "states": facts["states"],
        "jobs": [_job(each, jobs[each["name"]], tables, prices) for each in facts["jobs"]],
        "events": list(reversed(events)),
        "meter": facts["meter"],
    }


def _price(prices: Mapping[str, float], num_rollout_nodes: int, num_train_nodes: int) -> float:
    return num_rollout_nodes * prices["rollout"] + num_train_nodes * prices["train"]


def _used(name: str, group: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns how many nodes of the group the jobs use that run in it now, by pool.

    A job that is being moved is a member of two groups, and uses the nodes of the one that it is still in.
    """
    here = [
        group["jobs"][each["name"]]
        for each in jobs
        if each["group"] == name and each["name"] in group["jobs"]
    ]
    rollout = {node for nodes in here for node in nodes}
    return {"rollout": len(rollout), "train": group["num_train_nodes"] if here else 0}


def _cost(
    facts: Mapping[str, Any],
    jobs: Mapping[str, Job],
    used: Mapping[str, Mapping[str, int]],
    prices: Mapping[str, float],
) -> dict[str, Any]:
    """Sums over nodes that are used, as the policies do: an empty group of the file costs nothing."""
    running = [jobs[each["name"]] for each in facts["jobs"] if each["group"] and not each["is_over"]]
    now = sum(_price(prices, num["rollout"], num["train"]) for num in used.values())
    solo = sum(_price(prices, job.num_rollout_nodes, job.num_train_nodes) for job in running)
    return {
        "dollars_per_hour": now,
        "solo_dollars_per_hour": solo,
        "saved_share": 1.0 - now / solo if solo else None,
    }


def _pool(
    kind: str,
    pool: Mapping[str, Any],
    groups: Mapping[str, Any],
    in_use: Mapping[str, Mapping[str, int]],
    tables: Mapping[str, Timetable],
) -> dict[str, Any]:
    used = {name: num[kind] for name, num in in_use.items()}
    known = {name: num for name, num in used.items() if num and kind in tables[name].idle_share}
    idle = sum(num * tables[name].idle_share[kind] for name, num in known.items())
    drained = sum(_num_drained(kind, group) for group in groups.values())
    return {
        **pool,
        "num_used": sum(used.values()),
        "num_empty": sum(group[f"num_{kind}_nodes"] - used[name] for name, group in groups.items()),
        "num_drained": drained,
        "dollars_per_hour": sum(used.values()) * pool["dollars_per_node_hour"],
        "idle_share": idle / sum(known.values()) if known else None,
    }


def _num_drained(kind: str, group: Mapping[str, Any]) -> int:
    if kind == "train":  # drained as one
        return int(group["num_train_nodes"]) if "train" in group["drained"] else 0
    return sum(node != "train" for node in group["drained"])


def _group(
    name: str,
    facts: Mapping[str, Any],
    used: Mapping[str, int],
    table: Timetable,
    prices: Mapping[str, float],
) -> dict[str, Any]:
    nodes = ["train", *(f"rollout-{number}" for number in range(facts["num_rollout_nodes"]))]
    return {
        "name": name,
        "num_rollout_nodes": facts["num_rollout_nodes"],
        "num_train_nodes": facts["num_train_nodes"],
        "dollars_per_hour": _price(prices, used["rollout"], used["train"]),
        "jobs": [job for job in dict.fromkeys(facts["order"]) if job in facts["jobs"]],
        "cycle_s": table.cycle_s,
        "problem": table.problem,
        "idle_share": dict(table.idle_share),
        "nodes": [
            {
                "name": node,
                "is_drained": node in facts["drained"],
                "holder": _holder(node, facts),
                "bars": [
                    {"job": job, "start_s": start_s, "length_s": length_s}
                    for job, start_s, length_s in table.bars.get(node, ())
                ],
            }
            for node in [*nodes[1:], nodes[0]]
        ],
    }


def _holder(node: str, facts: Mapping[str, Any]) -> str | None:
    """The job whose permit covers the node now."""
    for job, phase in facts["holders"].items():
        if node == "train" and phase == "train":
            return str(job)
        if phase == "rollout" and node in [f"rollout-{each}" for each in facts["jobs"].get(job, ())]:
            return str(job)
    return None


def _job(
    facts: Mapping[str, Any], job: Job, tables: Mapping[str, Timetable], prices: Mapping[str, float]
) -> dict[str, Any]:
    kept = (
        "name",
        "state",
        "is_over",
        "ahead",
        "group",
        "why",
        "iterations",
        "attempt",
        "restarts",
        "holds",
        "held_s",
    )
    more = ("waits_for", "waited_s", "behind", "progress", "note", "log", "moving_to", "moves")
    preemption = ("takes_place_of", "gives_way", "preemptions")
    return {
        **{key: facts[key] for key in (*kept, *more, *preemption)},
        "solo_s": job.solo_s,
        "solo_dollars_per_hour": _price(prices, job.num_rollout_nodes, job.num_train_nodes),
        "slo": _slo(facts, job, tables.get(facts["group"])),
    }


def _slo(facts: Mapping[str, Any], job: Job, table: Timetable | None) -> dict[str, Any]:
    """Slowdowns: an iteration's time over the job's own alone, at its worst-case times."""
    seen = facts["observed"]
    mean = seen["sum_s"] / seen["count"] / job.solo_s if seen is not None else None
    worst = seen["worst_s"] / job.solo_s if seen is not None else None
    judged = worst if facts["slo_kind"] == "iteration" else mean
    promised_s = table.promised_s.get(job.name) if table is not None and not facts["is_over"] else None
    return {
        "kind": facts["slo_kind"],
        "target": job.slo,
        "certified": promised_s / job.solo_s if promised_s is not None else None,
        "observed_mean": mean,
        "observed_worst": worst,
        "num_observed": seen["count"] if seen is not None else 0,
        "is_met": judged <= job.slo if judged is not None else None,
    }
