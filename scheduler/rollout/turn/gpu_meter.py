"""How long a job has used serving GPUs.

Owns: GpuMeter. Promises: the time of a GPU counts once, however many of the job's turns run on it. No other
meter has the same id, at any router, so what two meters say is never taken for one count.
Never does: I/O, read a clock.
"""

import uuid
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Use:
    """A worker's GPUs, since when they run turns of the job, and how many."""

    gpus: int
    since: float
    num_turns: int = 0


@dataclass(slots=True)
class GpuMeter:
    """The use of serving GPUs under one key of a job, at one router since it started."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _used_s: float = 0.0
    _uses: dict[str, _Use] = field(default_factory=dict)
    """What each worker that runs turns of the job has done, by the worker's URL."""

    def begin(self, worker: str, gpus: int, now: float) -> None:
        """Notes that a turn of the job begins on a worker with so many GPUs."""
        self._uses.setdefault(worker, _Use(gpus, now)).num_turns += 1

    def end(self, worker: str, now: float) -> None:
        """Notes that a turn of the job has left a worker."""
        use = self._uses[worker]
        use.num_turns -= 1
        if not use.num_turns:
            del self._uses[worker]
            self._used_s += use.gpus * (now - use.since)

    def used_s(self, now: float) -> float:
        """Returns the GPU-seconds so far, those of turns that run now included."""
        return self._used_s + sum(use.gpus * (now - use.since) for use in self._uses.values())
