"""A whole trace played through the scheduler itself: its queue, certificates, permits, pace and moves.

Owns simulated time, the jobs' side of the channel, the bill, and how long each iteration took. The scheduler
that decides is the one that `rose sched serve` runs, call by call: submit, request, release, completed,
exited. Phases take their worst-case times, so no phase is faster than certified. Heartbeats are left out (the
lease never ends), and all nodes are on one host. The same input gives the same result.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rose.config import parse_config
from rose.errors import JobRefused
from rose.scheduler.cluster.candidates import CandidateKind
from rose.scheduler.cluster.groups import PAUSE_S, compact
from rose.scheduler.cluster.pools import Pools
from rose.scheduler.group.model import Job, Phase, SloKind
from rose.scheduler.runtime.channel.messages import (
    Answer,
    AnyCall,
    Cancel,
    Completed,
    Exited,
    Granted,
    Hello,
    Release,
    Request,
    Start,
    Stop,
    Submit,
    decode_scheduler_message,
)
from rose.scheduler.runtime.decide.cluster_scheduler import ClusterScheduler
from rose.scheduler.runtime.job.spec import ServeSpec
from rose.scheduler.sim.loop import SimulationResult, mean_waits_s
from rose.scheduler.sim.progress import OnEnd
from rose.scheduler.sim.workloads import Submission

NO_LEASE_S = 1e12
"""The lease of a replay, in which nobody dies."""
TOLERANCE_S = 1e-3
"""The rounding of certificates to whole microseconds, over an iteration."""
_RUNNER = "runner"
_OTHER, _COMPLETED = 0, 1
"""Numbers of calls, so that the answer to a completed iteration is known."""


@dataclass(slots=True, kw_only=True)
class _Run:
    """A job's process, and what it has received."""

    job: Job
    num_iterations: int
    iteration: int = 0
    attempt: int = 0
    group: str = ""
    start_s: float = 0.0
    """The first request."""
    rollout_s: float | None = None
    """When the present iteration's rollout began; None before it."""
    lengths_s: list[float] = field(default_factory=list)
    """The iterations, from one rollout's begin to the next, without those in which the job moved."""
    has_ended: bool = False
    queued_s: float | None = None
    """Since when the job has waited in the queue; None while it runs."""
    waited_s: float = 0.0

    def is_attained(self, end_s: float) -> bool:
        """Returns whether each iteration kept the SLO, or their mean with all pauses; False if none began."""
        job, limit_s = self.job, self.job.slo * self.job.solo_s
        if self.attempt == 0:
            return False
        if job.slo_kind is SloKind.ITERATION:
            return all(each <= limit_s * (1 + 1e-6) + TOLERANCE_S for each in self.lengths_s)
        return end_s - self.start_s <= limit_s * (self.iteration + 1)


class SchedulerReplay:
    """One run of the scheduler over submissions."""

    def __init__(
        self,
        submitted: Sequence[Submission],
        policy: str,
        *,
        max_residents: int = 5,
        keeps_ends: bool = False,
        pause_s: float = PAUSE_S,
        progress: OnEnd | None = None,
        cluster: ServeSpec | None = None,
    ) -> None:
        """keeps_ends: jobs leave after the trace's time, however many iterations they have done by then.

        cluster: that of a file, with this policy; its pools and pause count. Raises: ConfigError for a policy
        that no running cluster has.
        """
        spec: dict[str, object] = {"pools": {"max_residents": max_residents}, "move_pause_s": pause_s}
        if cluster is not None:
            spec = cluster.model_dump()
        spec |= {"policy": policy, "lease_s": NO_LEASE_S}
        cluster = parse_config(spec, ServeSpec, "a scheduler for the trace")
        self._pools: Pools = cluster.to_pools()
        self._pause_s = cluster.move_pause_s
        self._keeps_ends = keeps_ends
        self._progress = progress
        self.scheduler = ClusterScheduler(cluster, {}, 0.0, 1, "replay")
        self._submitted = submitted
        self._runs: dict[str, _Run] = {}
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._now_s = 0.0
        self._dollars = self._dollars_per_hour = self._peak = 0.0
        self._num_moves = self._num_preemptions = 0
        self._violated: list[str] = []
        self._num_ended = 0

    def run(self) -> SimulationResult:
        """Plays the trace until the last job has ended. Raises: JobRefused for a job that could never run."""
        self._call(_RUNNER, Hello(seq=0, running={}, log_folder="/"))
        for one in self._submitted:
            self._at(one.arrival_s, functools.partial(self._submit, one))
        first_s = self._events[0][0]
        while self._num_ended < len(self._submitted):
            wake_s = self.scheduler.next_wake_s(self._now_s)
            if wake_s is None and not self._events:
                waiting = ", ".join(name for name, run in self._runs.items() if not run.has_ended)
                raise JobRefused(f"{waiting}: nothing can happen any more that would let these jobs go on")
            if wake_s is not None and (not self._events or wake_s <= self._events[0][0]):
                self._advance(max(wake_s, self._now_s))
                self.scheduler.tick(self._now_s)
                self._deliver()
                continue
            time_s, _, happen = heapq.heappop(self._events)
            self._advance(time_s)
            happen()
        num = len(self._submitted)
        num_attained = num - len(self._violated)
        return SimulationResult(
            dollars=self._dollars,
            duration_s=self._now_s - first_s,
            num_jobs=num,
            num_attained=num_attained,
            num_moves=self._num_moves,
            kinds=dict.fromkeys(CandidateKind, 0),
            violated=tuple(self._violated),
            peak_dollars_per_hour=self._peak,
            num_preemptions=self._num_preemptions,
            waited_s=mean_waits_s((one, self._runs[one.job.name].waited_s) for one in self._submitted),
        )

    # Time -----------------------------------------------------------------------------------------------

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happen))

    def _advance(self, now_s: float) -> None:
        self._dollars += self._dollars_per_hour * (now_s - self._now_s) / 3600
        self._now_s = now_s

    def _price(self) -> None:
        """Nodes that a member is pinned to are paid for, as policies count them."""
        groups = [compact(group) for group in self.scheduler.groups.values() if group.members]
        self._dollars_per_hour = sum(map(self._pools.dollars_per_hour, groups))
        self._peak = max(self._peak, self._dollars_per_hour)

    # The channel ----------------------------------------------------------------------------------------

    def _call(self, client: str, call: AnyCall) -> None:
        self.scheduler.handle(client, call, self._now_s)
        self._deliver()

    def _deliver(self) -> None:
        batch = self.scheduler.take_batch()
        if any(key.startswith("nodes:") for key in batch.rows):
            self._price()
        for outgoing in batch.outgoing:
            message = decode_scheduler_message(outgoing.body)
            match message:
                case Start():
                    self._start(self._runs[message.job], message)
                case Granted():
                    self._granted(self._runs[message.job], message)
                case Stop(forget=False):
                    self._exit(self._runs[message.job])
                case Answer(error=str()):
                    raise JobRefused(f"{outgoing.client}: {message.error}")
                case Answer(seq=seq) if seq == _COMPLETED:
                    self._completed(self._runs[outgoing.client], message)

    # Jobs -----------------------------------------------------------------------------------------------

    def _submit(self, one: Submission) -> None:
        job = one.job
        num_iterations = max(1, round(one.work_s / job.solo_s))
        if self._keeps_ends:
            num_iterations = math.ceil(one.work_s / job.solo_s) + 1
            self._at(one.arrival_s + one.work_s, lambda: self._cancel(self._runs[job.name]))
        run = _Run(job=job, num_iterations=num_iterations, queued_s=self._now_s)
        self._runs[job.name] = run
        phases = {
            "rollout": {"seconds": job.rollout_s, "nodes": job.num_rollout_nodes},
            "train": {"seconds": job.train_s, "nodes": job.num_train_nodes},
        }
        spec = {"name": job.name, "command": ["replay"], "phases": phases, "max_tokens": 1}
        # A file must allow some slowdown; a trace's SLO may be a hair over 1.
        more = {"slo": job.slo, "slo_kind": job.slo_kind.value, "iterations": num_iterations}
        whose = {"priority": one.priority, "team": one.team}
        self._call("user", Submit(seq=_OTHER, spec={**spec, **more, **whose}))

    def _start(self, run: _Run, order: Start) -> None:
        assert run.queued_s is not None, run
        wait_s, run.queued_s = self._now_s - run.queued_s, None
        run.waited_s += wait_s
        # A job that was preempted starts again, which takes as long as a move. Neither that nor its wait is a
        # part of its iterations.
        pause_s = self._pause_s if run.attempt > 0 else 0.0
        run.start_s = self._now_s if run.attempt == 0 else run.start_s + wait_s + pause_s
        run.attempt, run.group = order.attempt, order.group
        self._at(self._now_s + pause_s, lambda: self._request(run, Phase.ROLLOUT))

    def _request(self, run: _Run, phase: Phase) -> None:
        if not run.has_ended:
            name, attempt = run.job.name, run.attempt
            self._call(
                name,
                Request(seq=_OTHER, job=name, attempt=attempt, phase=phase, iteration=run.iteration),
            )

    def _granted(self, run: _Run, permit: Granted) -> None:
        if permit.phase is Phase.ROLLOUT:
            if run.rollout_s is not None:
                run.lengths_s.append(self._now_s - run.rollout_s)
            run.rollout_s = self._now_s
        group = self.scheduler.groups[run.group]
        is_rollout = permit.phase is Phase.ROLLOUT
        length_s = run.job.rollout_s if is_rollout else run.job.train_s_on(group.num_train_nodes)
        self._at(self._now_s + length_s, lambda: self._release(run, permit))

    def _release(self, run: _Run, permit: Granted) -> None:
        if run.has_ended:
            return
        name, phase = run.job.name, permit.phase
        self._call(
            name,
            Release(seq=_OTHER, job=name, attempt=run.attempt, phase=phase, epoch=permit.epoch),
        )
        if phase is Phase.ROLLOUT:
            self._at(self._now_s + run.job.after_rollout_s, lambda: self._request(run, Phase.TRAIN))
        else:
            completed = Completed(seq=_COMPLETED, job=name, attempt=run.attempt, iteration=run.iteration)
            self._call(name, completed)

    def _completed(self, run: _Run, answer: Answer) -> None:
        run.iteration += 1
        if answer.body["ends"]:
            self._preempted(run)
            return
        later_s = run.job.after_train_s
        if answer.body["group"] != run.group:
            run.group = answer.body["group"]
            run.rollout_s = None  # the length of this iteration is the move's
            later_s += self._pause_s
            self._num_moves += 1
            self._price()
        if run.iteration < run.num_iterations:
            self._at(self._now_s + later_s, lambda: self._request(run, Phase.ROLLOUT))
        else:
            self._exit(run)

    def _preempted(self, run: _Run) -> None:
        """The job's process ends, and the job waits. All nodes are on one host: no move ends a process."""
        run.queued_s, run.rollout_s = self._now_s, None
        self._num_preemptions += 1
        self._call(_RUNNER, Exited(seq=_OTHER, job=run.job.name, attempt=run.attempt, exit_status=0))
        self._price()

    def _cancel(self, run: _Run) -> None:
        if run.has_ended:
            return
        self._call("user", Cancel(seq=_OTHER, job=run.job.name))
        if run.queued_s is not None:  # it waits for a place, and has no process that a Stop could end
            self._end(run)

    def _exit(self, run: _Run) -> None:
        if run.has_ended:
            return
        self._end(run)
        self._call(_RUNNER, Exited(seq=_OTHER, job=run.job.name, attempt=run.attempt, exit_status=0))
        self._price()

    def _end(self, run: _Run) -> None:
        run.has_ended = True
        if run.queued_s is not None:
            run.waited_s += self._now_s - run.queued_s
        if not run.is_attained(self._now_s):
            self._violated.append(run.job.name)
        self._num_ended += 1
        if self._progress is not None:
            self._progress(self._num_ended, len(self._submitted))
