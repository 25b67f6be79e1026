"""How long a job has used serving GPUs.

Owns: GpuMeter. Promises: the time of a GPU counts once, however many of the job's turns run on it. While
turns of several routers run on it, each of these counts an equal part, so that their counts can be added up.
The counts are exact except for the time until each router knows of the others. No two meters have the same
id, at any router, so two meters are never taken for one. Never does: I/O, read a clock.
"""

import uuid
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Use:
    """A worker's GPUs, since when they run the job's turns for this many routers, and this router's turns."""

    gpus: int
    since: float
    num_routers: int
    num_turns: int = 0

    def used_s(self, now: float) -> float:
        return self.gpus * (now - self.since) / self.num_routers


@dataclass(slots=True, eq=False)
class GpuMeter:
    """The use of serving GPUs under one key of a job, at one router since it started."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _used_s: float = 0.0
    _uses: dict[str, _Use] = field(default_factory=dict)
    """What each worker that runs turns of the job has done, by the worker's URL."""

    def begin(self, worker: str, gpus: int, now: float, num_routers: int = 1) -> None:
        """Notes that the job's turn begins on a worker with this many GPUs, which this many routers use."""
        self._uses.setdefault(worker, _Use(gpus, now, num_routers)).num_turns += 1

    def divide(self, worker: str, num_routers: int, now: float) -> None:
        """Notes how many routers use a worker from now on, if turns of the job run there."""
        use = self._uses.get(worker)
        if use is not None and use.num_routers != num_routers:
            self._used_s += use.used_s(now)
            use.since, use.num_routers = now, num_routers

    def end(self, worker: str, now: float) -> bool:
        """Notes that a turn of the job has left a worker. Returns whether it was the last."""
        use = self._uses[worker]
        use.num_turns -= 1
        if use.num_turns:
            return False
        del self._uses[worker]
        self._used_s += use.used_s(now)
        return True

    def used_s(self, now: float) -> float:
        """Returns the GPU-seconds so far, those of turns that run now included."""
        return self._used_s + sum(use.used_s(now) for use in self._uses.values())
