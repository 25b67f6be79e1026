"""The pools of this host as `rose top` shows them, read from their ledgers.

Owns: finding the pools' sockets, and the table. Promises: a daemon that does not answer shows as such.
Never: changes a ledger; it looks as an observer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rose.admission.board import BoardSnapshot, snapshot
from rose.config import Settings
from rose.errors import BoardError, PoolError
from rose.memory.ledger.ledger_words import Word
from rose.memory.pool.pool import PoolClient
from rose.types import Role

COLUMNS = (
    *("pool", "slabs", "free", "serving", "rollout", "draining", "budget", "pressure"),
    *("cuts", "reclaimed", "leases"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSample:
    """One reading of one pool, as the cells of its row, or why there is none."""

    name: str
    cells: tuple[str, ...] = ()
    board: BoardSnapshot | None = None
    """Of the same moment; turns_page.py shows it."""
    error: str | None = None


def sample_pools(settings: Settings) -> list[PoolSample]:
    """A reading of every pool whose socket lies in the runtime directory."""
    sockets = sorted(settings.runtime_dir.glob(settings.pool_socket("*").name))
    return [_sample(socket, settings) for socket in sockets]


def _sample(socket: Path, settings: Settings) -> PoolSample:
    name = socket.stem.removeprefix("pool-")
    try:
        with PoolClient.observe(name, runtime_dir=settings.runtime_dir, timeout_s=0.0) as client:
            return PoolSample(name=name, cells=_cells(client), board=snapshot(client.board_words))
    except (PoolError, BoardError) as error:
        return PoolSample(name=name, error=str(error))


def _cells(client: PoolClient) -> tuple[str, ...]:
    ledger, policy = client.ledger, client.ledger.policy
    held = (ledger.num_held(role) for role in Role)
    counts = (ledger.count(word, 0) for word in (Word.CUTS, Word.RECLAIMED_REQUESTS, Word.EXPIRED_LEASES))
    slabs = (client.num_slabs, ledger.num_free, *held, ledger.num_draining)
    budget = (policy.rollout_budget_slabs, policy.pressure.name.lower())
    return tuple(str(each) for each in (*slabs, *budget, *counts))


def pools_page(samples: Sequence[PoolSample]) -> RenderableType:
    """One row per pool. serving, rollout: slabs owned. budget: what rollout may own. leases: that ran out."""
    # One space between: with two, a terminal of 80 columns would cut the headings off.
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "pool" else "right", no_wrap=True)
    for sample in samples:
        if sample.error is None:
            table.add_row(sample.name, *sample.cells)
    lines = [Text(f"{each.name}: {each.error}", style="red") for each in samples if each.error is not None]
    return Group(table, *lines) if table.row_count else Group(*lines)
