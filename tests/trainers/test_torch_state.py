"""A real trainer's state goes to the host cache and comes back bit for bit, with training none the wiser."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rose.errors import CacheFull, RoseError
from rose.scheduler.runtime.job.cache import HostCache

torch: Any = pytest.importorskip("torch", reason="needs torch")


def cache_of(folder: Path, limit_bytes: int = 1 << 30) -> HostCache:
    return HostCache(folder / "train", limit_bytes, "train of job a")


def tied_model(dtype: Any) -> Any:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(11, 8)
            self.norm = torch.nn.BatchNorm1d(8)
            self.head = torch.nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Any) -> Any:
            return self.head(self.norm(self.embed(ids)))

    torch.manual_seed(0)
    return Tied().to(dtype)


def step(model: Any, optimizer: Any, seed: int) -> None:
    ids = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(seed))
    torch.nn.functional.cross_entropy(model(ids).float(), ids).backward()
    optimizer.step()


def bits(model: Any, optimizer: Any) -> list[bytes]:
    tensors = [*model.parameters(), *(each.grad for each in model.parameters()), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [each for each in state.values() if isinstance(each, torch.Tensor)]
    return [bytes_of(each) for each in tensors]


def bytes_of(tensor: Any) -> bytes:
    found: bytes = tensor.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", ["AdamW", "SGD"])
def test_state_comes_back_bit_for_bit_and_frees_its_memory_meanwhile(
    tmp_path: Path, dtype: str, make: str
) -> None:
    from rose.trainers.torch_state import TorchState

    options: dict[str, Any] = {"lr": 0.01, **({"momentum": 0.9} if make == "SGD" else {})}
    runs = []
    for is_suspended in (False, True):
        model = tied_model(getattr(torch, dtype))
        optimizer = getattr(torch.optim, make)(model.parameters(), **options)
        state = TorchState(partial(list, [model, optimizer]))
        cache = cache_of(tmp_path)
        for seed in range(4):
            step(model, optimizer, seed)
            if not is_suspended:
                continue
            before, objects = bits(model, optimizer), [id(each) for each in model.parameters()]
            state.offload(cache)
            assert all(each.untyped_storage().nbytes() == 0 for each in model.parameters())
            assert cache.num_bytes > 0
            state.load(cache)
            assert bits(model, optimizer) == before
            assert objects == [id(each) for each in model.parameters()]
            assert model.head.weight is model.embed.weight
        runs.append(bits(model, optimizer))
        cache.forget()
    assert runs[0] == runs[1], "the suspended run took another way"


@pytest.mark.parametrize("width", [256, 1024, 3000])
def test_the_memory_goes_back_to_the_system_while_the_state_is_suspended(tmp_path: Path, width: int) -> None:
    from rose.trainers.torch_state import TorchState

    model = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range((64 << 20) // (4 * width**2))])
    state, cache = TorchState(lambda: [model]), cache_of(tmp_path)
    for _ in range(3):
        before, before_bytes = [bytes_of(each) for each in model.parameters()], own_bytes()
        state.offload(cache)
        assert before_bytes - own_bytes() > 0.9 * cache.num_bytes
        state.load(cache)
        assert [bytes_of(each) for each in model.parameters()] == before


def own_bytes() -> int:
    """Returns this process's memory without files and what it shares."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_memory_is_freed_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    from rose.trainers.torch_state import TorchState

    model = torch.nn.ModuleList([torch.nn.Linear(1024, 1024) for _ in range(16)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    state, cache = TorchState(lambda: [model, optimizer]), cache_of(tmp_path)
    for _ in range(3):
        sum(each.weight.square().mean() for each in model).backward()
        optimizer.step()
        before, free_bytes = (
            [each.detach().cpu() for each in model.parameters()],
            torch.cuda.mem_get_info()[0],
        )
        state.offload(cache)
        assert torch.cuda.mem_get_info()[0] - free_bytes > 0.9 * 4 * 16 * 1024**2
        assert torch.from_numpy(cache.memory).is_pinned()
        state.load(cache)
        assert all(
            torch.equal(*pair) for pair in zip(before, (p.cpu() for p in model.parameters()), strict=True)
        )


def test_weights_on_memory_that_torch_can_not_free_are_moved_once(tmp_path: Path) -> None:
    import numpy as np

    from rose.trainers.torch_state import TorchState

    model = torch.nn.Linear(4, 3)
    kept = np.arange(12, dtype=np.float32).reshape(3, 4)
    model.weight.data = torch.from_numpy(kept)
    state, cache = TorchState(lambda: [model]), cache_of(tmp_path)
    for _ in range(2):
        state.offload(cache)
        assert model.weight.untyped_storage().nbytes() == 0
        state.load(cache)
        assert np.array_equal(model.weight.detach().clone().numpy(), kept)


def test_a_model_larger_than_the_host_cache_stays_on_its_device(tmp_path: Path) -> None:
    from rose.trainers.torch_state import TorchState

    model = tied_model(torch.float32)
    before = [each.detach().clone() for each in model.parameters()]
    state = TorchState(lambda: [model, None])
    with pytest.raises(CacheFull, match="100 allowed"):
        state.offload(cache_of(tmp_path, limit_bytes=100))
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    state.offload(cache_of(tmp_path))
    cache_of(tmp_path).forget()
    with pytest.raises(RoseError, match="not in the host cache"):
        state.load(cache_of(tmp_path))


@pytest.mark.slow
def test_a_transformers_trainer_goes_on_after_each_suspension_as_without(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs the extra `train`")
    from rose.trainers.torch_state import TorchState

    class Suspending(transformers.TrainerCallback):
        """Suspends as rose.phase does between two phases."""

        trainer: Any = None
        num_bytes = 0

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            trainer, cache = self.trainer, cache_of(tmp_path)
            state = TorchState(lambda: [trainer.model, trainer.optimizer.optimizer])
            state.offload(cache)
            self.num_bytes = cache.num_bytes
            state.load(cache)

    def train(callback: Suspending | None) -> list[bytes]:
        transformers.set_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
        )
        model = transformers.LlamaForCausalLM(config)
        rows = [{"input_ids": [each, 1, 2, 3], "labels": [each, 1, 2, 3]} for each in range(8)]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"), max_steps=4, per_device_train_batch_size=2, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=rows, callbacks=[callback] if callback else []
        )
        if callback is not None:
            callback.trainer = trainer
        trainer.train()
        return bits_of_optimizer(trainer)

    suspending = Suspending()
    assert train(suspending) == train(None)
    assert suspending.num_bytes > 0


def bits_of_optimizer(trainer: Any) -> list[bytes]:
    optimizer = trainer.optimizer.optimizer
    moments = [each for state in optimizer.state.values() for each in state.values()]
    assert moments, "AdamW has moments"
    return [bytes_of(each) for each in (*trainer.model.parameters(), *moments)]
