"""Which of a serving engine's requests wait, which decode, and when their tokens are due.

Owns the token times that vLLM's scheduler does not keep. A publication takes a few microseconds, because a
decode's next due time is computed once per token. Only the engine core's thread uses it.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from rose.admission.gate import GateSettings, ServingView
from rose.admission.harm import RequestDelay
from rose.admission.slack import (
    BANK_LIMIT_BUDGETS,
    BANK_PACE,
    NEVER,
    PendingPrefill,
    TokenTimes,
    latest_start_ttft,
    literal_latest_start,
    shrunk_target,
    token_due,
)
from rose.admission.step_time import StepTimeModel, attended_pairs
from rose.types import SLO, Deployment, GateMode

# A request waits less than this for its tokenizer and the queue between processes. A longer wait, or a
# negative one, means that the wall clock was set meanwhile.
MAX_FRONT_END_WAIT_S = 60.0
# How long the tightest SLO that a request brought counts for later requests.
CLASS_MEMORY_S = 300.0
# The least prefill of a step that is split for its decodes. Less would cost more in steps than it saves.
MIN_PREFILL_TOKENS = 64
# The weight of a step's accepted drafts in the running mean.
ACCEPTANCE_SHARE = 0.05


def monotonic_arrival(now: float, wall_now: float, wall_arrival: float) -> float:
    """Returns when a request came, on the clock of ``now``. The front end stamps requests with wall-clock
    time.

    A wait that only a jump of the wall clock explains counts as 0 s.
    """
    waited_s = wall_now - wall_arrival
    return now - waited_s if 0 <= waited_s <= MAX_FRONT_END_WAIT_S else now


class ServingDeadlines:
    """Tracks serving requests and computes what to publish after each step."""

    def __init__(self, settings: GateSettings, *, chunk_tokens: int, decode_tokens: int = 1) -> None:
        """``chunk_tokens`` is the serving engine's own token budget for a step; ``decode_tokens`` is the most
        that a decode takes of it: one token, and its draft tokens."""
        self._settings = settings
        mode, deployment = settings.mode, settings.deployment
        # Looked up once: an enum's members cost as much as the arithmetic that they select.
        self._has_deadlines = mode not in (GateMode.ALTERNATE, GateMode.IDLE, GateMode.OFF)
        self._is_prefill_first = mode is GateMode.DUAL
        self._is_literal = mode is GateMode.EQUATIONS
        self._has_ttft = mode is not GateMode.TPOT_ONLY and deployment is not Deployment.DECODE
        self._has_tpot = mode is not GateMode.TTFT_ONLY and deployment is not Deployment.PREFILL
        self._is_decoder = deployment is Deployment.DECODE
        self._decode_s = 0.0  # until a step time is known, nothing is spent
        """The seconds of serving's decode step per token that it gives a decode, at the last publication. The
        default target follows it."""
        self._chunk_tokens = chunk_tokens
        self._decode_tokens = decode_tokens
        self._tokens_per_step = 1.0
        """How many tokens a step gives a decode, on average over the last steps."""
        self._load = 0.0
        self._pending: dict[str, PendingPrefill] = {}
        self._decodes: dict[str, TokenTimes] = {}
        self._own_tpot_s: dict[str, float] = {}
        self._waited_s = 0.0
        """The seconds of all waits for rollout steps so far. A request's own wait is the difference of two of
        its values."""
        self._queue_waited_s = 0.0
        """The seconds of waits since the queue of prefills was last empty. They delay every request that
        joins."""
        self._waits: deque[tuple[float, float]] = deque(maxlen=64)
        """The ends and lengths of the last waits, because a request may have come during one."""
        self._crowd: set[str] = set()
        """The pending requests that came during a rollout step for which decodes waited too."""
        self._arrivals: dict[str, tuple[float, float, str]] = {}
        """The time of a pending request's arrival, ``_waited_s`` less the waits it joined, and its tenant."""
        self.ended: list[RequestDelay] = []
        """Requests that have ended, for their reader to take."""
        self._class_step_s, self._class_until_s = NEVER, -NEVER
        """The longest rollout step under the tightest SLO that a request brought with it, and until when it
        counts."""
        self._due_s: float | None = None
        """The least due time of all decodes, found once per step; None if it has to be found again."""

    @property
    def has_pending_prefill(self) -> bool:
        """Whether a request waits for its first token."""
        return bool(self._pending)

    @property
    def num_decodes(self) -> int:
        """Requests between their first and last token."""
        return len(self._decodes)

    def arrived(
        self,
        request_id: str,
        now: float,
        prompt_tokens: int,
        own_slo: SLO | None = None,
        tenant: str = "",
    ) -> None:
        """Adds a request that entered the scheduler, in queue order; ``own_slo`` overrides the
        deployment's."""
        if self._is_decoder:
            self.arrived_prefilled(request_id, now, own_slo, tenant)
            return
        if not self._pending:
            self._queue_waited_s = 0.0
        during_s = sum(min(seconds, end_s - now) for end_s, seconds in self._waits if end_s > now)
        if during_s > 0 and self._decodes:
            self._crowd.add(request_id)
        self._arrivals[request_id] = (now, self._waited_s - max(self._queue_waited_s, during_s), tenant)
        self._pending[request_id] = PendingPrefill(
            arrival_s=now,
            remaining_tokens=prompt_tokens,
            ttft_s=own_slo.ttft_s if own_slo is not None else None,
        )
        if own_slo is not None:
            self._own_tpot_s[request_id] = own_slo.tpot_s

    def arrived_prefilled(
        self, request_id: str, now: float, own_slo: SLO | None = None, tenant: str = ""
    ) -> None:
        """Adds a request whose KV comes from a prefiller; its arrival counts as its last token's time.

        ROSE §4.1: a decoder uses TPOT slack alone. If the due time passes while the KV is on its way,
        rollouts wait, as they do for any late token.
        """
        tpot_s = own_slo.tpot_s if own_slo is not None else None
        times = self._decodes[request_id] = TokenTimes(now, tpot_s)
        times.is_measured, times.waited_mark_s, times.tenant = True, self._waited_s, tenant
        times.num_output_tokens = 1  # the prefiller's
        times.due_s = token_due(now, now, 1, *self._target_and_cap(tpot_s))
        self._due_s = None

    def waited(self, seconds: float, now: float) -> None:
        """Notes that serving, and so all its requests, waited for a rollout step until now."""
        self._waited_s += seconds
        self._waits.append((now, seconds))
        if self._pending:
            self._queue_waited_s += seconds

    def leave_out_present(self) -> None:
        """Leaves the present requests out of the measured latencies, because their starts were not
        recorded."""
        self._arrivals.clear()
        for times in self._decodes.values():
            times.is_measured = False

    def expect_more_like(self, own_slo: SLO, now: float) -> None:
        """Notes that a request with this SLO came. The next one may find a rollout step on the idle GPU."""
        step_s = self._settings.max_step_for(own_slo)
        if step_s <= self.max_idle_step_s(now):
            self._class_step_s, self._class_until_s = step_s, now + CLASS_MEMORY_S

    def max_idle_step_s(self, now: float) -> float:
        """Returns the longest rollout step that serving allows while it has no work."""
        longest_s = self._settings.effective_max_step_s
        return min(longest_s, self._class_step_s) if now < self._class_until_s else longest_s

    def prefilled(self, request_id: str, remaining_tokens: int, computed_tokens: int = 0) -> None:
        """Notes that a chunk of its prompt was computed or found cached. Unknown ids are decoding already."""
        p = self._pending.get(request_id)
        if p is not None:
            self._pending[request_id] = replace(
                p, remaining_tokens=remaining_tokens, computed_tokens=computed_tokens
            )

    def produced(
        self, request_ids: Iterable[str], now: float, num_tokens: Mapping[str, int] | None = None
    ) -> None:
        """Notes that these requests produced ``num_tokens``, or one token each, in the step that ended
        now."""
        if num_tokens is not None:
            self._observe_acceptance(num_tokens)
        common, tokens_per_step = self._target_and_cap(), self._tokens_per_step
        classes: dict[float, tuple[float, float]] = {}
        decodes = self._decodes
        least_s, num_produced = NEVER, 0
        for request_id in request_ids:
            times = decodes.get(request_id)
            if times is None:
                times = decodes[request_id] = self._first_token(request_id, now)
            times.last_token_s = now
            times.num_output_tokens += 1 if num_tokens is None else num_tokens[request_id]
            own_tpot_s = times.tpot_s
            if own_tpot_s is None:
                target_s, itl_cap_s = common
            else:
                if own_tpot_s not in classes:
                    classes[own_tpot_s] = self._target_and_cap(own_tpot_s)
                target_s, itl_cap_s = classes[own_tpot_s]
            due_s = token_due(
                times.first_token_s, now, times.num_output_tokens, target_s, itl_cap_s, tokens_per_step
            )
            times.due_s = due_s
            num_produced += 1
            if due_s < least_s:
                least_s = due_s
        # A decode that was preempted made no token; its older due time may be the least.
        self._due_s = least_s if num_produced == len(decodes) else None

    def _observe_acceptance(self, num_tokens: Mapping[str, int]) -> None:
        made = [count for request_id, count in num_tokens.items() if request_id in self._decodes]
        if made:
            share = ACCEPTANCE_SHARE * (sum(made) / len(made) - self._tokens_per_step)
            self._tokens_per_step += share

    def _first_token(self, request_id: str, now: float) -> TokenTimes:
        self._pending.pop(request_id, None)
        self._crowd.discard(request_id)
        times = TokenTimes(now, self._own_tpot_s.pop(request_id, None))
        times.is_measured = request_id in self._arrivals
        arrival_s, mark_s, times.tenant = self._arrivals.pop(request_id, (now, self._waited_s, ""))
        times.ttft_s = now - arrival_s
        times.ttft_waited_s, times.waited_mark_s = self._waited_s - mark_s, self._waited_s
        return times

    def finished(self, request_ids: Iterable[str]) -> None:
        """Forgets requests that have ended in any way; unknown ids are ignored."""
        for request_id in request_ids:
            self._pending.pop(request_id, None)
            self._crowd.discard(request_id)
            self._own_tpot_s.pop(request_id, None)
            self._arrivals.pop(request_id, None)
            times = self._decodes.pop(request_id, None)
            if times is None:
                continue
            if times.due_s == self._due_s:
                self._due_s = None
            if times.is_measured:
                self.ended.append(self._delay(times))

    def _delay(self, times: TokenTimes) -> RequestDelay:
        num_gaps = times.num_output_tokens - 1
        span_s = times.last_token_s - times.first_token_s
        return RequestDelay(
            at_s=times.last_token_s,
            ttft_s=times.ttft_s,
            ttft_waited_s=times.ttft_waited_s,
            tpot_s=span_s / num_gaps if num_gaps > 0 else 0.0,
            tpot_waited_s=(self._waited_s - times.waited_mark_s) / num_gaps if num_gaps > 0 else 0.0,
            tenant=times.tenant,
        )

    def set_load(self, load: float) -> None:
        """Sets how full the batch (of max_num_seqs) or the KV is, the greater of both, 0 to 1.

        From half full on it shrinks the TPOT target of the tokens that are produced from now on.
        """
        self._load = load

    def view(
        self, now: float, model: StepTimeModel, *, has_work: bool, context_tokens: float = 0
    ) -> ServingView:
        """Returns what to publish under this gate mode."""
        self._decode_s = model.predict(0, len(self._decodes), context_tokens) / self._tokens_per_step
        return ServingView(
            has_work=has_work,
            has_pending_prefill=bool(self._pending),
            latest_start_s=self._latest_start(now, model, context_tokens) if has_work else NEVER,
        )

    def view_after(self, end_s: float, model: StepTimeModel, context_tokens: float = 0) -> ServingView:
        """Returns the view to expect at ``end_s``, when the steps in flight have given every decode the
        tokens of one more step. Without draft tokens its latest start is a lower bound.
        """
        latest_s = self._latest_start(end_s, model, context_tokens)
        follows_dues = self._has_deadlines and self._has_tpot and not self._is_literal
        if follows_dues and self._decodes and not (self._is_prefill_first and self._pending):
            assert self._due_s is not None  # _latest_start found it
            latest_s += self._next_due(end_s, self._due_s) - self._due_s
        return ServingView(has_work=True, has_pending_prefill=bool(self._pending), latest_start_s=latest_s)

    def _next_due(self, now: float, due_s: float) -> float:
        """Returns the least token_due() after another step's tokens at ``now``. The pace moves on by these
        tokens, and the limit and the cap count from ``now``."""
        tokens = self._tokens_per_step
        paces = [self._target_and_cap(own) for own in {times.tpot_s for times in self._decodes.values()}]
        return min(
            min(
                due_s + tokens * BANK_PACE * target_s,
                now + min((1 + BANK_LIMIT_BUDGETS * tokens) * target_s, cap_s),
            )
            for target_s, cap_s in paces
        )

    def may_join(self, now: float, model: StepTimeModel, context_tokens: float = 0) -> bool:
        """Whether a whole chunk of a new request's prefill may join the step that starts now, after rollouts.

        It may not if a decode in that step would then break its ITL cap.
        """
        if not self._decodes:
            return True
        prefill = 1 if self._is_decoder else self._chunk_tokens
        step_s = model.predict_safe(prefill, len(self._decodes), context_tokens, attended_pairs(prefill))
        return now + step_s <= self._least_cap()

    def prefill_room(
        self, now: float, model: StepTimeModel, context_tokens: float = 0, last_token_s: float = -NEVER
    ) -> int:
        """Returns how many prompt tokens the step that starts now may have so that no decode breaks its ITL
        cap. By ``last_token_s`` the steps in flight will have given every decode another token.

        While decodes wait for a rollout step, more prompts may gather than serving alone gets at once. All of
        them in one step would delay the decodes again. Other prompts are left whole: if a burst were split,
        the first prompts would get their first tokens early, and then wait for the other parts.
        """
        if not self._decodes or not self._crowd or not self._is_prefill_first:
            return self._chunk_tokens
        budget_s = self._least_cap(last_token_s) - now
        room = model.tokens_within(
            budget_s, len(self._decodes), self._chunk_tokens, context_tokens, self._most_computed()
        )
        return max(room, MIN_PREFILL_TOKENS)

    def _least_cap(self, last_token_s: float = -NEVER) -> float:
        """Returns the earliest time at which a decode breaks its ITL cap, if all have a token by
        ``last_token_s``."""
        decodes = self._decodes.values()
        caps_s = {own: self._target_and_cap(own)[1] for own in {times.tpot_s for times in decodes}}
        return min(max(times.last_token_s, last_token_s) + caps_s[times.tpot_s] for times in decodes)

    def check_integrity(self) -> None:
        """Checks that the records agree. Raises: AssertionError."""
        assert not self._pending.keys() & self._decodes.keys()
        assert self._own_tpot_s.keys() <= self._pending.keys()
        assert self._arrivals.keys() <= self._pending.keys() and self._crowd <= self._pending.keys()
        assert all(t.first_token_s <= t.last_token_s for t in self._decodes.values())
        if self._due_s is not None and self._decodes:
            assert self._due_s == min(t.due_s for t in self._decodes.values())
        assert all(p.remaining_tokens >= 0 for p in self._pending.values())

    def _target_and_cap(self, own_tpot_s: float | None = None) -> tuple[float, float]:
        """Returns the TPOT target and the ITL cap of tokens produced now; ``own_tpot_s`` is a request's own
        SLO."""
        target_s = self._settings.tpot_target_for(self._decode_s, own_tpot_s)
        return shrunk_target(target_s, self._load), self._settings.itl_cap_for(target_s, own_tpot_s)

    def _latest_start(self, now: float, model: StepTimeModel, context_tokens: float) -> float:
        if not self._has_deadlines:
            return NEVER
        if self._is_prefill_first and self._pending:
            return now  # prefill first: no slack is given away, so none is computed
        if self._is_literal:
            return literal_latest_start(
                now,
                self._pending.values(),
                (times.as_decode() for times in self._decodes.values() if self._has_tpot),
                slo=self._settings.slo,
                model=model,
                chunk_tokens=self._chunk_tokens,
                context_tokens=context_tokens,
            )
        latest_s = self._latest_tpot(model, context_tokens) if self._has_tpot else NEVER
        if self._has_ttft and self._pending:
            latest_s = min(latest_s, self._latest_ttft(model, context_tokens))
        return latest_s

    def _latest_ttft(self, model: StepTimeModel, context_tokens: float) -> float:
        return latest_start_ttft(
            self._pending.values(),
            num_decodes=self.num_decodes,
            slo=self._settings.slo,
            model=model,
            chunk_tokens=self._chunk_tokens,
            decode_tokens=self._decode_tokens,
            context_tokens=context_tokens,
        )

    def _latest_tpot(self, model: StepTimeModel, context_tokens: float) -> float:
        if not self._decodes:
            return NEVER
        # The next step is mixed: waiting prefill fills what the decodes leave of the budget, which is the
        # most if they have no drafts.
        prefill, pairs = 0, 0.0
        if self._pending:
            room = max(0, self._chunk_tokens - self.num_decodes)
            prefill = min(room, sum(p.remaining_tokens for p in self._pending.values()))
            pairs = attended_pairs(prefill, self._most_computed())
        if self._due_s is None:
            self._due_s = min(times.due_s for times in self._decodes.values())
        return self._due_s - model.predict_safe(prefill, len(self._decodes), context_tokens, pairs)

    def _most_computed(self) -> int:
        """Returns the longest context that a token of the waiting prefills may have before its chunk."""
        return max((p.computed_tokens for p in self._pending.values()), default=0)
