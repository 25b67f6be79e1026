"""Model sync of a whole job: all trainer ranks to all rollout ranks, with one copy over the slow link.

Owns: both ends of a sync, and which relay each rank talks to. A relay stands on each rollout node. Scatter:
every trainer rank sends its exclusive share, over connections of its own, to its peer among the relays.
Broadcast: the relays hand each bucket on to each other, and every rollout rank reads from the one on its own
node, while the trainer is still sending.
Promises: a sync that returns has brought every receiver all bits, checked against the sender's hash. One that
raises either names the receivers that are missing, and the others have the version, or none has and all keep
the old one; send() goes on from there. Never asks for a permit: rose.phase("sync")
needs none.
Source: WEAVE §5.2. Where we differ: what arrives lies in the node's host memory, once and not once per rank;
and only what has changed is sent, unless all has.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rose.config import Settings
from rose.errors import RelayError
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format import manifest as keys
from rose.transfer.format.manifest import Ack, pack_body
from rose.transfer.format.shard_plan import ShardPlan
from rose.transfer.publish.publisher import SyncReport, WeightPublisher
from rose.transfer.publish.torch_source import load_planes
from rose.transfer.relay.opening import open_relay
from rose.types import WeightVersion

BUCKET_BYTES = 8 << 20
"""What is under way when the link falls silent still has to be broadcast: smaller pieces than elsewhere."""
TIMEOUT_S = 600.0


def receiver_name(rank: int) -> str:
    """By which a rollout rank acknowledges."""
    return f"rollout-{rank}"


def peer_first(relays: Sequence[str], rank: int, num_ranks: int) -> str:
    """The relays' URLs for this rank, on either side: its peer first, then the others, should that one die.

    relays: one per rollout node, in the order of the nodes' rollout ranks. Raises: ValueError.
    """
    if not relays or not 0 <= rank < num_ranks:
        raise ValueError(
            f"need relays and 0 <= rank < num_ranks, got {len(relays)} relays, rank {rank} of {num_ranks}"
        )
    peer = rank * len(relays) // num_ranks
    return ",".join((*relays[peer:], *relays[:peer]))


class ModelSender:
    """One trainer rank; all of them are made alike, and call send() as often as each other.

    weights: what this rank holds, as for WeightPublisher: a module whose tensors every rank holds, or its
    TensorShards. receivers: the names of all rollout ranks, receiver_name() of each, or of the engines that
    subscribers feed. options: further ones of WeightPublisher. A run id is used once: a job that was started
    again takes another, e.g. with its attempt in it.
    Raises: as WeightPublisher, ValueError.
    """

    def __init__(
        self,
        weights: Any,
        relays: Sequence[str],
        run_id: str,
        *,
        rank: int,
        num_ranks: int,
        receivers: Sequence[str],
        bucket_bytes: int = BUCKET_BYTES,
        **options: Any,
    ) -> None:
        self._receivers = [keys.check_name(name, "receiver") for name in receivers] if rank == 0 else []
        urls = peer_first(relays, rank, num_ranks)
        self._publisher = WeightPublisher(
            weights, urls, run_id, rank=rank, num_ranks=num_ranks, bucket_bytes=bucket_bytes, **options
        )

    def send(self, timeout_s: float = TIMEOUT_S) -> SyncReport:
        """Sends the weights as they are now. Rank 0 returns when every receiver has them, others before.

        Raises: RelayError: not committed, all receivers keep their version. WorkerError: names the receivers
        that did not acknowledge in time; the others have it.
        """
        report = self._publisher.publish()
        self._publisher.wait_acked(report.version, self._receivers, timeout_s)
        return report

    def close(self) -> None:
        """What was sent stays in the relays (rose.transfer.relay.protocol.remove_run)."""
        self._publisher.close()


class ModelReceiver:
    """One rollout rank; holds a version's bits in host memory.

    plans: of the shards that this rank holds (rose.engine.weights.shard_recorder); none: it gets all weights.
    Raises: RelayError when no relay answers, ValueError.
    """

    def __init__(
        self,
        relays: Sequence[str],
        run_id: str,
        *,
        rank: int,
        num_ranks: int,
        plans: Sequence[ShardPlan] = (),
        key: str | None = None,
    ) -> None:
        urls = peer_first(relays, rank, num_ranks)
        self._run_id = run_id
        self._name = receiver_name(rank)
        self._relay = open_relay(urls, key if key is not None else Settings.from_environment().key)
        self._follower = Follower(self._relay, run_id, WeightMirror(plans))

    @property
    def mirror(self) -> WeightMirror:
        """The bits, and whose they are."""
        return self._follower.mirror

    def receive(self, number: int, timeout_s: float = TIMEOUT_S) -> WeightVersion:
        """Returns when this rank holds the run's version `number`, the sender's send() of that number from 0.

        Or a newer one, which it returns. Raises: RelayError when it does not come in time, FrameError; then
        the old version stays, and calling again goes on.
        """
        deadline_s = time.monotonic() + timeout_s
        while self.mirror.version is None or self.mirror.version.number < number:
            if self._follower.advance():
                continue
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise RelayError(
                    f"{self._name}: no version {number} of run {self._run_id} within {timeout_s} s, "
                    f"holds {self.mirror.version}"
                )
            self._follower.wait(left_s)
        version = self.mirror.version
        ack = Ack(worker=self._name, version=version.number, state_hash=str(self.mirror.state_hash))
        self._relay.upsert(keys.ack_prefix(self._run_id) + self._name, pack_body(ack))
        return version

    def load_into(self, tensors: Mapping[str, Any]) -> None:
        """Copies the received bits into torch tensors, on any device, by their published names.

        Raises: ValueError: nothing was received, or a tensor is missing or has another shape or dtype.
        """
        if self.mirror.planes is None:
            raise ValueError(f"{self._name} has not received any weights")
        self.mirror.take_back_ahead()
        load_planes(self.mirror.planes, tensors)

    def close(self) -> None:
        self._relay.close()
