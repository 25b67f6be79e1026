"""The cluster scheduler behind a channel that keeps rows and delivers at once, on a simulated clock.

Owns: the rows, and restarts from them. Promises: every call and answer passes through its encoding.
"""

from collections.abc import Mapping
from typing import Any

from rose.scheduler.runtime.channel.messages import (
    AnyCall,
    SchedulerMessage,
    decode_call,
    decode_scheduler_message,
    encode,
)
from rose.scheduler.runtime.decide.cluster_scheduler import ClusterScheduler
from rose.scheduler.runtime.job.spec import ServeSpec

Delivered = list[tuple[str, SchedulerMessage]]
"""Messages of the scheduler, each with its client."""


class RowScheduler:
    """One scheduler after another over the same rows."""

    def __init__(self, cluster: Mapping[str, Any]) -> None:
        self._spec = ServeSpec.model_validate(cluster)
        self._rows: dict[str, bytes] = {}
        self._seq = 0
        self.control = ClusterScheduler(self._spec, {}, 0.0, 1, "clock")

    def call(self, client: str, kind: type[AnyCall], now: float, **fields: Any) -> Delivered:
        """Makes one call. Returns what the scheduler sends to anyone."""
        self._seq += 1
        call = kind(seq=self._seq, **fields)
        self.control.handle(client, decode_call(encode(call)), now)
        return self._commit()

    def tick(self, now: float) -> Delivered:
        """Time has passed."""
        self.control.tick(now)
        return self._commit()

    def restart(self, now: float) -> None:
        """The scheduler is killed, and the next one reads what was committed."""
        self.control = ClusterScheduler(self._spec, self._rows, now, 1, "clock")

    def _commit(self) -> Delivered:
        batch = self.control.take_batch()
        for key, row in batch.rows.items():
            if row is None:
                self._rows.pop(key, None)
            else:
                self._rows[key] = row
        return [(each.client, decode_scheduler_message(each.body)) for each in batch.outgoing]
