"""The gate's policy: may the rollout engine step now, and with how many tokens?

The decision is a pure function of `now`, what serving published, what rollout would run, and how long that
takes. In every mode but the baselines ALTERNATE, EQUATIONS and OFF, an admitted step is predicted to end,
error included, before serving's latest start.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rose.admission.slack import BANK_LIMIT_BUDGETS, NEVER
from rose.admission.step_time import StepTimeModel, attended_pairs
from rose.types import SLO, Deployment, GateMode

# Spending all TPOT slack multiplies serving's end-to-end time by 16 to 20 and its concurrency by 4
# (simulated, at the full budget). The target is therefore half the SLO, within 5 to 8 serving steps. A gap of
# 5 steps harvests 70%. Beyond 8 a longer gap harvests next to nothing, because serving then takes 1/8 of the
# time. A target of the whole SLO can't be met, because predictions are not exact.
TPOT_TARGET_FRACTION = 0.5
TPOT_TARGET_STEPS = (5.0, 8.0)
MAX_TPOT_TARGET_FRACTION = 0.95
# Part of the target. With less, the bank of mean-TPOT credit is of no use.
MIN_ITL_CAP_TARGETS = 1.5
# Part of the TTFT SLO that a request may lose if it comes just after a rollout step began on an idle GPU.
IDLE_STEP_FRACTION = 0.25
# The same on a decoder, of the TPOT SLO, because its time from arrival to first token counts as a token's.
IDLE_DECODER_STEP_FRACTION = 0.5
# The size of the step that is admitted on an idle GPU whatever the model predicts. Without such steps,
# observations could never correct a missing or wrong profile.
MIN_STEP_TOKENS = 32
# A declined rollout engine asks again after this long, even if nobody rings.
RETRY_S = 0.02
# A step with some of the decodes costs nearly as much as one with all. So slack that is too short for all is
# saved, which makes serving's next gap longer. It is saved for a whole step of at most this part of the
# longest gap, and only for this part of the stall timeout.
WORTH_SAVING_FOR = 0.5
PATIENCE = 0.25
# Spent slack delays serving by its length, and so takes idle time that would come later. A step with less
# than this part of a whole step's tokens per second costs more than it harvests.
MIN_EFFICIENCY = 0.8
# A whole step has one of this many pieces of a chunk: prefill would starve on what decodes leave of a gap.
PREFILL_PIECES = 4


class GateReason(StrEnum):
    """Why a step was admitted or refused, in the order of the board's decline counters."""

    ADMITTED = "admitted"
    NOTHING_TO_RUN = "nothing_to_run"
    NO_GRANT = "no_grant"
    SERVING_HAS_WORK = "serving_has_work"
    PREFILL_FIRST = "prefill_first"
    NO_SLACK = "no_slack"
    SERVING_LOST = "serving_lost"
    """The serving process died. What runs on the GPU is unknown, and a successor may come at any moment."""
    MEASURING = "measuring"
    """This slice of time is closed to rollouts, so that what they cost serving can be measured."""
    SAVING = "saving"
    """The slack that is left is too short for all decodes together, so it is kept for the next gap."""


def mode_problem(mode: GateMode, deployment: Deployment) -> str | None:
    """Returns why a mode can't work with a deployment, and what to use; None if it can."""
    if (mode, deployment) == (GateMode.TPOT_ONLY, Deployment.PREFILL):
        return "gate tpot-only: a prefiller makes no tokens that could be late; use dual or ttft-only"
    if (mode, deployment) == (GateMode.TTFT_ONLY, Deployment.DECODE):
        return "gate ttft-only: a decoder has no prompts that could be late; use dual or tpot-only"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """What an operator chooses about compute sharing."""

    slo: SLO
    mode: GateMode = GateMode.DUAL
    deployment: Deployment = Deployment.COLLOCATED
    """The serving engine's deployment. A rollout engine learns from the board which steps it allows."""
    tpot_target_s: float | None = None
    """The TPOT that rollouts may stretch serving to; None for half the SLO, within 5 to 8 serving steps."""
    itl_cap_s: float | None = None
    """The longest single gap between tokens that the TPOT bank may cause; None for the TPOT SLO, or one and a
    half targets if that is more."""
    max_step_s: float | None = None
    """The longest rollout step, on an idle GPU too; None for a quarter of the TTFT SLO, or on a decoder half
    the TPOT SLO."""
    chunk_tokens: int = 512
    stall_timeout_s: float = 2.0
    handover_s: float = 0.008
    """How long serving waits for a rollout engine to use a grant."""

    def __post_init__(self) -> None:
        for name in ("tpot_target_s", "itl_cap_s", "max_step_s", "stall_timeout_s", "handover_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")
        if problem := mode_problem(self.mode, self.deployment):
            raise ValueError(problem)

    def tpot_target_for(self, step_s: float, own_tpot_s: float | None = None) -> float:
        """Returns tpot_target_s, or its default where serving's decode step takes ``step_s``.

        ``own_tpot_s`` is the TPOT SLO of a request that has its own; the target stays below it too.
        """
        slo_s = own_tpot_s if own_tpot_s is not None else self.slo.tpot_s
        if self.tpot_target_s is not None:
            target_s = self.tpot_target_s
            return target_s if own_tpot_s is None else min(target_s, MAX_TPOT_TARGET_FRACTION * slo_s)
        least, most = TPOT_TARGET_STEPS
        target_s = min(max(TPOT_TARGET_FRACTION * slo_s, least * step_s), most * step_s)
        return min(target_s, MAX_TPOT_TARGET_FRACTION * slo_s)

    def itl_cap_for(self, target_s: float, own_tpot_s: float | None = None) -> float:
        """Returns itl_cap_s, or its default for a TPOT target of ``target_s``. For a request with a TPOT SLO
        of its own (``own_tpot_s``) it is at most the default."""
        slo_s = own_tpot_s if own_tpot_s is not None else self.slo.tpot_s
        default_s = max(slo_s, MIN_ITL_CAP_TARGETS * target_s)
        if self.itl_cap_s is None:
            return default_s
        return self.itl_cap_s if own_tpot_s is None else min(self.itl_cap_s, default_s)

    @property
    def longest_gap_s(self) -> float:
        """The longest gap between tokens that the settings allow the bank to cause."""
        cap_s = self.itl_cap_for(0.0)
        if self.tpot_target_s is None:
            return cap_s
        return min(cap_s, (1.0 + BANK_LIMIT_BUDGETS) * self.tpot_target_s)

    @property
    def effective_max_step_s(self) -> float:
        """max_step_s or its default."""
        return self.max_step_s if self.max_step_s is not None else self.max_step_for(self.slo)

    def max_step_for(self, slo: SLO) -> float:
        """The longest rollout step that may have begun when a request with this SLO comes to an idle GPU."""
        if self.deployment is Deployment.DECODE:
            return IDLE_DECODER_STEP_FRACTION * slo.tpot_s
        return IDLE_STEP_FRACTION * slo.ttft_s


class ServingView(NamedTuple):
    """What the serving engine published last.

    This and the decision are tuples: both are made while the GPU stands still, and a frozen dataclass takes
    three times as long to make.
    """

    has_work: bool
    has_pending_prefill: bool
    latest_start_s: float
    """When its next step must start; NEVER if there is no deadline."""
    max_step_s: float = NEVER
    """The longest rollout step that it allows while it has no work."""
    alive: bool = True
    may_start: bool = True
    """Whether rollout may have the GPU: serving is idle, or has offered a grant."""
    seq: int = 0
    """The publication's number: RolloutSide.try_begin refuses a decision that was made on an older one."""
    grant: int = 0
    """The latest grant that serving has offered."""
    is_closed: bool = False
    """Whether this slice of time is closed to rollouts, whatever slack there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCandidate:
    """What the rollout engine would run next."""

    prefill_tokens_waiting: int
    num_decodes: int
    context_tokens: int
    """Sum of the decoding sequences' context lengths."""
    computed_tokens: int = 0
    """The most tokens that a prefilling request may have computed before this step."""
    waited_s: float = 0.0
    """Seconds since its last step ended, while it had something to run."""
    draft_tokens: tuple[int, ...] = ()
    """The number of draft tokens of each decoding sequence, in the order in which a step takes the sequences;
    empty if none has any. The predicted time of a decode includes them."""

    def decode_tokens(self, num_decodes: int) -> int:
        """Returns how many tokens the first ``num_decodes`` sequences have in a step, drafts included."""
        return num_decodes + sum(self.draft_tokens[:num_decodes])

    def prefill_beside(self, num_decodes: int, most_tokens: int) -> int:
        """Returns how many prefill tokens a step of ``most_tokens`` has beside ``num_decodes`` sequences."""
        return max(0, min(self.prefill_tokens_waiting, most_tokens - self.decode_tokens(num_decodes)))


class GateDecision(NamedTuple):
    """The limits of an admitted step, or the reason for waiting."""

    max_tokens: int
    """The tokens of the step, decodes with their drafts first; 0 to wait."""
    max_seqs: int
    """The number of decoding sequences in the step; fewer than the candidate's if not all fit."""
    reason: GateReason
    step_s: float
    """The predicted seconds of the admitted step, error included; 0 to wait."""
    retry_at_s: float
    """When to ask again if nobody rings; `now` for an admitted step."""

    @property
    def is_admitted(self) -> bool:
        """Whether a step may be taken."""
        return self.max_tokens > 0


class GatePolicy:
    """Decides about single steps, and holds only settings. Engines and simulators use the same class."""

    def __init__(self, settings: GateSettings) -> None:
        self.settings = settings
        mode = settings.mode
        # Computed once: the GPU stands still between a grant and its decision.
        self._is_prefill_first = mode is GateMode.DUAL
        self._is_bounded = mode not in (GateMode.OFF, GateMode.ALTERNATE, GateMode.EQUATIONS)
        self._max_step_s = settings.effective_max_step_s if self._is_bounded else NEVER
        self._own_max_step_s = settings.max_step_s if settings.max_step_s is not None else NEVER
        self._longest_gap_s = settings.longest_gap_s
        self._patience_s = PATIENCE * settings.stall_timeout_s

    def may_yield(self, now: float, view: ServingView) -> bool:
        """Serving's half: whether to offer a grant before its next step while it has work."""
        mode = self.settings.mode
        if mode in (GateMode.OFF, GateMode.IDLE):
            return False
        if mode is GateMode.ALTERNATE:
            return True
        if mode is GateMode.DUAL and view.has_pending_prefill:
            return False
        return now < view.latest_start_s

    def may_repeat(self, view: ServingView) -> bool:
        """Serving's half: whether to offer more than one grant while slack is left.

        The alternating baseline offers one grant for each of serving's steps. So does a single-objective mode
        without a deadline of its kind; otherwise requests of the other kind would wait for ever.
        """
        return self.settings.mode is not GateMode.ALTERNATE and view.latest_start_s < NEVER

    def decide(
        self, now: float, view: ServingView, candidate: RolloutCandidate, model: StepTimeModel
    ) -> GateDecision:
        """Rollout's half: returns the limits of a step that may start now, or why none may."""
        if candidate.prefill_tokens_waiting <= 0 and candidate.num_decodes <= 0:
            return _wait(now, GateReason.NOTHING_TO_RUN)
        reason = self._refusal(now, view)
        if reason is not None:
            return _wait(now, reason)
        fitted = self._fit(now, view, candidate, model)
        if not fitted.is_admitted and not view.has_work:
            return self._smallest(now, candidate, model)
        return fitted

    def shortest_step_s(self, view: ServingView, candidate: RolloutCandidate, model: StepTimeModel) -> float:
        """Rollout's half: returns the least slack that decide() uses while serving has work, in seconds.

        Serving offers no grant with less slack: a declined one costs a wait, and steps in flight.
        """
        if candidate.num_decodes > 0:
            least_s = model.predict_safe(0, 1, candidate.context_tokens / candidate.num_decodes)
        else:
            least_s = model.predict_safe(1, 0, 0, attended_pairs(1, candidate.computed_tokens))
        if not self._is_bounded:
            return least_s
        return max(least_s, min(self.longest_step_s(view), self._worth_saving_for(candidate, model)))

    def piece_s(self, now: float, view: ServingView, least_s: float, most_s: float) -> float | GateReason:
        """A training guest's half: returns the seconds that a piece of its pass may take, error included, or
        why none may start.

        The piece needs ``least_s`` and can use up to ``most_s``. A piece whose time is unknown (NEVER)
        may start only while serving is idle, and then counts as the longest step.
        """
        reason = self._refusal(now, view)
        if reason is not None:
            return reason
        budget_s = longest_s = self.longest_step_s(view)
        if view.has_work and self._is_bounded:
            budget_s = min(longest_s, view.latest_start_s - now)
        elif least_s == NEVER:
            return longest_s
        return max(least_s, min(most_s, budget_s)) if least_s <= budget_s else GateReason.NO_SLACK

    def longest_step_s(self, view: ServingView) -> float:
        """Returns the seconds of a guest's longest step, even on an idle GPU; NEVER if the mode sets no
        bound. It follows from serving's objectives, or from the guest's own without a serving engine."""
        if view.max_step_s == NEVER or not self._is_bounded:
            return self._max_step_s
        return min(view.max_step_s, self._own_max_step_s)

    def _refusal(self, now: float, view: ServingView) -> GateReason | None:
        mode = self.settings.mode
        if mode is GateMode.OFF:
            return None
        if not view.alive:
            return GateReason.SERVING_LOST
        if view.is_closed:
            return GateReason.MEASURING
        if not view.may_start:
            return GateReason.NO_GRANT
        if not view.has_work or mode is GateMode.ALTERNATE:
            return None
        if mode is GateMode.IDLE:
            return GateReason.SERVING_HAS_WORK
        if self._is_prefill_first and view.has_pending_prefill:
            return GateReason.PREFILL_FIRST
        return GateReason.NO_SLACK if now >= view.latest_start_s else None

    def _fit(
        self, now: float, view: ServingView, candidate: RolloutCandidate, model: StepTimeModel
    ) -> GateDecision:
        """Fits all decodes and as much prefill as possible, or else as many decodes as possible."""
        longest_s = self.longest_step_s(view)
        budget_s = longest_s
        if self._is_bounded and view.has_work:
            budget_s = min(longest_s, view.latest_start_s - now)
        num_decodes, context = candidate.num_decodes, float(candidate.context_tokens)
        prefill, most = 0, candidate.prefill_beside(num_decodes, self.settings.chunk_tokens)
        if model.predict_safe(0, num_decodes, context) <= budget_s:
            prefill = model.tokens_within(budget_s, num_decodes, most, context, candidate.computed_tokens)
        else:
            per_decode = context / max(1, num_decodes)
            num_decodes = model.decodes_within(budget_s, num_decodes, per_decode)
            context = per_decode * num_decodes
        if prefill + num_decodes == 0:
            return _wait(now, GateReason.NO_SLACK)
        is_whole = num_decodes == candidate.num_decodes and prefill >= self._piece(candidate)
        if not is_whole and budget_s < longest_s and budget_s < self._worth_saving_for(candidate, model):
            return _wait(now, GateReason.SAVING)
        return _admit(now, model, candidate, prefill, num_decodes, context)

    def _piece(self, candidate: RolloutCandidate) -> int:
        """Returns the prefill tokens of a whole step."""
        chunk = self.settings.chunk_tokens
        return min(candidate.prefill_beside(candidate.num_decodes, chunk), chunk // PREFILL_PIECES)

    def _worth_saving_for(self, candidate: RolloutCandidate, model: StepTimeModel) -> float:
        """Returns the seconds of the step for which shorter slack is saved; 0 if saving is of no use.

        The step has all decodes and a piece of the prefill, or all decodes alone if no gap is long enough for
        both. If no gap is long enough for these either, it is the smallest step that is nearly as efficient.
        Saving is of no use if no gap holds even that step, or if the sequences have waited for long enough.
        """
        if candidate.waited_s >= self._patience_s:
            return 0.0
        for prefill in (self._piece(candidate), 0):
            pairs = attended_pairs(prefill, candidate.computed_tokens)
            whole_s = model.predict_safe(prefill, candidate.num_decodes, candidate.context_tokens, pairs)
            if whole_s <= WORTH_SAVING_FOR * self._longest_gap_s:
                return whole_s
        efficient_s = self._efficient_s(candidate, model)
        return efficient_s if efficient_s <= self._longest_gap_s else 0.0

    def _efficient_s(self, candidate: RolloutCandidate, model: StepTimeModel) -> float:
        """Returns the seconds of the smallest step whose decodes reach MIN_EFFICIENCY of the tokens per
        second of all decodes together; 0 without decodes."""
        most, share = candidate.num_decodes, MIN_EFFICIENCY
        if most == 0:
            return 0.0
        decodes_s = model.per_decode_s * most + model.per_context_token_s * candidate.context_tokens
        least = share * most * model.base_s / (model.base_s + (1 - share) * decodes_s)
        num_decodes = min(most, math.ceil(least))
        return model.predict_safe(0, num_decodes, candidate.context_tokens * num_decodes / most)

    def _smallest(self, now: float, candidate: RolloutCandidate, model: StepTimeModel) -> GateDecision:
        # The model needs steps of different sizes, so these have neither one decode each nor are all full.
        num_decodes = min(candidate.num_decodes, MIN_STEP_TOKENS)
        prefill = candidate.prefill_beside(num_decodes, MIN_STEP_TOKENS // (2 if num_decodes else 1))
        context = candidate.context_tokens * num_decodes / max(1, candidate.num_decodes)
        return _admit(now, model, candidate, prefill, num_decodes, context)


def _admit(
    now: float,
    model: StepTimeModel,
    candidate: RolloutCandidate,
    prefill: int,
    num_decodes: int,
    context: float,
) -> GateDecision:
    pairs = attended_pairs(prefill, candidate.computed_tokens)
    return GateDecision(
        max_tokens=prefill + candidate.decode_tokens(num_decodes),
        max_seqs=num_decodes,
        reason=GateReason.ADMITTED,
        step_s=model.predict_safe(prefill, num_decodes, context, pairs),
        retry_at_s=now,
    )


def _wait(now: float, reason: GateReason) -> GateDecision:
    return GateDecision(max_tokens=0, max_seqs=0, reason=reason, step_s=0.0, retry_at_s=now + RETRY_S)
