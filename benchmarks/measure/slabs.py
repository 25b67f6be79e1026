"""Watches who holds a pool's slabs while engines are under load.

Owns a sampling thread over the pool's ledger, read-only. Promises not to disturb: it maps the same page the
engines write and takes no part in the protocol.
"""

import json
import threading
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from rose.memory.ledger.ledger import Ledger
from rose.memory.ledger.ledger_words import LedgerWord
from rose.memory.ledger.policy_word import Pressure
from rose.types import Role

PERIOD_S = 0.1


class SlabEventKind(StrEnum):
    """What can happen to the rollout model's slabs."""

    CUT = "cut"
    FREEZE = "freeze"
    LEASE_EXPIRED = "lease_expired"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabSample:
    """Who held the pool's slabs at one moment."""

    t_s: float
    serving: int
    rollout: int
    free: int
    budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabEvent:
    """Something that took slabs (or turns) from the rollout model at one moment."""

    t_s: float
    kind: SlabEventKind
    count: int


_COUNTERS = (
    (LedgerWord.CUTS, SlabEventKind.CUT),
    (LedgerWord.EXPIRED_LEASES, SlabEventKind.LEASE_EXPIRED),
    (LedgerWord.RECLAIMED_REQUESTS, SlabEventKind.ABORT),
)


class SlabWatch:
    """A context manager: adds to ``samples`` and ``events`` from ``__enter__`` to ``__exit__``."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.samples: list[SlabSample] = []
        self.events: list[SlabEvent] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slab-watch", daemon=True)

    def __enter__(self) -> "SlabWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def write(self, path: Path) -> None:
        """Writes samples and events in their order, one JSON object a line."""
        rows: list[SlabSample | SlabEvent] = [*self.samples, *self.events]
        rows.sort(key=lambda row: row.t_s)
        path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))

    def _run(self) -> None:
        ledger = self._ledger
        counts = {word: ledger.count(word, 0) for word, _ in _COUNTERS}
        was_frozen = False
        while not self._closing.wait(PERIOD_S):
            now = time.monotonic()
            self.samples.append(
                SlabSample(
                    t_s=now,
                    serving=ledger.num_held(Role.SERVING),
                    rollout=ledger.num_held(Role.ROLLOUT),
                    free=ledger.num_free,
                    budget=ledger.policy.rollout_budget_slabs,
                )
            )
            for word, kind in _COUNTERS:
                count = ledger.count(word, 0)
                if count > counts[word]:
                    self.events.append(SlabEvent(t_s=now, kind=kind, count=count - counts[word]))
                counts[word] = count
            is_frozen = ledger.policy.pressure is Pressure.FROZEN
            if is_frozen and not was_frozen:
                self.events.append(SlabEvent(t_s=now, kind=SlabEventKind.FREEZE, count=1))
            was_frozen = is_frozen
