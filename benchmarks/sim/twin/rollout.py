"""The modelled rollout engine: as many multi-turn trajectories as it has slots, each always ready to go on.

Owns the trajectories. Source of their shape: ROSE §2 and §6 (multi-turn agents, 16 rollouts a device, prefix
cached between turns); the lengths are our assumption. Never advances time.
"""

import random
from dataclasses import dataclass

from rose.admission.gate import GateDecision, RolloutCandidate
from rose.admission.online import OnlineStepTime
from rose.admission.step_time import StepShape, attended_pairs
from sim.twin.pairs import EngineModel

# A turn: what the environment says, and what the model answers. With 8 turns a trajectory stays under 4096
# tokens.
OBSERVATION_TOKENS = (64, 256)
ANSWER_TOKENS = (64, 384)
FIRST_PROMPT_TOKENS = (384, 768)
TURNS = 8


@dataclass(slots=True)
class _Trajectory:
    prefill_left: int
    answer_left: int
    context: int = 0
    turn: int = 0
    scheduled: int = 0


class TwinRollout:
    """Slots that are always full: the router has more turns than this engine can run."""

    def __init__(self, model: EngineModel, online: OnlineStepTime, rng: random.Random) -> None:
        self.model = model
        self.online = online
        self._rng = rng
        self._slots = [self._start() for _ in range(model.max_seqs)]
        self.num_generated = 0
        self.num_prefilled = 0
        self._stepped_s = 0.0

    def candidate(self, now: float) -> RolloutCandidate:
        """Returns what it would run next, as the engine's scheduler counts it."""
        prefill = decodes = context = computed = 0
        for t in self._slots:
            if t.prefill_left:
                prefill += t.prefill_left
                computed = max(computed, t.context)
            else:
                decodes += 1
                context += t.context
        return RolloutCandidate(
            prefill_tokens_waiting=min(prefill, self.model.max_batched_tokens),
            num_decodes=decodes,
            context_tokens=context,
            computed_tokens=computed,
            waited_s=now - self._stepped_s,
        )

    def shortest_step_s(self) -> float:
        """Returns no more than an engine tells the board; what it tells beyond that saves declined offers,
        which are free here."""
        return self.online.model.predict_safe(0, 1)

    def start_step(self, decision: GateDecision) -> StepShape:
        """Fills an admitted step: decodes first, then prefill in slot order."""
        tokens, num_decodes, prefill, context, pairs = decision.max_tokens, 0, 0, 0, 0.0
        for t in self._slots:
            if not t.prefill_left and num_decodes < min(decision.max_seqs, tokens):
                t.scheduled = 1
                num_decodes += 1
                context += t.context
        for t in self._slots:
            if t.prefill_left and num_decodes + prefill < tokens:
                t.scheduled = min(t.prefill_left, tokens - num_decodes - prefill)
                prefill += t.scheduled
                pairs += attended_pairs(t.scheduled, t.context)
        return StepShape(
            prefill_tokens=prefill, num_decodes=num_decodes, context_tokens=context, prefill_pairs=pairs
        )

    def end_step(self, now: float, work: StepShape, seconds: float) -> None:
        """The step that start_step() filled is over."""
        self._stepped_s = now
        self.online.observe(work.observed(seconds))
        late: list[_Trajectory] = []
        for index, t in enumerate(self._slots):
            if not t.scheduled:
                late.append(t)
                continue
            self._advance(t)
            if not t.prefill_left and not t.answer_left:
                self._slots[index] = self._next_turn(t)
        # Who had no room goes first next time.
        done = {id(t) for t in late}
        self._slots = late + [t for t in self._slots if id(t) not in done]

    def check_integrity(self) -> None:
        """Raises AssertionError if the books disagree."""
        assert len(self._slots) == self.model.max_seqs
        assert all(t.scheduled == 0 and t.prefill_left >= 0 and t.answer_left > 0 for t in self._slots)

    def _advance(self, t: _Trajectory) -> None:
        t.context += t.scheduled
        if t.prefill_left:
            t.prefill_left -= t.scheduled
            self.num_prefilled += t.scheduled
            made = int(t.prefill_left == 0)
        else:
            made = 1
        t.answer_left -= made
        self.num_generated += made
        t.scheduled = 0

    def _start(self) -> _Trajectory:
        # Trajectories start at a random turn: after a while nobody is in step with anybody anyway.
        turn = self._rng.randrange(TURNS)
        context = turn * (sum(OBSERVATION_TOKENS) + sum(ANSWER_TOKENS)) // 2
        return _Trajectory(
            prefill_left=self._rng.randint(*FIRST_PROMPT_TOKENS if turn == 0 else OBSERVATION_TOKENS),
            answer_left=self._rng.randint(*ANSWER_TOKENS),
            context=context,
            turn=turn,
        )

    def _next_turn(self, t: _Trajectory) -> _Trajectory:
        turn = (t.turn + 1) % TURNS
        return _Trajectory(
            prefill_left=self._rng.randint(*FIRST_PROMPT_TOKENS if turn == 0 else OBSERVATION_TOKENS),
            answer_left=self._rng.randint(*ANSWER_TOKENS),
            context=0 if turn == 0 else t.context,
            turn=turn,
        )
