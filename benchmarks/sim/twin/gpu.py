"""One modelled GPU on which both engines run, and its clock.

Owns time, whose turn it is, and the noise of step times. Under a gate one step runs at a time, in the order
of the board's protocol: serving publishes and offers turns, rollout decides and takes one or declines.
Without a gate (naive co-location) both run at once and share the GPU's speed. Never decides about a step:
the policy does.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rose.admission.gate import GateDecision, GatePolicy, GateReason, GateSettings, ServingView
from rose.admission.online import OnlineStepTime
from rose.admission.rollout_side import MAX_LAYERS_AHEAD
from rose.admission.slack import NEVER
from rose.admission.step_time import StepObservation, StepShape, StepTimeModel, attended_pairs, fit
from rose.types import GateMode
from sim.twin.pairs import EngineModel, Pair
from sim.twin.rollout import TwinRollout
from sim.twin.serving import ServedRequest, ServingArrival, TwinServing

# Steps of one shape vary by a few per cent, and now and then the host is late.
STEP_NOISE = 0.03
HICCUP_SHARE = 0.002
HICCUP_S = 0.003
PROFILE_ROUNDS = 8
# From one side's release to the other's first kernel: futex wake-up (80 us at the 99th percentile, measured
# on a host) and launching; an assumption on a GPU.
SWITCH_S = 0.0003
# How long after the traffic's end answers count: 500 tokens at the slowest TPOT that an SLO here allows.
MAX_DRAIN_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinOutcome:
    """What one simulated run came to."""

    horizon_s: float
    requests: list[ServedRequest]
    generated_tokens: int
    """The tokens that rollouts generated up to the horizon."""
    serving_busy_s: float
    rollout_busy_s: float
    num_serving_steps: int
    num_rollout_steps: int
    refusals: dict[GateReason, int]
    num_late_starts: int
    """Serving steps that began after the latest start published before the rollout steps ahead of them."""
    peak_batch: int

    @property
    def serving_share(self) -> float:
        """Serving's share of the time up to the horizon."""
        return self.serving_busy_s / self.horizon_s


class TwinGpu:
    """Runs once: make one per run."""

    def __init__(
        self,
        pair: Pair,
        settings: GateSettings,
        arrivals: Sequence[ServingArrival],
        *,
        horizon_s: float,
        seed: int,
        has_rollouts: bool = True,
        max_drain_s: float = MAX_DRAIN_S,
    ) -> None:
        """`arrivals` in order of time; `horizon_s`: the end of the traffic and of the count of rollouts.

        `max_drain_s`: how long serving may go on answering after that."""
        self._policy = GatePolicy(settings)
        self._arrivals = deque(arrivals)
        self._horizon_s = horizon_s
        self._max_drain_s = max_drain_s
        # Noise of its own per engine: another policy meets the same serving noise.
        self._noise = {name: random.Random(f"{seed}-{name}") for name in ("serving", "rollout")}
        self._serving = TwinServing(pair.serving, settings, OnlineStepTime(*profile_of(pair.serving)))
        self._rollout: TwinRollout | None = None
        if has_rollouts:
            online = OnlineStepTime(*profile_of(pair.rollout))
            self._rollout = TwinRollout(pair.rollout, online, random.Random(f"{seed}-trajectories"))
        self._now = 0.0
        self._was_rollout = False
        self._paused: _Running | None = None
        """The rollout step that gave the GPU back between two layers."""
        self._paused_at_s = 0.0
        self._busy_s = {"serving": 0.0, "rollout": 0.0}
        self._steps = {"serving": 0, "rollout": 0}
        self._generated = 0
        self._refusals: dict[GateReason, int] = {}
        self._num_late = 0
        self._peak_batch = 0
        self.log: list[tuple[str, float, float]] = []
        """(engine, start, end) of every step, or of its part up to a pause. Without a gate: of rollout steps
        alone, the GPU time that each part of one gets."""

    def run(self) -> TwinOutcome:
        """Runs to the horizon, and on until serving has answered everybody."""
        if self._rollout is not None and self._policy.settings.mode is GateMode.OFF:
            self._run_ungated(self._rollout)
        else:
            self._run_gated()
        self._serving.check_integrity()
        if self._rollout is not None:
            self._rollout.check_integrity()
        return TwinOutcome(
            horizon_s=self._horizon_s,
            requests=self._serving.served(),
            generated_tokens=self._generated,
            serving_busy_s=self._busy_s["serving"],
            rollout_busy_s=self._busy_s["rollout"],
            num_serving_steps=self._steps["serving"],
            num_rollout_steps=self._steps["rollout"],
            refusals=self._refusals,
            num_late_starts=self._num_late,
            peak_batch=self._peak_batch,
        )

    # One workload at a time ---------------------------------------------------------------------------

    def _run_gated(self) -> None:
        while not self._is_over():
            self._absorb()
            if self._serving.has_work:
                latest_s = self._offer_grants()
                if self._serving.may_join(self._now):
                    self._absorb()  # what came meanwhile joins the step
                self._num_late += self._now > latest_s
                self._serve()
            elif not self._take_grant(self._serving.view(self._now)):
                next_s = self._arrivals[0].at_s if self._arrivals else self._horizon_s
                self._now = min(self._horizon_s, next_s)
        if self._paused is not None:
            self._go_on(self._paused, self._paused.left_s)

    def _offer_grants(self) -> float:
        """ServingScheduler._take_gpu and ServingSide.offer_grants; returns the published latest start."""
        view = self._serving.view(self._now)
        if (
            self._paused is not None
            and self._now - self._paused_at_s >= self._policy.settings.stall_timeout_s
        ):
            self._go_on(self._paused, self._paused.left_s)
        if self._rollout is None or not self._policy.may_yield(self._now, view):
            return NEVER
        before_s = self._now
        while self._now + self._rollout.shortest_step_s() <= view.latest_start_s:
            if not self._take_grant(view) or not self._policy.may_repeat(view) or self._has_arrived():
                break
        self._serving.waited(self._now - before_s, self._now)
        return view.latest_start_s if self._was_rollout else NEVER

    def _take_grant(self, view: ServingView) -> bool:
        """RolloutScheduler._ask_for_grant: decides, and runs the step if admitted."""
        rollout = self._rollout
        if rollout is None:
            return False
        if self._paused is not None:
            self._go_on(self._paused, self._until_paused(self._paused))
            return True
        decision = self._policy.decide(self._now, view, rollout.candidate(self._now), rollout.online.model)
        if not decision.is_admitted:
            self._refusals[decision.reason] = self._refusals.get(decision.reason, 0) + 1
            return False
        step = self._begin("rollout", rollout.model, rollout.start_step(decision))
        step.seconds = step.left_s
        self._go_on(step, self._until_paused(step))
        return True

    def _go_on(self, step: "_Running", seconds: float) -> None:
        """A rollout step has the GPU for this long, to its end or to a pause."""
        rollout = self._rollout
        assert rollout is not None
        self._switch(to_rollout=True)
        self._pass("rollout", seconds)
        step.left_s -= seconds
        self._paused, self._paused_at_s = (step, self._now) if step.left_s > 0 else (None, 0.0)
        if self._paused is None:
            self._steps["rollout"] += 1
            rollout.end_step(self._now, step.work, step.seconds)
            self._count_tokens(rollout)

    def _until_paused(self, step: "_Running") -> float:
        """StepInterrupt.ask: for how long a step goes on before it makes way for a request that comes."""
        num_layers = self._rollout.model.num_layers if self._rollout is not None else None
        if num_layers is None or not self._arrivals or self._policy.settings.mode is not GateMode.IDLE:
            return step.left_s
        layer_s = step.seconds / num_layers
        num_whole = int(max(0.0, self._arrivals[0].at_s - self._now) / layer_s)
        return min(step.left_s, (num_whole + 1 + MAX_LAYERS_AHEAD) * layer_s)

    def _serve(self) -> None:
        self._switch(to_rollout=False)
        is_shared = self._rollout is not None
        work = self._serving.start_step(self._serving.prefill_room(self._now) if is_shared else None)
        self._peak_batch = max(self._peak_batch, self._serving.num_running)
        seconds = self._seconds("serving", self._serving.model, work)
        self._pass("serving", seconds)
        self._steps["serving"] += 1
        self._serving.end_step(self._now, work, seconds)

    def _switch(self, *, to_rollout: bool) -> None:
        if to_rollout is not self._was_rollout:
            self._was_rollout = to_rollout
            self._now += SWITCH_S

    def _pass(self, name: str, seconds: float) -> None:
        self.log.append((name, self._now, self._now + seconds))
        counted_s = max(0.0, min(self._now + seconds, self._horizon_s) - self._now)
        self._busy_s[name] += counted_s
        self._now += seconds

    # Naive co-location --------------------------------------------------------------------------------

    def _run_ungated(self, rollout: TwinRollout) -> None:
        """Both engines step at will; while both do, each gets half of the GPU."""
        whole = GateDecision(
            max_tokens=self._policy.settings.chunk_tokens,
            max_seqs=rollout.model.max_seqs,
            reason=GateReason.ADMITTED,
            step_s=0.0,
            retry_at_s=0.0,
        )
        serving_step: _Running | None = None
        rollout_step = self._begin("rollout", rollout.model, rollout.start_step(whole))
        while not self._is_over():
            self._absorb()
            if serving_step is None and self._serving.has_work:
                serving_step = self._begin("serving", self._serving.model, self._serving.start_step())
                self._peak_batch = max(self._peak_batch, self._serving.num_running)
            self._share(serving_step, rollout_step)
            if serving_step is not None and serving_step.left_s <= 0:
                self._steps["serving"] += 1
                self._serving.end_step(self._now, serving_step.work, self._now - serving_step.start_s)
                serving_step = None
            if rollout_step.left_s <= 0:
                self._steps["rollout"] += 1
                rollout.end_step(self._now, rollout_step.work, self._now - rollout_step.start_s)
                self._count_tokens(rollout)
                rollout_step = self._begin("rollout", rollout.model, rollout.start_step(whole))

        rollout.end_step(self._now, rollout_step.work, max(1e-9, self._now - rollout_step.start_s))

    def _share(self, serving_step: "_Running | None", rollout_step: "_Running") -> None:
        """Time passes until the first of both steps ends or, on a GPU without serving, a request arrives."""
        if serving_step is None:
            until_arrival_s = self._arrivals[0].at_s - self._now if self._arrivals else NEVER
            seconds = work_s = min(rollout_step.left_s, max(0.0, until_arrival_s))
            rollout_step.left_s -= seconds
        else:
            work_s = min(serving_step.left_s, rollout_step.left_s)
            seconds = 2 * work_s
            serving_step.left_s -= work_s
            rollout_step.left_s -= work_s
            self._busy_s["serving"] += work_s if self._now < self._horizon_s else 0.0
        self.log.append(("rollout", self._now + seconds - work_s, self._now + seconds))
        self._now += seconds

    def _begin(self, name: str, model: EngineModel, work: StepShape) -> "_Running":
        return _Running(work=work, start_s=self._now, left_s=self._seconds(name, model, work))

    # Small parts --------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        if self._now < self._horizon_s:
            return False
        is_answered = not self._arrivals and not self._serving.has_work
        return is_answered or self._now >= self._horizon_s + self._max_drain_s

    def _has_arrived(self) -> bool:
        return bool(self._arrivals) and self._arrivals[0].at_s <= self._now

    def _absorb(self) -> None:
        while self._has_arrived():
            self._serving.add(self._arrivals.popleft())

    def _count_tokens(self, rollout: TwinRollout) -> None:
        if self._now <= self._horizon_s:
            self._generated = rollout.num_generated

    def _seconds(self, name: str, model: EngineModel, work: StepShape) -> float:
        return noisy(model.costs, work, self._noise[name])


@dataclass(slots=True)
class _Running:
    work: StepShape
    start_s: float
    left_s: float
    """What is left of its length on a GPU of its own."""
    seconds: float = 0.0
    """That length, where it may be paused."""


def noisy(costs: StepTimeModel, work: StepShape, rng: random.Random) -> float:
    """Returns how long one step takes in truth."""
    seconds = costs.predict_step(work)
    late_s = HICCUP_S if rng.random() < HICCUP_SHARE else 0.0
    return seconds * rng.lognormvariate(0.0, STEP_NOISE) + late_s


@cache
def profile_of(model: EngineModel) -> tuple[StepTimeModel, tuple[StepObservation, ...]]:
    """Returns what `rose profile` would learn about this engine, and from which noisy steps."""
    rng = random.Random(0)
    shapes = _profiled_shapes(model.max_batched_tokens, max_decodes=64, max_context_tokens=4096)
    # Rounds of all shapes, so that a slow moment disturbs every shape a little and not one shape wholly.
    observed = tuple(shape.observed(noisy(model.costs, shape, rng)) for shape in shapes * PROFILE_ROUNDS)
    return fit(observed), observed


def _profiled_shapes(max_prefill: int, max_decodes: int, max_context_tokens: int) -> list[StepShape]:
    """Returns prefill alone, decodes alone at short and long context, and mixed steps."""
    prefills = [max_prefill >> i for i in range(5)]
    decodes = [max_decodes >> i for i in range(4)]
    short, long = max_context_tokens // 8, max_context_tokens
    sizes = [(p, computed, 0, 0) for p in prefills for computed in (0, long)]
    sizes += [(0, 0, d, d * context) for d in decodes for context in (short, long)]
    sizes += [(p, 0, d, d * short) for p in prefills[::2] for d in decodes[::2]]
    return [
        StepShape(
            prefill_tokens=p, num_decodes=d, context_tokens=c, prefill_pairs=attended_pairs(p, computed)
        )
        for p, computed, d, c in sizes
    ]
