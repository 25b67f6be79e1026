"""A torch job's state as a phase's working set: TRL, transformers, or any loop of modules and optimizers.

The storages of the tensors leave the device for the host cache and come back bit for bit. Every tensor stays
the object that it is, tied weights and views included, so that optimizers, schedulers and wrappers notice
nothing. On a CPU the memory goes back to the system meanwhile, and load takes new memory. If FSDP or DTensor
shards a tensor, each rank keeps its own shard. Anything but tensors stays in the suspended process.

    @rose.phase("train", working_set=TorchState(lambda: [trainer.model, trainer.optimizer]))
    def train(samples): ...

A storage that is resized to nothing keeps its tensors: FSDP frees its full parameters in the same way.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

from rose.errors import RoseError
from rose.scheduler.runtime.job.cache import HostCache
from rose.trainers import torch_copies
from rose.trainers.torch_copies import storage_bytes

TrainerPart = torch.nn.Module | torch.optim.Optimizer | None


class TorchState:
    """Implements `rose.scheduler.runtime.job.cache.WorkingSet`."""

    def __init__(self, parts: Callable[[], Iterable[TrainerPart]]) -> None:
        """``parts`` is called at each offload, because a trainer makes its optimizer only when it first
        trains. Parts that don't exist yet are None."""
        self._parts = parts
        self._suspended: list[tuple[torch.UntypedStorage, int]] = []
        self._pinned = torch_copies.PinnedMemory()

    def load(self, cache: HostCache) -> None:
        """Brings back what was offloaded, which is nothing before the first phase. Raises: RoseError."""
        kept = cache.arrays()
        missing = [number for number in range(len(self._suspended)) if str(number) not in kept]
        if missing:
            raise RoseError(
                f"{len(missing)} of {len(self._suspended)} offloaded storages are not in the host cache: "
                "it was emptied; start the job again from its checkpoint"
            )
        torch_copies.allocate(self._suspended)
        torch_copies.to_device(
            [(storage, kept[str(number)]) for number, (storage, _) in enumerate(self._suspended)]
        )
        self._suspended = []

    def offload(self, cache: HostCache) -> None:
        """Moves the state to the host cache. Raises: CacheFull, with all state still in place."""
        storages = self.storages()
        wanted = {str(number): ("|u1", (each.nbytes(),)) for number, each in enumerate(storages)}
        with cache.replacing(wanted) as room:
            self._pinned.pin(cache.memory)
            torch_copies.to_host([(each, room[str(number)]) for number, each in enumerate(storages)])
        self._suspended = [(each, each.nbytes()) for each in storages]
        torch_copies.free(storages)

    def storages(self) -> list[torch.UntypedStorage]:
        """Returns what an offload moves now, in its order."""
        sharing: dict[int, list[torch.Tensor]] = {}
        for part in self._parts():
            for tensor in _tensors(part):
                own = _own_part(tensor)
                if own.untyped_storage().nbytes() > 0:
                    sharing.setdefault(own.untyped_storage().data_ptr(), []).append(own)
        return [_resizable(tensors) for tensors in sharing.values()]


def _tensors(part: TrainerPart) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.nn.Module):
        for parameter in part.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from part.buffers()
    elif part is not None:
        for state in part.state.values():
            yield from (each for each in state.values() if isinstance(each, torch.Tensor))


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a DTensor, which has no storage of its own; any other tensor itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():  # the shard itself, not a new tensor that autograd knows
        own: torch.Tensor = tensor.to_local()
    return own


def _resizable(tensors: list[torch.Tensor]) -> torch.UntypedStorage:
    """Returns the tensors' storage, or a copy if torch can't free it (a mapped file, a numpy array).

    The tensors share the copy from then on.
    """
    storage = tensors[0].untyped_storage()
    if storage.resizable():
        return storage
    own = torch.UntypedStorage(storage.nbytes(), device=storage.device)  # type: ignore[no-untyped-call]
    storage_bytes(own).copy_(storage_bytes(storage))
    for tensor in tensors:
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = empty.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
    return own
