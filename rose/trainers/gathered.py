"""Publishing the weights of a trainer whose ranks all gather every tensor, as verl's and SkyRL's do.

A rank keeps and publishes each n-th tensor, so that the ranks share the work and the host memory of one copy.
Versions count from 0, as those trainers' steps do unless they resume.
"""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from rose.config import Settings
from rose.signature import Signer
from rose.trainers.publishing import ACK_TIMEOUT_S, publish_and_wait
from rose.trainers.router import routers_of
from rose.transfer.publish.announcer import RunAnnouncer
from rose.transfer.publish.published_dtypes import AUTO, PublishedDtypes, require_checkpoint
from rose.transfer.publish.publisher import WeightPublisher

HEAD = "lm_head.weight"


class GatheredWeights:
    """One rank's share of the weights. All ranks of torch's default group make one and call it together.

    ``settings``: ``relay_url``, ``run_id``, ``num_workers``, ``ack_timeout_s`` and what WeightPublisher
    takes; ``place`` is where they stand in the trainer's configuration. ``origin`` is the checkpoint that the
    trainer began with. A run without a name is called ``trainer`` and a random number. ``router_url`` and
    ``router_key``: the trainer's routers, which are told of each version; by default those of the
    environment. Raises: ValueError without ``relay_url``, or for a checkpoint's folder that is not there;
    FrameError or OSError on a checkpoint that is given and can't be read.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        place: str,
        origin: str | None,
        trainer: str,
        router_url: str | None = None,
        router_key: str | None = None,
    ) -> None:
        given = dict(settings)
        if "relay_url" not in given:
            raise ValueError(f"{place}.relay_url: missing; give the relay that the engines follow")
        self.publisher: WeightPublisher | None = None
        """None until the first publish."""
        self._trainer = trainer
        self._num_workers = int(given.pop("num_workers", 0))
        self._ack_timeout_s = float(given.pop("ack_timeout_s", ACK_TIMEOUT_S))
        self._dtype = given.pop("dtype", AUTO)
        # The copies of the first step are kept, so their types are chosen before a publisher is made.
        like = given.get("quantized_like", given.pop("checkpoint", None))
        if like is not None and not (distributed.is_initialized() and distributed.get_rank() > 0):
            require_checkpoint(like)  # the other ranks take what rank 0 has read
        found = PublishedDtypes.find(like, origin) if self._dtype == AUTO else None
        self._dtypes = found if found is not None else PublishedDtypes()
        self._relay = given
        self._router_url, self._router_key = router_url, router_key
        self._kept: dict[str, torch.Tensor] = {}

    def publish(self, weights: Iterable[tuple[str, torch.Tensor]], *, has_tied_head: bool) -> None:
        """Publishes a version. ``weights`` is read to its end on every rank, because each tensor is gathered
        by all of them. A head that is tied to the embeddings is left out. Raises: RelayError, WorkerError,
        ValueError, also if the tensors or their order differ from those of the first version."""
        rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
        run = self._of_one_run() if self.publisher is None else {}
        published = (each for each in weights if not (has_tied_head and each[0] == HEAD))
        named: set[str] = set()
        for index, (name, tensor) in enumerate(published):
            if index % num_ranks == rank:
                named.add(name)
                self._keep(name, tensor)
        if other := named ^ self._kept.keys():
            raise ValueError(
                f"tensor {min(other)}: the trainer gave it to this rank in one of the first and the present "
                "version alone; give the same tensors in the same order each time, or begin a new run"
            )
        if self.publisher is None:
            self.publisher = WeightPublisher(self._kept, dtype=None, rank=rank, num_ranks=num_ranks, **run)
        publish_and_wait(self.publisher, self._num_workers, self._ack_timeout_s)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._kept:
            if self.publisher is not None:
                return  # refused once all were read: the other ranks would wait for this one
            self._kept[name] = torch.empty(tensor.shape, dtype=self._published(name, tensor))
        self._kept[name].copy_(tensor.detach())

    def _published(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        is_cast = tensor.is_floating_point() and not self._dtypes.keeps(name, tensor)
        if not is_cast or self._dtype is None:
            return tensor.dtype
        dtype: torch.dtype = getattr(torch, self._dtypes.most if self._dtype == AUTO else self._dtype)
        return dtype

    def _of_one_run(self) -> dict[str, Any]:
        """Takes rank 0's dtypes, because the other hosts may lack the checkpoint. Returns the publisher's
        settings, with a run id that all ranks have in common."""
        given = self._relay.get("run_id")  # an int, if it was written without quotes
        named = str(given) if given is not None else f"{self._trainer}-{uuid.uuid4().hex[:12]}"
        agreed: list[Any] = [named, self._dtypes]
        distributed.broadcast_object_list(agreed)
        run_id, self._dtypes = agreed
        return {**self._relay, "run_id": run_id, "routers": self._routers()}

    def _routers(self) -> RunAnnouncer | None:
        if self._router_url is None:
            return None
        settings = Settings.from_environment()
        if self._router_key is not None:
            settings = replace(settings, router_api_key=self._router_key)
        signing_key = self._relay.get("signing_key", settings.signing_key)
        signer = Signer(signing_key) if signing_key is not None else None
        return RunAnnouncer(routers_of(self._router_url, settings), settings, signer)
