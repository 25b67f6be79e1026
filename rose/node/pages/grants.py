"""Who computes on this host's shared GPUs, as `rose top` shows it from the pools' boards.

Shares and rates are those between two readings of a board. Nothing is written to a board.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType

from rose.admission.board_snapshot import BoardSnapshot, SideSnapshot
from rose.admission.gate import GateReason
from rose.admission.slack import NEVER
from rose.node.pages.fitted_table import FittedTable

COLUMNS = ("GPU of pool", "serving", "rollout", "slack", "tok/s", "admitted", "refused for", "stalls")
PARTY_COLUMNS = ("engine or guest", "pid", "time in steps", "steps/s")
MAX_REASONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardReadings:
    """One pool's board now, and at the reading before."""

    now: BoardSnapshot
    before: BoardSnapshot | None


def grants_page(boards: Mapping[str, BoardReadings]) -> RenderableType:
    """Returns one row per pool; below them one per engine and guest, where more than two share a GPU.

    serving, rollout: the share of time spent in steps. slack: time until serving's next step must start.
    tok/s: rollout tokens, prefilled ones included. admitted: share of the steps that rollout asked for.
    refused for: the most frequent reasons. stalls: rollouts ended without progress since the pool began.
    """
    rows = [(name, *_row(board.now, board.before)) for name, board in boards.items()]
    if not rows:
        return ""
    parties = [row for name, board in boards.items() for row in _parties(name, board.now, board.before)]
    table = FittedTable(COLUMNS, rows, left=("refused for",))
    return Group(table, FittedTable(PARTY_COLUMNS, parties)) if parties else table


def _parties(pool: str, now: BoardSnapshot, before: BoardSnapshot | None) -> list[tuple[str, ...]]:
    """Returns a row per process, if more than two have a place on the board."""
    past = before if before is not None and now.taken_s > before.taken_s else None
    rows: list[tuple[str, ...]] = []
    for kind, sides, earlier in (
        ("serving", now.servings, past.servings if past is not None else ()),
        ("guest", now.guests, past.guests if past is not None else ()),
    ):
        for slot, side in enumerate(sides):
            share = rate = None
            if past is not None and slot < len(earlier):
                wall_s = now.taken_s - past.taken_s
                share = (side.busy_s - earlier[slot].busy_s) / wall_s
                rate = (side.num_steps - earlier[slot].num_steps) / wall_s
            if side.pid:
                steps = "-" if rate is None else f"{rate:.0f}"
                rows.append((f"{pool} {kind} {slot}", str(side.pid), _side(side, share), steps))
    return rows if len(rows) > 2 else []


def _row(now: BoardSnapshot, before: BoardSnapshot | None) -> list[str]:
    shares: tuple[float | None, float | None] = (None, None)
    rate, steps, refusals = "-", now.rollout.num_steps, dict(now.declines)
    if before is not None and now.taken_s > before.taken_s:
        shares = now.busy_shares_since(before)
        rate = f"{(now.rollout_tokens - before.rollout_tokens) / (now.taken_s - before.taken_s):.0f}"
        steps -= before.rollout.num_steps
        refusals = {reason: count - before.declines[reason] for reason, count in refusals.items()}
    # A rollout engine without work asks for no step, so none is refused.
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
    if not now.serving.alive:
        return "-"  # what a dead engine published last says nothing
    if now.has_pending_prefill:
        return "prefill"
    slack_s = now.latest_start_s - now.taken_s
    return f"{1e3 * slack_s:.0f} ms" if slack_s < NEVER else "-"
