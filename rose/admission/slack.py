"""How long serving can wait: the paper's slacks, and the latest start times that ROSE uses instead.

The arithmetic of deadlines is pure: functions of times in seconds on one clock.

The printed equations leave out the prefills that are queued ahead of a request, the decodes that share its
steps, and the length of the rollout step itself, which the gate adds. The corrected form is the time when the
next serving step must start. As an absolute time it does not go stale.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rose.admission.step_time import StepTimeModel, attended_pairs
from rose.types import SLO

# Part of the budget at which credit is earned, so that the mean over the answer stays below the budget.
BANK_PACE = 0.95
# The most credit that is spent on one gap between tokens, in budgets.
BANK_LIMIT_BUDGETS = 2.0

NEVER = math.inf
"""The latest start when nothing waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPrefill:
    """A serving request without its first token: queued or partly prefilled."""

    arrival_s: float
    remaining_tokens: int
    computed_tokens: int = 0
    ttft_s: float | None = None
    """Its own TTFT objective; None for the deployment's."""

    @property
    def pairs(self) -> float:
        """The prefill pairs of its remaining tokens."""
        return attended_pairs(self.remaining_tokens, self.computed_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveDecode:
    """A serving request that has produced `num_output_tokens` so far."""

    first_token_s: float
    last_token_s: float
    num_output_tokens: int
    tpot_s: float | None = None
    """Its own TPOT objective; None for the deployment's."""


class TokenTimes:
    """The token times of one decoding request. It is changed in place, because a frozen value per token would
    cost more than the gate."""

    __slots__ = (
        "due_s",
        "first_token_s",
        "is_measured",
        "last_token_s",
        "num_output_tokens",
        "tenant",
        "tpot_s",
        "ttft_s",
        "ttft_waited_s",
        "waited_mark_s",
    )

    def __init__(self, now: float, tpot_s: float | None) -> None:
        self.is_measured = False
        self.tenant = ""
        self.ttft_s = 0.0
        self.ttft_waited_s = 0.0
        self.waited_mark_s = 0.0
        self.first_token_s = now
        self.last_token_s = now
        self.num_output_tokens = 0
        self.tpot_s = tpot_s
        self.due_s = now

    def as_decode(self) -> ActiveDecode:
        return ActiveDecode(
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            num_output_tokens=self.num_output_tokens,
            tpot_s=self.tpot_s,
        )


def ttft_slack(now: float, arrival_s: float, ttft_s: float, prefill_s: float) -> float:
    """Returns (arrival + budget) - now - T_prf, as printed. Source: ROSE §4.1 eq. 1."""
    return (arrival_s + ttft_s) - now - prefill_s


def tpot_slack(now: float, last_token_s: float, tpot_s: float, decode_s: float) -> float:
    """Returns (last token + budget) - now - T_dec(b), as printed. Source: ROSE §4.1 eq. 2."""
    return (last_token_s + tpot_s) - now - decode_s


def literal_latest_start(
    now: float,
    pending: Iterable[PendingPrefill],
    decodes: Iterable[ActiveDecode],
    *,
    slo: SLO,
    model: StepTimeModel,
    chunk_tokens: int,
    context_tokens: float = 0,
) -> float:
    """Returns now plus the least of the printed slacks over all requests. Source: ROSE §4.1 eqs 1, 2.

    It is the minimum of both where prefill and decode share an instance (ROSE §4.3, PD collocation).
    """
    active = list(decodes)
    decode_s = model.predict(0, len(active), context_tokens)
    slacks = []
    for p in pending:
        prefill_s = model.predict_prefill(p.remaining_tokens, chunk_tokens, prefill_pairs=p.pairs)
        slacks.append(ttft_slack(now, p.arrival_s, _own(p.ttft_s, slo.ttft_s), prefill_s))
    slacks += [tpot_slack(now, d.last_token_s, _own(d.tpot_s, slo.tpot_s), decode_s) for d in active]
    return now + min(slacks, default=NEVER)


def latest_start_ttft(
    pending: Iterable[PendingPrefill],
    *,
    num_decodes: int,
    slo: SLO,
    model: StepTimeModel,
    chunk_tokens: int,
    decode_tokens: int = 1,
    context_tokens: float = 0,
) -> float:
    """Returns when the next serving step must start so that every waiting request meets its TTFT.

    `pending` is in queue order. A request's first token needs all prefill ahead of it and its own, in
    steps of `chunk_tokens` (serving's token budget of a step) that the decodes share, each with
    `decode_tokens`.
    Source: ROSE §4.1 eq. 1, with the queue ahead, the shared steps and the profile's error added.
    """
    latest_s = NEVER
    queued_tokens, queued_pairs = 0, 0.0
    prefill_chunk = max(1, chunk_tokens - num_decodes * decode_tokens)
    for p in pending:
        queued_tokens += p.remaining_tokens
        queued_pairs += p.pairs
        work_s = model.predict_prefill(
            queued_tokens, prefill_chunk, num_decodes, context_tokens, queued_pairs
        )
        safe_s = work_s * model.ratio_q99 + model.margin_s
        latest_s = min(latest_s, p.arrival_s + _own(p.ttft_s, slo.ttft_s) - safe_s)
    return latest_s


def token_due(
    first_token_s: float,
    last_token_s: float,
    num_output_tokens: int,
    budget_s: float,
    itl_cap_s: float,
    tokens_per_step: float = 1.0,
) -> float:
    """Returns when a request's next token is due, with the unspent budget of its earlier tokens.

    After n tokens the last one counts as if it came at min(t_first + (n-1) * 0.95 * B, t_last + 2 * B). So a
    request ahead of its pace may spend what it saved, but at most two budgets at once, and a request behind
    its pace must catch up. The mean over the answer stays within B, and ``itl_cap_s`` bounds each single gap.
    If a step gives a decode several tokens (``tokens_per_step``), the limit is two budgets for each of these
    tokens, because gaps lie between steps. The next serving step must end by the least due time of all
    decodes.
    Source: ROSE §4.1 eq. 2, with this bank for t_last and (deadlines.py) the mixed step for T_dec(b).
    The arguments are plain numbers because this runs once per serving token.
    """
    pace_s = first_token_s + (num_output_tokens - 1) * BANK_PACE * budget_s
    limit_s = last_token_s + BANK_LIMIT_BUDGETS * budget_s * tokens_per_step
    due_s = (pace_s if pace_s < limit_s else limit_s) + budget_s
    cap_s = last_token_s + itl_cap_s
    return due_s if due_s < cap_s else cap_s


def shrunk_target(target_s: float, load: float) -> float:
    """Returns the TPOT target under load: the whole target up to a load of 0.5, then falling to 0 at 1.

    ``load`` is the greater of two shares: serving's batch of max_num_seqs, and its KV of what it may hold.
    Spending TPOT slack keeps requests in the batch for longer, and near either limit others then queue.
    """
    return target_s * min(1.0, max(0.0, 2.0 * (1.0 - load)))


def _own(own_s: float | None, deployment_s: float) -> float:
    return own_s if own_s is not None else deployment_s
