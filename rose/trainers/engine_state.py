"""ROLL's and verl's engines as a phase's working set: they leave the devices and come back by their own
calls.

The engines are on their devices only under the phase's permit. Their tensors stay in the frameworks' own
worker processes, which keep them in host memory. They are not in the job's host cache, and its limit does not
bound them.

    @rose.phase("train", working_set=RollState(pipeline.actor_train))
    @rose.phase("rollout", working_set=RollState(pipeline.actor_infer))

    @rose.phase("train", working_set=VerlTrainState(actor_rollout_wg))
    @rose.phase("rollout", working_set=VerlRolloutState(replicas))

Written against ROLL at commit 8eb27cc (August 2026) and verl 0.9.1; neither is imported.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from rose.scheduler.runtime.job.cache import HostCache


class RollCluster(Protocol):
    """`roll.distributed.executor.cluster.Cluster`: its workers' methods, called on all of them."""

    def load_states(self, *, blocking: bool) -> Any: ...

    def offload_states(self, *, blocking: bool) -> Any: ...


class RollState:
    """One of a ROLL pipeline's clusters.

    Its vLLM engines sleep only where ROLL has them colocated with training (`is_actor_infer_colocated`).
    """

    def __init__(self, cluster: RollCluster) -> None:
        self._cluster = cluster

    def load(self, cache: HostCache) -> None:
        self._cluster.load_states(blocking=True)

    def offload(self, cache: HostCache) -> None:
        self._cluster.offload_states(blocking=True)


class VerlWorkers(Protocol):
    """A verl worker group of `TrainingWorker` or `ActorRolloutRefWorker`."""

    def to(self, device: str, *, model: bool, optimizer: bool, grad: bool) -> Any: ...


class VerlTrainState:
    """verl's training engines, FSDP and Megatron alike."""

    def __init__(self, workers: VerlWorkers) -> None:
        self._workers = workers

    def load(self, cache: HostCache) -> None:
        self._workers.to("device", model=True, optimizer=True, grad=True)

    def offload(self, cache: HostCache) -> None:
        self._workers.to("cpu", model=True, optimizer=True, grad=True)


class VerlReplica(Protocol):
    """`verl.workers.rollout.replica.RolloutReplica`."""

    def wake_up(self) -> Awaitable[Any]: ...

    def sleep(self) -> Awaitable[Any]: ...


class VerlRolloutState:
    """verl's rollout replicas in mode `COLOCATED`; in `STANDALONE` verl itself skips both calls."""

    def __init__(self, replicas: Sequence[VerlReplica]) -> None:
        self._replicas = replicas

    def load(self, cache: HostCache) -> None:
        asyncio.run(_together([each.wake_up() for each in self._replicas]))

    def offload(self, cache: HostCache) -> None:
        asyncio.run(_together([each.sleep() for each in self._replicas]))


async def _together(calls: Sequence[Awaitable[Any]]) -> None:
    await asyncio.gather(*calls)
