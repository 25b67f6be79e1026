"""Model sync of a whole job: from all trainer ranks to all rollout ranks, with one copy over the slow link.

Owns both ends of a sync, and which relay each rank talks to. Each rollout node has a relay. Scatter: every
trainer rank sends its exclusive share to its peer among the relays. Broadcast: the relays hand each bucket on
while the trainer is still sending, and every rollout rank reads from its own node's relay. When a sync
returns, every receiver has all bits, checked against the sender's hash. If a sync raises, either the
receivers that the error does not name have the version, or no receiver has it and all keep the old one. The
next send() continues from there. Never asks for a permit, because rose.phase("sync") needs none. Source:
WEAVE §5.2. Where we differ: every rank receives into host memory, not into its device's, and only what
changed is sent.
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
from rose.transfer.publish.publisher import SyncReport, WeightPublisher
from rose.transfer.publish.torch_source import load_planes
from rose.transfer.relay.opening import open_relay
from rose.types import WeightVersion

BUCKET_BYTES = 8 << 20
"""Smaller than elsewhere: the last bucket on the link still has to be broadcast after it has arrived."""
TIMEOUT_S = 600.0


def receiver_name(rank: int) -> str:
    """Returns the name under which a rollout rank acknowledges."""
    return f"rollout-{rank}"


def peer_first(relays: Sequence[str], rank: int, num_ranks: int) -> str:
    """Returns the relays' URLs for this rank, on either side: first its peer, then the others in case it
    dies.

    relays: one per rollout node, in the order of the nodes' rollout ranks. Raises: ValueError.
    """
    if not relays or not 0 <= rank < num_ranks:
        raise ValueError(
            f"at least one relay is needed, and rank must be at least 0 and below num_ranks; "
            f"got {len(relays)} relays, rank {rank} of {num_ranks}"
        )
    peer = rank * len(relays) // num_ranks
    return ",".join((*relays[peer:], *relays[:peer]))


class ModelSender:
    """One trainer rank. All ranks make one with the same arguments, and call send() equally often.

    weights: this rank's, as for WeightPublisher: a module of which every rank holds all tensors, or the
    rank's TensorShards. receivers: the names of all rollout ranks, each by receiver_name(), or of the engines
    that subscribers feed. options: further options of WeightPublisher. A run id is used once: a job that was
    started again takes another one, for example with its attempt in it. Raises: what WeightPublisher raises.
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
        """Sends the present weights. Rank 0 returns when every receiver has them, the other ranks earlier.

        Raises: RelayError when the version was not committed and all receivers keep theirs; WorkerError
        naming the receivers that did not acknowledge in time, while the others have the version.
        """
        report = self._publisher.publish()
        self._publisher.wait_acked(report.version, self._receivers, timeout_s)
        return report

    def close(self) -> None:
        """Closes the connections. What was sent stays in the relays
        (rose.transfer.relay.protocol.remove_run).
        """
        self._publisher.close()


class ModelReceiver:
    """One rollout rank; holds a version's bits in host memory.

    Raises: RelayError when no relay answers; ValueError.
    """

    def __init__(
        self,
        relays: Sequence[str],
        run_id: str,
        *,
        rank: int,
        num_ranks: int,
        key: str | None = None,
    ) -> None:
        urls = peer_first(relays, rank, num_ranks)
        self._run_id = run_id
        self._name = receiver_name(rank)
        settings = Settings.from_environment()
        self._relay = open_relay(urls, key if key is not None else settings.follower_key)
        self._follower = Follower(self._relay, run_id, WeightMirror(), public_key=settings.public_key)

    @property
    def mirror(self) -> WeightMirror:
        """The received bits, and their version."""
        return self._follower.mirror

    def receive(self, number: int, timeout_s: float = TIMEOUT_S) -> WeightVersion:
        """Returns once this rank holds version `number` of the run, which is the sender's send() of that
        number from 0.

        Returns a newer version if it holds one. Raises: RelayError when it does not come in time, FrameError;
        the old version stays then, and calling again continues.
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

        Raises: ValueError when nothing was received, or a tensor is missing or has another shape or dtype.
        """
        if self.mirror.planes is None:
            raise ValueError(f"{self._name} has not received any weights")
        self.mirror.take_back_ahead()
        load_planes(self.mirror.planes, tensors)

    def close(self) -> None:
        self._relay.close()
