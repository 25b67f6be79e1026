"""One rollout phase on engines that come, go and slow down.

Owns what happens when an engine goes: its turns lose their places, and the router places them again.
Promises: as sim/rollout/loop.py, whose router objects decide here too. Every token of a trajectory that ends
is counted once; tokens that are made again are counted as lost.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rose.messages import RoutingGate, RoutingStatus
from rose.scheduler.rollout.placing.policy import PlacementPolicy
from rose.scheduler.rollout.placing.views import WorkerKind
from rose.scheduler.rollout.router_config import WorkerSpec
from rose.scheduler.rollout.turn.place import Place
from rose.scheduler.rollout.workers.worker import Worker
from sim.e2e.supply import Away, Supply
from sim.rollout.engine import RunningTurn, SimulatedEngine
from sim.rollout.loop import HEARTBEAT_S, RolloutSimulation
from sim.rollout.scenario import Scenario, TrajectoryStep

_MIN_SHARE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Which trajectories a phase needs."""

    num_groups: int | None = None
    """Groups that count; the phase ends when all their trajectories have, and the others' are aborted. None:
    every group (GRPO); fewer: redundant sampling (DAPO)."""
    num_live: int | None = None
    """Trajectories at a time; the next begins when one ends. None: all at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPhase:
    """How one phase went. Times count from its start."""

    seconds: float
    ended_s: tuple[float, ...]
    """When each trajectory ended, in that order."""
    lasted_s: tuple[float, ...]
    """How long each of these took from its first turn's start."""
    needed_tokens: tuple[int, ...]
    """Prompt and answers of each trajectory that counts: what is trained on."""
    generated_tokens: int
    lost_tokens: int
    hit_share: float
    prompt_share: float
    """Prompt tokens, histories included, over these and all generated ones."""
    starting_share: float
    """GPU time in which an engine was held and did not answer, over all GPU time that was held."""
    present_share: float
    """GPU time that rollouts could use, over what all engines have."""


class RolloutPhase(RolloutSimulation):
    """Runs once. `start_s`: the time at which the phase begins, for the supplies."""

    def __init__(
        self,
        scenario: Scenario,
        policy: PlacementPolicy,
        seed: int,
        supplies: Sequence[Supply],
        *,
        start_s: float = 0.0,
        demand: Demand | None = None,
    ) -> None:
        self._start_s = start_s
        self._demand = demand if demand is not None else Demand()
        self._in_order = supplies
        self._supplies: dict[str, Supply] = {}
        self._gates: dict[str, RoutingGate] = {}
        super().__init__(scenario, policy, seed)
        num_groups = len(self._trajectories) // scenario.group_size
        needed = self._demand.num_groups if self._demand.num_groups is not None else num_groups
        groups = set(random.Random(f"valid-{seed}").sample(range(num_groups), min(needed, num_groups)))
        self._needed = {i for i in range(len(self._trajectories)) if i // scenario.group_size in groups}
        self._num_needed_open = len(self._needed)
        if self._demand.num_live is not None:
            self._num_at_start = min(self._demand.num_live, self._num_at_start)
        self._next = self._num_at_start
        self._began_s: dict[int, float] = {}
        self._ended: list[int] = []
        self._lost = 0
        self._held_s = self._starting_s = self._present_s = 0.0

    def play(self) -> SimulatedPhase:
        """Runs to the end of the last trajectory that counts."""
        outcome = self.run()
        ends = [self._trajectories[index].ended_s for index in self._ended]
        return SimulatedPhase(
            seconds=outcome.makespan_s,
            ended_s=tuple(ends),
            lasted_s=tuple(end - self._began_s[i] for end, i in zip(ends, self._ended, strict=True)),
            needed_tokens=tuple(self._trajectories[index].context_tokens for index in sorted(self._needed)),
            generated_tokens=outcome.generated_tokens,
            lost_tokens=self._lost,
            hit_share=outcome.hit_share,
            prompt_share=outcome.prompt_tokens / (outcome.prompt_tokens + outcome.generated_tokens),
            starting_share=self._starting_s / self._held_s if self._held_s else 0.0,
            present_share=self._present_s / max(1e-9, self._beats() * len(self._in_order)),
        )

    def _beats(self) -> float:
        return int(self._now_s / HEARTBEAT_S) + 1.0

    def _add_engines(self, seed: int) -> None:
        for index, supply in enumerate(self._in_order):
            spec = WorkerSpec(
                url=f"http://{supply.kind}:{index + 1}", kind=supply.kind, gpus=self._scenario.gpus_per_engine
            )
            self._workers.add(Worker(spec, self._config))
            self._engines[spec.id] = SimulatedEngine(self._scenario, supply.kind is WorkerKind.SERVING)
            self._busy_s[spec.id] = 0.0
            self._supplies[spec.id] = supply
            self._gates[spec.id] = RoutingGate()

    # Engines come and go --------------------------------------------------------------------------------

    def _heartbeat(self) -> None:
        """Every second each engine reports, or is away."""
        for worker_id, worker in self._workers.items():
            share = self._supplies[worker_id].at(self._start_s + self._now_s)
            self._count(share)
            if isinstance(share, Away):
                if worker.is_active:
                    self._leave(worker_id)
                status = RoutingStatus(is_active=False)
            else:
                status = self._report(worker_id, share)
            worker.take_status(status, self._now_s)
            worker.seen(self._now_s)
        self._placement.pump(self._now_s)
        self._at(self._now_s + HEARTBEAT_S, self._heartbeat)

    def _count(self, share: float | Away) -> None:
        self._held_s += share is not Away.GONE
        self._starting_s += share is Away.STARTING
        self._present_s += 0.0 if isinstance(share, Away) else share

    def _report(self, worker_id: str, share: float) -> RoutingStatus:
        if self._supplies[worker_id].kind is WorkerKind.DEDICATED:
            return RoutingStatus()
        usable = max(_MIN_SHARE, share)
        if usable != self._engines[worker_id].share:
            self._change(worker_id, lambda engine: engine.set_share(usable))
        self._busy_s[worker_id] += (1.0 - usable) * HEARTBEAT_S
        steps = self._supplies[worker_id].steps_at(self._start_s + self._now_s)
        if steps is not None:
            gate = self._gates[worker_id]
            self._gates[worker_id] = RoutingGate(
                admitted_steps=gate.admitted_steps + steps, declined_steps=gate.declined_steps + (steps == 0)
            )
        return RoutingStatus(serving_busy_s=self._busy_s[worker_id], gate=self._gates[worker_id])

    def _leave(self, worker_id: str) -> None:
        """The engine is gone: its turns go on elsewhere, or begin anew."""
        engine, keeps_tokens = self._engines[worker_id], self._supplies[worker_id].keeps_tokens
        self._workers[worker_id].deactivated()
        engine.advance(self._now_s)
        for run, made in engine.stop():
            self._placement.release(run.place, made, self._now_s)
            trajectory = self._trajectories[run.trajectory]
            if keeps_tokens:
                trajectory.steps[trajectory.next_step] = TrajectoryStep(
                    run.step.new_prompt_tokens + made, run.step.generated_tokens - made, run.step.env_s
                )
                self._counts["generated"] += made
            else:
                self._lost += made
            self._at(self._now_s, lambda index=run.trajectory: self._begin_turn(index))  # type: ignore[misc]

    # Trajectories ---------------------------------------------------------------------------------------

    def _start(self, index: int, step: TrajectoryStep, place: Place) -> None:
        self._began_s.setdefault(index, self._now_s)
        super()._start(index, step, place)

    def _end_turn(self, engine: SimulatedEngine, run: RunningTurn) -> None:
        super()._end_turn(engine, run)
        trajectory = self._trajectories[run.trajectory]
        if trajectory.next_step < len(trajectory.steps):
            return
        self._ended.append(run.trajectory)
        if self._next < len(self._trajectories):
            index, self._next = self._next, self._next + 1
            self._at(self._now_s, lambda: self._begin_turn(index))
        self._num_needed_open -= run.trajectory in self._needed
        if not self._num_needed_open:
            self._num_open = 0
