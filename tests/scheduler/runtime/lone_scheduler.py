"""The scheduler's decisions, with a clock of the test's own, and rows kept as a channel would."""

from typing import Any

from rose.scheduler.runtime.channel.messages import (
    Answer,
    AnyCall,
    Hello,
    Request,
    SchedulerMessage,
    Status,
    Submit,
    decode_call,
    decode_scheduler_message,
    encode,
)
from rose.scheduler.runtime.channel.protocol import Outgoing
from rose.scheduler.runtime.decide.cluster_scheduler import ClusterScheduler
from rose.scheduler.runtime.job.spec import ServeSpec

LEASE_S = 10.0
HOUR_S = 3600.0


def spec_of(name: str, rollout_s: float = 1.0) -> dict[str, Any]:
    return {
        "name": name,
        "command": ["x"],
        "group": "main",
        "phases": {"rollout": {"seconds": rollout_s}, "train": {"seconds": 1.0, "memory_gb": 600}},
        "slo": 100.0,
        "max_tokens": 1024,
        "iterations": 3,
    }


def long_job(name: str, slo: float = 1.2, **fields: Any) -> dict[str, Any]:
    """Two of these fill a group's nodes."""
    phases = {"rollout": {"seconds": HOUR_S}, "train": {"seconds": HOUR_S, "memory_gb": 100}}
    return {**spec_of(name), "phases": phases, "group": None, "slo": slo, "iterations": 100, **fields}


class Scheduler:
    """A control whose batches become rows at once, as a channel's would."""

    def __init__(self, **cluster: Any) -> None:
        self.cluster = ServeSpec.model_validate({"lease_s": LEASE_S, "groups": {"main": {}}, **cluster})
        self.rows: dict[str, bytes] = {}
        self.now = 1000.0
        self.seq = 0
        self.control = ClusterScheduler(self.cluster, {}, self.now, 1, "clock 1")

    def restart(self, now: float, clock: str | None = None) -> None:
        """A new scheduler, whose clock may be far from the old one's."""
        self.now = now
        self.control = ClusterScheduler(
            self.cluster, self.rows, now, 2, clock if clock is not None else f"clock of {now}"
        )

    def call(self, kind: type[AnyCall], client: str = "job", **fields: Any) -> list[SchedulerMessage]:
        """What all clients are told."""
        self.seq += 1
        return self.deliver(kind(seq=self.seq, **fields), client)

    def deliver(self, call: AnyCall, client: str = "job") -> list[SchedulerMessage]:
        self.control.handle(client, decode_call(encode(call)), self.now)
        return self._commit()

    def wait(self, seconds: float) -> list[SchedulerMessage]:
        """Time passes, with ticks as often as the service makes them."""
        answers: list[SchedulerMessage] = []
        for _ in range(int(seconds / 0.25)):
            self.now += 0.25
            self.control.tick(self.now)
            answers += self._commit()
        return answers

    def _commit(self) -> list[SchedulerMessage]:
        batch = self.control.take_batch()
        for key, row in batch.rows.items():
            if row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = row
        return [decode_scheduler_message(_body(each)) for each in batch.outgoing]

    def submit(self, name: str, /, **fields: Any) -> list[SchedulerMessage]:
        return self.call(Submit, spec={**spec_of(name), **fields}, client="cli")

    def request(
        self, job: str, phase: str = "rollout", iteration: int = 0, attempt: int = 1, rank: int = 0
    ) -> list[SchedulerMessage]:
        asked = {"job": job, "attempt": attempt, "phase": phase, "iteration": iteration}
        return self.call(Request, **asked, rank=rank, client=f"{job}:{rank}" if rank else job)

    def job(self, name: str) -> dict[str, Any]:
        [reply] = self.call(Status, job=name)
        assert isinstance(reply, Answer)
        found: dict[str, Any] = reply.body["jobs"][0]
        return found


def _body(outgoing: Outgoing) -> bytes:
    return outgoing.body


def hello(scheduler: Scheduler, num_nodes: int, **running: int) -> list[SchedulerMessage]:
    """The runner of a Ray cluster with so many nodes of each pool connects."""
    nodes = {"rollout": num_nodes, "train": num_nodes}
    told = {"host": "ray", "num_nodes": nodes, "running": running, "log_folder": "/logs"}
    return scheduler.call(Hello, client="ray", **told)


def only(kind: type[SchedulerMessage], answers: list[SchedulerMessage]) -> Any:
    [found] = [each for each in answers if isinstance(each, kind)]
    return found


def error_of(answers: list[SchedulerMessage]) -> str:
    error = only(Answer, answers).error
    assert isinstance(error, str)
    return error
