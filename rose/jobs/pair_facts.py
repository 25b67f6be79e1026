"""What a running pair tells `rose sched status`, `explain` and the dashboard.

Owns the translation into the answers of the cluster's scheduler, so that the same commands can read both. A
pair has no groups and no prices. Pure: takes `now`.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rose.node.processes import ServerProcess
from rose.scheduler.cluster.pools import Pools
from rose.scheduler.gpu.pairing import Decision, Mode, Pairing
from rose.scheduler.group.model import Phase, SloKind
from rose.scheduler.runtime.channel.messages import Answer, Request, Status
from rose.scheduler.runtime.decide.meter import Meter
from rose.scheduler.runtime.job.spec import RunSpec

NUM_SHOWN = 12
NUM_REMEMBERED = 1000
"""More calls than a job has under way at once."""


@dataclass(slots=True)
class Side:
    """One job of the pair. ``caller``: its end of the channel; None before its first call."""

    spec: RunSpec
    process: ServerProcess
    caller: str | None = None
    carried_out: deque[int] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    """The numbers of its latest calls that were carried out, which are only answered when they come again.
    Calls of several threads may come in another order than that of their numbers."""
    waiting: Request | None = None
    holds: Phase | None = None
    num_done: int = 0
    exit_status: int | None = None
    done_s: list[float] = field(default_factory=list)
    """The times at which its iterations were completed."""

    @property
    def has_failed(self) -> bool:
        """Whether its process ended with an error, or before its last iteration."""
        return self.exit_status is not None and (
            self.exit_status != 0 or self.num_done < self.spec.iterations
        )

    @property
    def how_it_ended(self) -> str:
        return (
            f"ended with status {self.exit_status} after {self.num_done} of {self.spec.iterations} iterations"
        )


class PairFacts:
    """Answers questions about one pair."""

    def __init__(self, sides: Sequence[Side], pairing: Pairing, meter: Meter) -> None:
        self._sides = sides
        self._pairing = pairing
        self._meter = meter

    def overview(self, now: float) -> dict[str, Any]:
        """Returns what the dashboard shows. Only a pair's answer has ``devices``."""
        pools = {"rollout": Pools().rollout, "train": Pools().train}
        jobs = [self._job(index, now) for index in range(len(self._sides))]
        return {
            "scheduler_pid": os.getpid(),
            "uptime_s": now - self._meter.started_s,
            "policy": "multiplex",
            "has_runner": True,
            "pools": {
                kind: {"name": pool.name, "dollars_per_node_hour": 0.0, "num_nodes": None}
                for kind, pool in pools.items()
            },
            "groups": {},
            "states": dict(Counter(job["state"] for job in jobs)),
            "jobs": jobs,
            "meter": self._meter.to_json(),
            "devices": [self.device(now)],
        }

    def device(self, now: float) -> dict[str, Any]:
        """Returns how the device is shared and why, and the latest decisions, newest first."""
        pairing = self._pairing
        plan, latest = pairing.plan, list(pairing.decisions)[-NUM_SHOWN:]
        return {
            "hardware": pairing.table.hardware,
            "pipelines": list(pairing.names),
            "mode": pairing.mode.value,
            "why": pairing.why,
            "predicted_gain": plan.gain if plan is not None else None,
            "measured_gain": pairing.gain,
            "now": [_part(latest[-1], index) if latest else "" for index in (0, 1)],
            "decisions": [
                {"ago_s": now - each.time_s, "mode": each.mode.value, "text": decision_text(pairing, each)}
                for each in reversed(latest)
            ],
        }

    def status(self, call: Status, now: float) -> Answer:
        """Returns the answer to `rose sched status` and `rose sched explain --job`."""
        names = [side.spec.name for side in self._sides]
        if call.job is not None and call.job not in names:
            error = f"no job {call.job!r}; the jobs are: {', '.join(names)}"
            return Answer(seq=call.seq, error=error)
        jobs = [self._job(k, now) for k, name in enumerate(names) if call.job in (None, name)]
        return Answer(
            seq=call.seq, body={"jobs": jobs, "scheduler_pid": os.getpid(), "groups": {}, "hosts": {}}
        )

    def events(self, last: int) -> list[dict[str, Any]]:
        """Returns the latest decisions as events, oldest first, with wall-clock times."""
        offset_s = time.time() - time.monotonic()
        names = " and ".join(self._pairing.names)
        return [
            {
                "event": each.mode,
                "job": names,
                "at": each.time_s + offset_s,
                "runs": decision_text(self._pairing, each),
            }
            for each in list(self._pairing.decisions)[-last:]
        ]

    def _job(self, index: int, now: float) -> dict[str, Any]:
        side, pairing = self._sides[index], self._pairing
        name, other = side.spec.name, self._sides[1 - index].spec.name
        past, seen = pairing.pipelines[index].past, self._meter.iterations.get(name)
        is_over = side.exit_status is not None
        state = "failed" if side.has_failed else "done" if is_over else "running"
        how = "at once" if pairing.mode in (Mode.TRIAL, Mode.SHARED) else "one iteration after the other"
        return {
            **_constant(side.spec.num_ranks),
            "num_rollout_nodes": len(rollout_nodes(side.spec)),
            "name": name,
            "state": state,
            "is_over": is_over,
            "log": str(side.process.log_path),
            "group": None,
            "rollout_nodes": rollout_nodes(side.spec),
            "why": f"shares this machine with {other}, {how}: {pairing.why}",
            "iterations": [side.num_done, side.spec.iterations],
            "holds": side.holds,
            "waits_for": side.waiting.phase if side.waiting is not None else None,
            "behind": [other]
            if side.waiting is not None and self._sides[1 - index].holds is not None
            else [],
            "note": side.how_it_ended if side.has_failed else "",
            "waited_s": self._meter.waited_s(name, now),
            "held_s": self._meter.held_s(name, now),
            "rollout_s": past.phases[0].seconds if past is not None else 0.0,
            "train_s": past.phases[1].seconds if past is not None else 0.0,
            "slo": side.spec.slo,
            "slo_kind": SloKind.ITERATION.value,
            "observed": asdict(seen) if seen is not None and past is not None else None,
        }


def rollout_nodes(spec: RunSpec) -> list[int]:
    """Returns the numbers of a job's rollout nodes, each of which is a worker of the device."""
    return list(range(spec.phases["rollout"].nodes))


def decision_text(pairing: Pairing, decision: Decision) -> str:
    """Says what each pipeline runs after a decision."""
    parts = [f"{name} {_part(decision, index)}" for index, name in enumerate(pairing.names)]
    return "; ".join([decision.note, *parts] if decision.note else parts)


def _part(decision: Decision, index: int) -> str:
    kind, share = decision.kinds[index], decision.shares[index]
    what = f"{kind} " if kind is not None else ""
    if share is None:
        return f"{what}waits" if kind is not None else "waits or is between two phases"
    if decision.shares[1 - index] is None:
        return f"{what}alone"
    return f"{what}{share.compute:.0%} of compute, {share.memory:.0%} of memory"


def _constant(num_ranks: int) -> dict[str, Any]:
    """Returns fields that only jobs of the cluster's scheduler use, with values for a job of a pair."""
    return {
        "ahead": None,
        "progress": None,
        "moving_to": None,
        "host": "local",
        "places": [],
        "serving_gpus": None,
        "serving_gpu_s": 0.0,
        "serving_dollars": 0.0,
        "attempt": 1,
        "restarts": 0,
        "num_ranks": num_ranks,
        "ranks_holding": [],
        "ranks_waiting": [],
        "ranks_unheard": [],
        "priority": 0,
        "num_overtaken": 0,
        "moves": [],
        "takes_place_of": [],
        "gives_way": None,
        "preemptions": [],
        "after_rollout_s": 0.0,
        "after_train_s": 0.0,
        "num_train_nodes": 1,
    }
