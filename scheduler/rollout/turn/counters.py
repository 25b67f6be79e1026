"""What the router counts.

Owns: Counters.
Promises: counts only grow.
Never does: decide anything.
"""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    turns: Counter[str] = field(default_factory=Counter)
    """Single requests by result: finished, cancelled, or the name of the error."""
    reroutes: Counter[str] = field(default_factory=Counter)
    """Attempts that did not finish, by cause."""
    resumed: int = 0
    restarted: int = 0
    tokens_kept: int = 0
    """Tokens that a resume did not have to generate again."""
    tokens_dropped: int = 0
    """Tokens that a restart threw away."""
    late_chunks: int = 0
    handshakes: Counter[str] = field(default_factory=Counter)
    """TLS handshakes of clients by result: finished, failed, late or refused."""

    def as_json(self) -> dict[str, object]:
        return {
            "turns": dict(self.turns),
            "reroutes": dict(self.reroutes),
            "stalls": self.reroutes["stalled"] + self.reroutes["engine_stall"],
            "reclaims": self.reroutes["reclaimed"],
            "resumed": self.resumed,
            "restarted": self.restarted,
            "tokens_kept": self.tokens_kept,
            "tokens_dropped": self.tokens_dropped,
            "late_chunks": self.late_chunks,
        }
