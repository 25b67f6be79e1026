"""vLLM's weight-transfer backend ``rose`` in a trainer: the relay behind vLLM's own RL API.

    load_general_plugins()  # from vllm.plugins; makes vLLM know the backend
    engine = WeightTransferTrainerFactory.trainer_init(
        RelayTrainerInit("embedded://relay:8400", rank=0), client=client, source=ModuleSource(model)
    )
    engine.send_weights()  # after each optimizer step

Owns the publisher, and a copy on the host of what the source yields, because a source makes each tensor only
for a moment. send_weights() returns when the version is in the relay and the named workers run it. Workers
take new weights by themselves, between two steps (subscriber.py), so the client's calls, which would delay
them, are not made.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource

from rose.transfer.publish.publisher import WeightPublisher

ACK_TIMEOUT_S = 600.0


@dataclass
class RelayTrainerInit(TrainerInitInfo):
    """The backend's settings. relay, run_id, checkpoint: those of WeightPublisher.

    workers: names as manifest.worker_name makes them; send_weights() waits up to ack_timeout_s until they run
    the version.
    """

    backend: ClassVar[str] = "rose"

    relay: str
    run_id: str | None = None
    workers: tuple[str, ...] = ()
    ack_timeout_s: float = ACK_TIMEOUT_S
    checkpoint: str | None = None


class RelayTrainerEngine(TrainerWeightTransferEngine[RelayTrainerInit]):
    """Every rank makes one, because the source may gather; rank 0 publishes.

    A trainer whose ranks are each to publish their share uses WeightPublisher directly.
    """

    init_info_cls = RelayTrainerInit

    def __init__(self, init_info: RelayTrainerInit, client: Any, source: WeightSource) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._init_info = init_info
        self._weights: dict[str, torch.Tensor] = {}
        self._publisher: WeightPublisher | None = None

    @classmethod
    def trainer_init(
        cls, init_info: RelayTrainerInit, *, client: Any, source: WeightSource | None = None
    ) -> Self:
        """Raises: ValueError without a source."""
        if source is None:
            raise ValueError(
                "weight-transfer backend rose needs a source, which it compares with the last version"
            )
        return cls(init_info, client, source)

    def send_weights(self) -> None:
        """Publishes what the source yields now. Raises: RelayError; WorkerError naming the late workers;
        ValueError naming the tensors that are not those of the run's first version.
        """
        self._gather()
        if not self.is_sender:
            return
        info = self._init_info
        if self._publisher is None:
            self._publisher = WeightPublisher(
                self._weights, info.relay, info.run_id, checkpoint=info.checkpoint
            )
        version = self._publisher.publish().version
        if info.workers:
            self._publisher.wait_acked(version, info.workers, info.ack_timeout_s)

    def shutdown(self) -> None:
        """Closes the connection; what was published stays in the relay."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _gather(self) -> None:
        """Copies what the source yields to the host. Refuses tensors only when all were read, because the
        other ranks gather each of them together with this one.
        """
        assert self.source is not None
        if self._publisher is None:
            self._weights = {}
        seen, other = set[str](), set[str]()
        for name, tensor in self.source:
            if not self.is_sender:
                continue
            seen.add(name)
            kept = self._weights.get(name)
            if self._publisher is None:
                self._weights[name] = tensor.detach().to("cpu", copy=True)
            elif kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
                kept.copy_(tensor.detach())
            else:
                other.add(f"{name} is now {tensor.dtype} {tuple(tensor.shape)}")
        other |= {f"{name} is missing" for name in self._weights.keys() - seen}
        if other:
            raise ValueError(
                "the source's tensors differ from those of the run's first version: "
                f"{'; '.join(sorted(other))}: yield the same ones each time, or begin a new run"
            )
