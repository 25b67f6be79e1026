"""Who computes on this host's shared GPUs, as `rose top` shows it, from the pools' boards.

Owns: the table of turns. Promises: shares and rates are between two looks, and a side that died shows as
such. Never: writes to a board.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table

from rose.admission.board import BoardSnapshot, SideSnapshot
from rose.admission.gate import GateReason
from rose.admission.slack import NEVER

COLUMNS = ("turns", "serving", "rollout", "slack", "tok/s", "admitted", "refused for", "stalls")
MAX_REASONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """One pool's board now, and at the look before."""

    now: BoardSnapshot
    before: BoardSnapshot | None


def turns_page(boards: Mapping[str, Turns]) -> RenderableType:
    """One row per pool. serving, rollout: share of the time in steps. slack: until serving's next step must
    start. tok/s: of rollouts, prefilled ones included. admitted: share of the steps asked for. refused for:
    the most frequent reasons. stalls: rollouts ended without progress, since the pool began."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("turns", "refused for") else "right")
    for name, turns in boards.items():
        table.add_row(name, *_row(turns.now, turns.before))
    return table if table.row_count else ""


def _row(now: BoardSnapshot, before: BoardSnapshot | None) -> list[str]:
    shares: tuple[float | None, float | None] = (None, None)
    rate, steps, refusals = "-", now.rollout.num_steps, dict(now.declines)
    if before is not None and now.taken_s > before.taken_s:
        shares = now.busy_shares_since(before)
        rate = f"{(now.rollout_tokens - before.rollout_tokens) / (now.taken_s - before.taken_s):.0f}"
        steps -= before.rollout.num_steps
        refusals = {reason: count - before.declines[reason] for reason, count in refusals.items()}
    # A rollout engine without work asks for nothing, and nothing is refused to it.
    refusals.pop(GateReason.NOTHING_TO_RUN)
    asked = steps + sum(refusals.values())
    most = sorted(refusals, key=lambda reason: -refusals[reason])[:MAX_REASONS]
    return [
        _side(now.serving, shares[0]),
        _side(now.rollout, shares[1]),
        _slack(now),
        rate,
        f"{steps / asked:.0%}" if asked else "-",
        ", ".join(f"{one} {refusals[one] / asked:.0%}" for one in most if refusals[one]) if asked else "",
        str(now.num_stalls),
    ]


def _side(side: SideSnapshot, share: float | None) -> str:
    if not side.alive:
        return "dead" if side.pid else "none"
    return "-" if share is None else f"{share:.0%}"


def _slack(now: BoardSnapshot) -> str:
    if now.has_pending_prefill:
        return "prefill"
    slack_s = now.latest_start_s - now.taken_s
    return f"{1e3 * slack_s:.0f} ms" if slack_s < NEVER else "-"
