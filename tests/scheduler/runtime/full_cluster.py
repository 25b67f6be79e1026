"""A cluster whose nodes are all taken by the first jobs, so that later ones wait."""

from typing import Any

from lone_scheduler import Scheduler, only

from rose.scheduler.runtime.channel.messages import (
    Answer,
    Cancel,
    Completed,
    Exited,
    Granted,
    Hello,
    Release,
    SchedulerMessage,
    Start,
    Status,
)


def pool(name: str, num_nodes: int) -> dict[str, Any]:
    return {"name": name, "dollars_per_gpu_hour": 2.0, "num_nodes": num_nodes}


class Full:
    """So many nodes of each kind, and jobs that share none of them."""

    def __init__(self, num_nodes: int = 1, **cluster: Any) -> None:
        pools = {"rollout": pool("h20", num_nodes), "train": pool("h800", num_nodes)}
        self.scheduler = Scheduler(**{"policy": "solo", "groups": {}, "pools": pools, **cluster})
        self.scheduler.call(Hello, client="runner", running={}, log_folder="/logs")

    def submit(self, name: str, num_nodes: int = 1, **fields: Any) -> dict[str, Any]:
        phases = {kind: {"seconds": 1.0, "nodes": num_nodes} for kind in ("rollout", "train")}
        answers = self.scheduler.submit(name, **{"group": None, "phases": phases, **fields})
        [answer] = [each for each in answers if isinstance(each, Answer)]
        assert answer.error is None, answer.error
        return dict(answer.body)

    def end(self, name: str) -> list[str]:
        """Returns the jobs that start."""
        attempt = self.scheduler.job(name)["attempt"]
        self.scheduler.call(Cancel, job=name)
        answers = self.scheduler.call(Exited, job=name, attempt=attempt, exit_status=-15, client="runner")
        return [each.job for each in answers if isinstance(each, Start)]

    def iterate(self, name: str) -> tuple[bool, list[SchedulerMessage]]:
        """One iteration; whether the job's process has to end after it, and all that was said at its end."""
        job = self.scheduler.job(name)
        asked = {"job": name, "attempt": job["attempt"]}
        iteration = job["iterations"][0]
        for phase in ("rollout", "train"):
            permit = only(Granted, self.scheduler.request(name, phase, iteration, job["attempt"]))
            self.scheduler.wait(1.0)
            self.scheduler.call(Release, client=name, **asked, phase=permit.phase, epoch=permit.epoch)
        said = self.scheduler.call(Completed, client=name, **asked, iteration=iteration)
        return only(Answer, said).body["ends"], said

    def exited(self, name: str, attempt: int = 1, status: int = 0) -> list[str]:
        """The job's process has ended. Returns the jobs that start."""
        ended = {"job": name, "attempt": attempt, "exit_status": status}
        answers = self.scheduler.call(Exited, **ended, client="runner")
        return [each.job for each in answers if isinstance(each, Start)]

    def states(self) -> dict[str, str]:
        body = only(Answer, self.scheduler.call(Status)).body
        return {each["name"]: each["state"] for each in body["jobs"]}


NOW: dict[str, Any] = {"preemption": {"by_priority": True, "min_run_s": 0}}
"""A cluster where a job may lose its place after its first iteration."""
ITERATIONS = 100


def submit(full: Full, name: str, priority: int = 0, num_nodes: int = 1, **fields: Any) -> dict[str, Any]:
    """Submits a job that lasts."""
    return full.submit(name, num_nodes, priority=priority, iterations=ITERATIONS, **fields)
