"""From one run in the relay to the engines of a host: following the run, delivering and acknowledging it.

Owns the workers' acknowledgements in the relay. Fetching, decoding and checking happen outside the engines,
which write what changed. Each worker is served by a thread of its own (delivery.py), so that one that hangs
holds up no other. After any failure a worker keeps its old version, and it is tried again with growing
pauses.
"""

import logging
import math
import threading
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from rose.errors import RelayError, RoseError
from rose.messages import NOTHING_PUBLISHED, WeightUpdate
from rose.transfer.follow.delivery import FIRST_RETRY_S, STATUS_EVERY_S, Delivery, WorkerClient, next_pause
from rose.transfer.follow.follower import Follower
from rose.transfer.format import manifest as keys
from rose.transfer.format.leases import ACK_EVERY_S
from rose.transfer.format.manifest import Ack, pack_body
from rose.transfer.relay.protocol import Relay

logger = logging.getLogger(__name__)


class Store(Protocol):
    """Where the weights lie for the workers."""

    def update_from(self, base: str | None) -> WeightUpdate | None:
        """Returns what brings a worker from version `base` to the newest; None while there is none."""

    def forget(self, in_use: Collection[str]) -> None:
        """Removes what no worker needs. in_use: the versions that workers run or are taking."""


class Subscriber:
    """Follows the relay in the calling thread, and has the workers' threads deliver.

    workers: by the names under which they acknowledge.
    """

    def __init__(
        self, relay: Relay, follower: Follower, store: Store, workers: Sequence[tuple[str, WorkerClient]]
    ) -> None:
        self._relay = relay
        self._follower = follower
        self._store = store
        self._ended = threading.Condition()
        self._deliveries = [Delivery(name, worker, self._ended) for name, worker in workers]
        self._acknowledged: dict[str, tuple[str, float]] = {}
        self._num_acks = 0
        self._retry_at_s = 0.0
        self._retry_s = FIRST_RETRY_S
        self._stepping = threading.Lock()
        self._num_wants, self._num_looked = 0, 0
        """How often a worker has come to want the weights: in all, and at the last look."""
        self.error: RoseError | OSError | None = None
        """Why the last look failed."""

    def step(self, now_s: float) -> None:
        """Looks once. A failure is logged and delays the next look."""
        with self._stepping:
            self._look(now_s)

    def want(self, name: str, is_wanted: bool) -> None:
        """Says whether a worker is to run these weights; delivers what there is at once. Any thread may call
        it, and it does not wait."""
        delivery = self._of(name)
        is_new = is_wanted and not delivery.is_wanted
        delivery.want(is_wanted)
        if is_new:
            with self._ended:
                self._num_wants += 1
                self._ended.notify_all()
        if is_wanted:
            self._deliver_now(time.monotonic())

    def problem(self, name: str) -> str | None:
        """Returns why a worker has not got these weights, as far as something is known to be wrong."""
        if self._is_due or self._follower.is_fetching:
            return None  # what is known is of an earlier try
        if self.error is not None:
            return str(self.error)
        if self._follower.is_empty and self._follower.mirror.version is None:
            return NOTHING_PUBLISHED
        return self._of(name).problem

    def has_delivered(self, name: str) -> bool:
        """Returns whether a worker runs these weights."""
        return self._of(name).delivered is not None

    def taken_at_s(self, name: str) -> float:
        """Returns when a worker last took these weights, whether or not it runs them still."""
        return self._of(name).taken_at_s

    def restarted(self, name: str) -> None:
        """Notes that a worker started again, and holds no weights of this mirror."""
        self._of(name).taken_at_s = -math.inf

    def _of(self, name: str) -> Delivery:
        return next(each for each in self._deliveries if each.name == name)

    @property
    def run_id(self) -> str | None:
        """The run that is followed; None while "auto" has found none."""
        return self._follower.run_id

    @property
    def is_wanted(self) -> bool:
        """Whether any worker is to run these weights."""
        return any(delivery.is_wanted for delivery in self._deliveries)

    def _look(self, now_s: float) -> None:
        num_wants = self._num_wants  # who wants it from here on is for the next look
        was_due = num_wants > self._num_looked
        try:
            is_read = any(delivery.reads_mirror(now_s) for delivery in self._deliveries)
            try:
                if self._is_followed and (was_due or now_s >= self._retry_at_s):
                    self._follower.advance(may_move=not is_read)
                    self._retry_s, self.error = FIRST_RETRY_S, None
            finally:  # what the mirror has is delivered while the relay does not answer, too
                for delivery in self._deliveries:
                    self._deliver(delivery, now_s)
            self._store.forget(set().union(*(each.versions for each in self._deliveries if each.is_wanted)))
            self._acknowledge(now_s)
        except (RoseError, OSError) as error:
            logger.warning("weights not fetched, next try in %.1f s: %s", self._retry_s, error)
            # Its traceback holds frames in the relay's memory.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            self._retry_at_s, self.error = now_s + self._retry_s, error
            self._retry_s = next_pause(self._retry_s)
        self._num_looked = num_wants

    @property
    def _is_due(self) -> bool:
        """Whether a worker has come to want the weights, and the run was not looked at since."""
        return self._num_wants > self._num_looked

    @property
    def _is_followed(self) -> bool:
        """A run that no worker has wanted yet is not fetched."""
        return self.is_wanted or self._follower.mirror.version is not None

    def _deliver_now(self, now_s: float) -> None:
        """Begins the deliveries that are due, unless a look is on its way: the next one, which follows at
        once for a worker that has come to want the weights, does it."""
        if not self._stepping.acquire(blocking=False):
            return
        try:
            for delivery in self._deliveries:
                self._deliver(delivery, now_s)
        finally:
            self._stepping.release()

    def wait(self, now_s: float) -> None:
        """Returns when step() may have something to do."""
        retries = [each.retry_at_s - now_s for each in self._deliveries if each.retry_at_s > now_s]
        with self._ended:
            if self._is_due:
                return
            if any(delivery.is_busy for delivery in self._deliveries) or not self._is_followed:
                self._ended.wait(STATUS_EVERY_S)  # the end of a delivery is acknowledged at once
                return
            if now_s < self._retry_at_s:
                self._ended.wait(self._retry_at_s - now_s)
                return
        try:
            self._follower.wait(min([STATUS_EVERY_S, *retries]))
        except RelayError as error:
            logger.warning("can't wait for weights, next look in %.1f s: %s", FIRST_RETRY_S, error)
            time.sleep(FIRST_RETRY_S)

    def _deliver(self, delivery: Delivery, now_s: float) -> None:
        update = self._store.update_from(delivery.version)
        if update is not None and delivery.is_wanted and not delivery.is_busy:
            delivery.begin(update, now_s)

    def _acknowledge(self, now_s: float) -> None:
        """Says which versions the workers run, and again now and then, or the trainer takes them for gone. A
        worker that is to run another run's weights is taken back, so that no trainer waits for it."""
        for delivery in self._deliveries:
            update = delivery.delivered
            if not delivery.is_wanted:
                if (left := self._acknowledged.get(delivery.name)) is not None:
                    self._relay.remove([keys.ack_prefix(left[0].rpartition("/")[0]) + delivery.name])
                    del self._acknowledged[delivery.name]
                continue
            said, renew_at_s = self._acknowledged.get(delivery.name, (None, 0.0))
            if update is None or (said == update.version and now_s < renew_at_s):
                continue
            self._num_acks += 1
            run_id, _, number = update.version.rpartition("/")
            ack = Ack(
                worker=delivery.name,
                version=int(number),
                state_hash=update.state_hash,
                beat=self._num_acks,
            )
            self._relay.upsert(keys.ack_prefix(run_id) + delivery.name, pack_body(ack))
            self._acknowledged[delivery.name] = (update.version, now_s + ACK_EVERY_S)
