"""Jobs of several ranks under the cluster scheduler itself, with random kills, on a simulated clock.

Owns: the processes (ranks, one launcher for each attempt, the runner) and what they see. Promises: the same
seed gives the same run. A killed rank is either noticed by its launcher, which ends the attempt, or by nobody
but the scheduler. Never: decides who may run.
"""

import heapq
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rose.errors import ConfigError
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.messages import (
    Answer,
    Completed,
    Exited,
    Granted,
    Heartbeat,
    Hello,
    Release,
    Request,
    Start,
    Stop,
    Submit,
)
from sim.ranks.rows import Delivered, RowScheduler

LEASE_S = 4.0
BEAT_S = LEASE_S / 5
TICK_S = 1.0
PATIENCE_S = 5 * LEASE_S
"""After so long a launcher notices that one of its ranks is dead, if nobody has ended the attempt before."""


class Copies(Protocol):
    """What the ranks do with their working sets."""

    def load(self, job: str, rank: int) -> None: ...

    def offload(self, job: str, rank: int) -> None: ...

    def forget(self, job: str) -> None: ...


@dataclass(slots=True)
class _Rank:
    """One process."""

    job: str
    attempt: int
    number: int
    iteration: int
    phase: Phase | None = Phase.ROLLOUT
    """What it asks for or runs; None: it says that the iteration is complete."""
    permit: Granted | None = None
    is_asking: bool = False
    is_alive: bool = True

    @property
    def client(self) -> str:
        return f"{self.job}:{self.attempt}:{self.number}"


@dataclass(slots=True)
class Seen:
    """What happened."""

    num_phases: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    overlaps: list[str] = field(default_factory=list)
    """Ranks that ran on nodes on which another job ran, or without their job's permit."""
    starts_s: dict[str, list[float]] = field(default_factory=dict)
    """When each job's rollouts began."""


class RankedJobs:
    """All jobs of one group of one rollout and one training node, unless their files name no group."""

    def __init__(
        self,
        specs: Sequence[Mapping[str, Any]],
        seed: int,
        *,
        shortest: float = 1.0,
        copies: Copies | None = None,
        gaps_s: Mapping[str, float] | None = None,
    ) -> None:
        """shortest: a phase takes from this share of its file's time up to all of it.

        gaps_s: how long each job is outside of phases after each training.
        """
        self._rng = random.Random(seed)
        self._specs = {spec["name"]: spec for spec in specs}
        self._shortest = shortest
        self._copies = copies
        self._gaps_s = gaps_s if gaps_s is not None else {}
        self._scheduler = RowScheduler({"lease_s": LEASE_S, "groups": {"main": {}}})
        self._ranks: dict[str, list[_Rank]] = {}
        self._running: dict[str, int] = {}
        """The attempt of each job that its runner has and whose end it has not reported."""
        self._events: list[tuple[float, int, str, Any]] = []
        self._num_events = 0
        self.now = 0.0
        self.seen = Seen()
        self._deliver(self._scheduler.call("runner", Hello, 0.0, running={}, log_folder="/l"))
        for spec in specs:
            delivered = self._scheduler.call("cli", Submit, 0.0, spec=dict(spec))
            refused = [each.error for _, each in delivered if isinstance(each, Answer) and each.error]
            if refused:
                raise ConfigError(refused[0])
            self._deliver(delivered)
        self._add(TICK_S, "tick", None)
        self._add(BEAT_S, "beat", None)

    def run(self, *, num_phases: int, kill_every_s: float | None = None) -> Seen:
        """Goes on until this many phases have ended."""
        if kill_every_s is not None:
            self._add(self._rng.expovariate(1 / kill_every_s), "kill", kill_every_s)
        while self.seen.num_phases < num_phases:
            self.now, _, what, subject = heapq.heappop(self._events)
            if not isinstance(subject, _Rank) or subject.is_alive:
                getattr(self, f"_on_{what}")(subject)
        return self.seen

    def note(self, job: str) -> str:
        """Returns what `rose sched status` says of a job."""
        return self._scheduler.control._state.jobs[job].note

    # A rank's life ------------------------------------------------------------------------------------------

    def _on_ask(self, rank: _Rank) -> None:
        rank.is_asking = True
        kind: type[Request | Completed] = Request if rank.phase is not None else Completed
        self._call(rank, kind, iteration=rank.iteration, **({"phase": rank.phase} if rank.phase else {}))

    def _on_granted(self, rank: _Rank, permit: Granted) -> None:
        rank.is_asking, rank.permit = False, permit
        if rank.phase is Phase.ROLLOUT and rank.number == 0:
            self.seen.starts_s.setdefault(rank.job, []).append(self.now)
        others = [
            each
            for name, ranks in self._ranks.items()
            for each in ranks
            if name != rank.job and each.is_alive and each.permit is not None and each.phase is rank.phase
        ]
        if others and self._shares_nodes(rank.job, others[0].job):
            self.seen.overlaps.append(f"{self.now:.3f} s: {rank.client} beside {others[0].client}")
        if self._copies is not None and rank.phase is Phase.TRAIN:
            self._copies.load(rank.job, rank.number)
        seconds = self._specs[rank.job]["phases"][permit.phase]["seconds"]
        self._add(seconds * self._rng.uniform(self._shortest, 1.0), "done", rank)

    def _on_done(self, rank: _Rank) -> None:
        assert rank.permit is not None and rank.phase is not None
        if self._copies is not None and rank.phase is Phase.TRAIN:
            self._copies.offload(rank.job, rank.number)
        permit, rank.permit = rank.permit, None
        hold = self._scheduler.control._state.permits_of(rank.job).holds.get(rank.job)
        if hold is None or hold.epoch != permit.epoch:
            self.seen.overlaps.append(f"{self.now:.3f} s: {rank.client} ran without its permit")
        self._call(rank, Release, phase=permit.phase, epoch=permit.epoch)
        self.seen.num_phases += rank.number == 0
        gap_s = self._gaps_s.get(rank.job, 0.0) if rank.phase is Phase.TRAIN else 0.0
        rank.phase = Phase.TRAIN if rank.phase is Phase.ROLLOUT else None
        self._add(gap_s * self._rng.uniform(self._shortest, 1.0), "ask", rank)

    def _on_completed(self, rank: _Rank) -> None:
        rank.is_asking, rank.phase, rank.iteration = False, Phase.ROLLOUT, rank.iteration + 1
        self._add(0.0, "ask", rank)

    def _shares_nodes(self, one: str, other: str) -> bool:
        jobs = self._scheduler.control._state.jobs
        return jobs[one].group == jobs[other].group

    # Kills --------------------------------------------------------------------------------------------------

    def _on_kill(self, kill_every_s: float) -> None:
        self._add(self._rng.expovariate(1 / kill_every_s), "kill", kill_every_s)
        ranks = [each for ranks in self._ranks.values() for each in ranks if each.is_alive]
        how = self._rng.choice(("silent rank", "rank", "scheduler"))
        self.seen.kills[how] += 1
        if how == "scheduler":
            self._scheduler.restart(self.now)
            hello = {"running": self._running, "log_folder": "/l"}
            self._deliver(self._scheduler.call("runner", Hello, self.now, **hello))
            for each in ranks:
                if each.is_asking:
                    self._on_ask(each)
        elif ranks:
            killed = self._rng.choice(ranks)
            killed.is_alive = False
            later_s = self._rng.random() if how == "rank" else PATIENCE_S
            self._add(later_s, "launcher", (killed.job, killed.attempt))

    def _on_launcher(self, which: tuple[str, int]) -> None:
        """The launcher of an attempt has noticed, or the runner ends it: none of its processes is left."""
        job, attempt = which
        ranks = self._ranks[job]
        if ranks[0].attempt == attempt and any(
            each.permit or each.is_alive or each.is_asking for each in ranks
        ):
            self._end(job, attempt)

    def _end(self, job: str, attempt: int) -> None:
        for each in self._ranks[job]:
            each.is_alive, each.is_asking, each.permit = False, False, None
        self._add(self._rng.uniform(0.05, 0.3), "exited", (job, attempt))

    def _on_exited(self, which: tuple[str, int]) -> None:
        job, attempt = which
        if self._running.get(job) == attempt:
            del self._running[job]
        self._deliver(
            self._scheduler.call("runner", Exited, self.now, job=job, attempt=attempt, exit_status=-9)
        )

    # The scheduler ------------------------------------------------------------------------------------------

    def _on_tick(self, _: None) -> None:
        self._add(TICK_S, "tick", None)
        self._deliver(self._scheduler.tick(self.now))
        wake_s = self._scheduler.control.next_wake_s(self.now)
        if wake_s is not None and self.now < wake_s < self.now + TICK_S:
            self._add(wake_s - self.now, "wake", None)

    def _on_wake(self, _: None) -> None:
        self._deliver(self._scheduler.tick(self.now))

    def _on_beat(self, _: None) -> None:
        self._add(BEAT_S, "beat", None)
        for ranks in list(self._ranks.values()):
            for each in ranks:
                if each.is_alive and each.permit is not None:
                    self._call(each, Heartbeat, phase=each.permit.phase, epoch=each.permit.epoch)

    def _call(
        self, rank: _Rank, kind: type[Request | Completed | Release | Heartbeat], **fields: Any
    ) -> None:
        mine = {"job": rank.job, "attempt": rank.attempt, "rank": rank.number}
        self._deliver(self._scheduler.call(rank.client, kind, self.now, **mine, **fields))

    def _deliver(self, messages: Delivered) -> None:
        for client, message in messages:
            if isinstance(message, Start):
                self._start(message)
            elif isinstance(message, Stop):
                if self._ranks[message.job][0].attempt == message.attempt:
                    self._end(message.job, message.attempt)
            elif client.count(":") == 2 and isinstance(message, Granted | Answer):
                self._answered(client, message)

    def _answered(self, client: str, message: Granted | Answer) -> None:
        job, attempt, number = client.split(":")
        rank = self._ranks[job][int(number)]
        if not rank.is_alive or rank.attempt != int(attempt) or not rank.is_asking:
            return
        if isinstance(message, Granted):
            self._on_granted(rank, message)
        elif rank.phase is None and message.error is None and "group" in message.body:
            self._on_completed(rank)
        elif message.error is not None:
            raise RuntimeError(f"{client}: {message.error}")

    def _start(self, order: Start) -> None:
        if self._copies is not None:
            self._copies.forget(order.job)
        for each in self._ranks.get(order.job, []):  # a runner ends what it has of the job first
            each.is_alive, each.is_asking, each.permit = False, False, None
        self._running[order.job] = order.attempt
        num_ranks = self._specs[order.job].get("num_ranks", 1)
        self._ranks[order.job] = [
            _Rank(order.job, order.attempt, number, order.first_iteration) for number in range(num_ranks)
        ]
        for each in self._ranks[order.job]:
            self._add(self._rng.random(), "ask", each)

    def _add(self, later_s: float, what: str, subject: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now + later_s, self._num_events, what, subject))
