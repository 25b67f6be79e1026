"""The simulator's event loop: one rollout phase under one policy.

Owns: simulated time, what happens when.
Promises: the router's own objects decide everything they decide in the service (Places, Worker, JobAccounts,
SessionTable, the policies); the simulator gives them what the service would see, when it would see it.
Never does: read a clock, measure anything real. Its figures are simulated.
"""

import heapq
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rose.errors import NoWorkerError
from rose.messages import RoutingStatus
from rose.scheduler.rollout.placing.policy import PlacementPolicy
from rose.scheduler.rollout.placing.sessions import Fingerprints, Held, SessionKeys, SessionTable, prefix_of
from rose.scheduler.rollout.placing.views import DEFAULT_JOB, TurnView, WorkerKind
from rose.scheduler.rollout.router_config import RouterConfig, WorkerSpec
from rose.scheduler.rollout.turn.accounts import JobAccounts
from rose.scheduler.rollout.turn.place import Place
from rose.scheduler.rollout.turn.places import Places, Waiter
from rose.scheduler.rollout.turn.trajectories import probably_cached
from rose.scheduler.rollout.workers.members import Members
from rose.scheduler.rollout.workers.worker import Worker
from sim.rollout.engine import RunningTurn, SimulatedEngine
from sim.rollout.prompts import Prompts
from sim.rollout.scenario import Scenario, TrajectoryStep, busy_fractions, trajectories

HEARTBEAT_S = 1.0
_MIN_SHARE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOutcome:
    """What one phase took."""

    makespan_s: float
    mean_trajectory_s: float
    generated_tokens: int
    prefilled_tokens: int
    prompt_tokens: int
    context_tokens: int
    """Prompt tokens that an earlier turn of the same trajectory has read or written."""
    serving_turns: int
    turns: int

    @property
    def hit_share(self) -> float:
        """Prompt tokens that were found cached."""
        return 1.0 - self.prefilled_tokens / self.prompt_tokens

    @property
    def ideal_hit_share(self) -> float:
        """Returns the hit share if every turn ran where its trajectory's KV lies and nothing was dropped."""
        return self.context_tokens / self.prompt_tokens


@dataclass(slots=True)
class _Trajectory:
    steps: list[TrajectoryStep]
    next_step: int = 0
    context_tokens: int = 0
    ended_s: float = 0.0


class RolloutSimulation:
    """One phase. `report_share` is what the workers tell of their share (tests of wrong telemetry change it);
    None: the truth. Without `has_keys` clients send no session key, and the router goes by what they ask."""

    def __init__(
        self,
        scenario: Scenario,
        policy: PlacementPolicy,
        seed: int,
        report_share: Callable[[float], float] | None = None,
        *,
        has_keys: bool = True,
    ) -> None:
        self._scenario = scenario
        self._report_share = report_share
        self._config = RouterConfig(
            turns_per_gpu=scenario.turns_per_gpu,
            lease_s=scenario.lease_s,
            telemetry_max_age_s=2.0 * HEARTBEAT_S,
        )
        self._workers = Members()
        self._engines: dict[str, SimulatedEngine] = {}
        self._traffic: dict[str, Iterator[float]] = {}
        self._busy_s: dict[str, float] = {}
        self._add_engines(seed)
        self._jobs = JobAccounts(self._config)
        self._placement = Places(self._workers, policy, self._jobs)
        self._sessions = SessionTable(self._config.max_sessions)
        drawn = trajectories(scenario, seed)
        self._trajectories = [_Trajectory(steps) for steps in drawn]
        self._prompts = None if has_keys else Prompts(scenario, drawn, seed)
        self._keys = SessionKeys(Fingerprints(self._config.max_fingerprints))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now_s = 0.0
        self._num_open = self._num_at_start = len(self._trajectories)
        self._counts = {"generated": 0, "prefilled": 0, "prompt": 0, "context": 0, "serving": 0, "turns": 0}

    def members(self) -> Mapping[str, Worker]:
        return self._workers

    def _add_engines(self, seed: int) -> None:
        scenario = self._scenario
        kinds = [WorkerKind.DEDICATED] * scenario.num_dedicated + [WorkerKind.SERVING] * scenario.num_serving
        for index, kind in enumerate(kinds):
            spec = WorkerSpec(url=f"http://{kind}:{index + 1}", kind=kind, gpus=scenario.gpus_per_engine)
            self._workers.add(Worker(spec, self._config))
            self._engines[spec.id] = SimulatedEngine(scenario, kind is WorkerKind.SERVING)
            self._busy_s[spec.id] = 0.0
            if kind is WorkerKind.SERVING:
                self._traffic[spec.id] = busy_fractions(scenario.traffic, index, seed)

    def run(self) -> RolloutOutcome:
        """Simulate until the last trajectory ends."""
        self._heartbeat()
        for index in range(self._num_at_start):
            self._at(0.0, lambda index=index: self._begin_turn(index))  # type: ignore[misc]
        while self._num_open:
            self._now_s, _, act = heapq.heappop(self._events)
            act()
        ends = [trajectory.ended_s for trajectory in self._trajectories]
        counts = self._counts
        return RolloutOutcome(
            makespan_s=max(ends),
            mean_trajectory_s=statistics.fmean(ends),
            generated_tokens=counts["generated"],
            prefilled_tokens=counts["prefilled"],
            prompt_tokens=counts["prompt"],
            context_tokens=counts["context"],
            serving_turns=counts["serving"],
            turns=counts["turns"],
        )

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), act))

    # What the router sees -------------------------------------------------------------------------------

    def _heartbeat(self) -> None:
        """The traffic changes, and every worker reports."""
        for worker_id, worker in self._workers.items():
            status = RoutingStatus()
            if (traffic := self._traffic.get(worker_id)) is not None:
                share = max(_MIN_SHARE, 1.0 - next(traffic))
                self._change(worker_id, lambda engine, share=share: engine.set_share(share))  # type: ignore[misc]
                told = self._report_share(share) if self._report_share is not None else share
                self._busy_s[worker_id] += (1.0 - told) * HEARTBEAT_S
                pressure = "pressure" if 1.0 - share > self._scenario.traffic.max_busy else "normal"
                status = RoutingStatus(serving_busy_s=self._busy_s[worker_id], pressure=pressure)
            worker.take_status(status, self._now_s)
            worker.seen(self._now_s)
        self._placement.pump(self._now_s)
        self._at(self._now_s + HEARTBEAT_S, self._heartbeat)

    def _begin_turn(self, index: int) -> None:
        trajectory = self._trajectories[index]
        step = trajectory.steps[trajectory.next_step]
        key = self._key(index, trajectory.context_tokens + step.new_prompt_tokens)
        session = self._sessions.get(key)
        job = self._jobs.get(DEFAULT_JOB, self._now_s)
        turn = TurnView(
            session=key,
            affine=session.worker if session is not None else None,
            prompt_tokens=trajectory.context_tokens + step.new_prompt_tokens,
            expected_tokens=job.expected_tokens(None),
            cached_tokens=probably_cached(session, self._workers, self._now_s),
        )

        def placed(outcome: Place | NoWorkerError) -> None:
            assert isinstance(outcome, Place), outcome
            self._start(index, step, outcome)

        self._placement.enqueue(Waiter(turn, job, turn.expected_tokens, placed))
        self._placement.pump(self._now_s)

    def _key(self, index: int, prompt_tokens: int) -> str:
        """Returns the session as the router finds it: sent by the client, or from how the prompt begins."""
        if self._prompts is None:
            return str(index)
        return self._keys.key(None, self._prompts.begin(index, prompt_tokens), 0, 1)

    # What the engines do ---------------------------------------------------------------------------------

    def _start(self, index: int, step: TrajectoryStep, place: Place) -> None:
        worker_id, prompt_tokens = place.worker.id, place.turn.prompt_tokens
        engine = self._engines[worker_id]
        engine.advance(self._now_s)
        cached = min(prompt_tokens - 1, engine.cached_tokens(index))
        place.worker.found_cached(place.turn.cached_tokens.get(worker_id, 0.0), cached)
        self._counts["prompt"] += prompt_tokens
        self._counts["context"] += prompt_tokens - step.new_prompt_tokens
        self._counts["prefilled"] += prompt_tokens - cached
        self._counts["serving"] += engine.is_serving
        run = RunningTurn(index, step, place, self._now_s, float(prompt_tokens - cached), prompt_tokens)
        self._change(worker_id, lambda engine: engine.start(run))

    def _change(self, worker_id: str, change: Callable[[SimulatedEngine], None]) -> None:
        """Change an engine now and foresee its next end."""
        engine = self._engines[worker_id]
        engine.advance(self._now_s)
        change(engine)
        self._foresee(worker_id)

    def _foresee(self, worker_id: str) -> None:
        engine = self._engines[worker_id]
        end_s, version = engine.next_end_s(), engine.version
        if end_s < float("inf"):
            self._at(end_s, lambda: self._ends(worker_id, version))

    def _ends(self, worker_id: str, version: int) -> None:
        engine = self._engines[worker_id]
        if engine.version != version:
            return
        engine.advance(self._now_s)
        prefilled, ended = engine.take_ended()
        for run in prefilled:
            run.place.first_token(self._now_s - run.started_s)
        for run in ended:
            self._end_turn(engine, run)
        if not (prefilled or ended):
            engine.version += 1  # a rounding error: look again
        self._foresee(worker_id)

    def _end_turn(self, engine: SimulatedEngine, run: RunningTurn) -> None:
        trajectory, worker, generated = self._trajectories[run.trajectory], run.place.worker, run.step
        num_tokens = generated.generated_tokens
        worker.made_tokens(num_tokens, self._now_s, self._now_s - run.first_token_s)
        trajectory.context_tokens = run.prompt_tokens + num_tokens
        engine.keep(run.trajectory, trajectory.context_tokens)
        lease_s = self._scenario.lease_s if engine.is_serving else float("inf")
        held = Held(num_tokens=trajectory.context_tokens, version=None, until=self._now_s + lease_s)
        key = run.place.turn.session
        self._sessions.record(key, worker.id, None, held)
        if self._prompts is not None:
            whole = self._prompts.begin(run.trajectory, trajectory.context_tokens)
            self._keys.fingerprints.record(prefix_of(whole), key)
        run.place.job.turn_ended(num_tokens)
        self._counts["generated"] += num_tokens
        self._counts["turns"] += 1
        trajectory.next_step += 1
        if trajectory.next_step < len(trajectory.steps):
            self._at(self._now_s + generated.env_s, lambda: self._begin_turn(run.trajectory))
        else:
            trajectory.ended_s = self._now_s
            self._num_open -= 1
        self._placement.release(run.place, num_tokens, self._now_s)
        self._placement.pump(self._now_s)


def simulate(scenario: Scenario, policy: PlacementPolicy, seed: int) -> RolloutOutcome:
    """One phase of `scenario` under `policy`."""
    return RolloutSimulation(scenario, policy, seed).run()
