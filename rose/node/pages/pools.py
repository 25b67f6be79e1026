"""The pools of this host as `rose top` shows them, read from their ledgers by an observer.

A daemon that does not answer is shown with the reason. No ledger is changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from rose.admission.board_snapshot import BoardSnapshot, snapshot
from rose.config import Settings
from rose.errors import BoardError, PoolError
from rose.memory.ledger.ledger_words import LedgerWord
from rose.memory.pool.pool import PoolClient
from rose.node.pages.fitted_table import FittedTable
from rose.types import Role

COLUMNS = (
    *("pool", "slabs", "free", "serving", "rollout", "draining", "budget", "pressure"),
    *("cuts", "reclaimed", "leases"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSample:
    """One reading of one pool as the cells of its row, or the reason why there is none."""

    name: str
    cells: tuple[str, ...] = ()
    board: BoardSnapshot | None = None
    """The board at the same moment; grants.py shows it."""
    error: str | None = None


def sample_pools(settings: Settings) -> list[PoolSample]:
    """Reads every pool that has a socket in the runtime directory."""
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
    counts = (
        ledger.count(word, 0)
        for word in (LedgerWord.CUTS, LedgerWord.RECLAIMED_REQUESTS, LedgerWord.EXPIRED_LEASES)
    )
    slabs = (client.num_slabs, ledger.num_free, *held, ledger.num_draining)
    budget = (policy.rollout_budget_slabs, policy.pressure.name.lower())
    return tuple(str(each) for each in (*slabs, *budget, *counts))


def pools_page(samples: Sequence[PoolSample]) -> RenderableType:
    """Returns one row per pool. serving, rollout: slabs that they own. budget: slabs that rollout may own.
    leases: how many have expired."""
    rows = [(sample.name, *sample.cells) for sample in samples if sample.error is None]
    lines = [Text(f"{each.name}: {each.error}", style="red") for each in samples if each.error is not None]
    return Group(*([FittedTable(COLUMNS, rows)] if rows else []), *lines)
