"""A trainer that uses vLLM's own RL API with the backend `rose` sends its weights through the relay."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from relay_process import RelayProcess

from rose.errors import WorkerError
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format import manifest as keys
from rose.transfer.format.manifest import Ack, pack_body
from rose.transfer.relay.opening import open_relay
from rose.types import WeightVersion

pytest.importorskip("vllm")


@pytest.fixture
def relay_url() -> Iterator[str]:
    process = RelayProcess("embedded")
    yield process.url
    process.stop()


def test_what_vllms_trainer_api_sends_arrives_bit_for_bit(relay_url: str) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from rose.engine.hooks.plugin import register_weight_backends
    from rose.engine.weights.trainer_backend import RelayTrainerInit

    register_weight_backends()
    register_weight_backends()  # vLLM calls it again at each load_general_plugins()
    model = torch.nn.Linear(30, 20)
    init = RelayTrainerInit(relay_url, "run", rank=0)
    engine = WeightTransferTrainerFactory.trainer_init(init, client=None, source=ModuleSource(model))
    relay = open_relay(relay_url)
    follower = Follower(relay, "run", WeightMirror())
    for number in range(3):
        engine.send_weights()
        assert follower.advance() and follower.mirror.version == WeightVersion(run_id="run", number=number)
        assert follower.mirror.planes is not None
        expected = {
            name: tensor.to(torch.bfloat16).view(torch.uint16).numpy()
            for name, tensor in model.state_dict().items()
        }
        held = {name: np.zeros_like(bits) for name, bits in expected.items()}
        follower.mirror.planes.read_into(held)
        assert all(np.array_equal(held[name], expected[name]) for name in expected)
        with torch.no_grad():
            model.weight.mul_(1.5)
    with pytest.raises(ValueError, match="needs a source"):
        WeightTransferTrainerFactory.trainer_init(init, client=None)
    engine.shutdown()
    relay.close()


def test_sending_waits_until_the_named_workers_run_the_version(relay_url: str) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource

    from rose.engine.weights.trainer_backend import RelayTrainerEngine, RelayTrainerInit

    init = RelayTrainerInit(relay_url, "run", ("w",), 0.1, rank=0)
    engine = RelayTrainerEngine.trainer_init(init, client=None, source=ModuleSource(torch.nn.Linear(3, 2)))
    with pytest.raises(WorkerError, match=r"no acknowledgement of run/0 within 0\.1 s from w"):
        engine.send_weights()
    relay = open_relay(relay_url)
    relay.upsert(keys.ack_prefix("run") + "w", pack_body(Ack(worker="w", version=1, state_hash="")))
    engine.send_weights()
    engine.shutdown()
    relay.close()


def test_tensors_that_the_first_version_does_not_have_are_refused_by_name(relay_url: str) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource

    from rose.engine.weights.trainer_backend import RelayTrainerEngine, RelayTrainerInit

    model = torch.nn.Module()
    model.register_parameter("a", torch.nn.Parameter(torch.zeros(4)))
    model.register_parameter("b", torch.nn.Parameter(torch.zeros(4)))
    init = RelayTrainerInit(relay_url, "run", rank=0)
    engine = RelayTrainerEngine.trainer_init(init, client=None, source=ModuleSource(model))
    engine.send_weights()
    a, b = model.a, model.b
    model.c = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"c is now torch\.float32 \(2,\): yield the same ones"):
        engine.send_weights()
    del model.c, model.b
    with pytest.raises(ValueError, match="first version: b is missing: "):
        engine.send_weights()
    model.b, model.a = b, torch.nn.Parameter(torch.zeros(1))  # this one would be spread over four elements
    with pytest.raises(ValueError, match=r"a is now torch\.float32 \(1,\)"):
        engine.send_weights()
    model.a = a
    engine.send_weights()
    relay = open_relay(relay_url)
    follower = Follower(relay, "run", WeightMirror())
    assert follower.advance() and follower.mirror.version == WeightVersion(run_id="run", number=1)
    engine.shutdown()
    relay.close()


def test_a_first_version_that_could_not_be_read_settles_no_tensors(relay_url: str) -> None:
    from rose.engine.weights.trainer_backend import RelayTrainerEngine, RelayTrainerInit

    class Source:
        is_whole = False

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "a", torch.zeros(4)
            if not self.is_whole:
                raise RuntimeError("gathering failed")
            yield "b", torch.zeros(4)

    source: Any = Source()
    init = RelayTrainerInit(relay_url, "run", rank=0)
    engine = RelayTrainerEngine.trainer_init(init, client=None, source=source)
    with pytest.raises(RuntimeError, match="gathering failed"):
        engine.send_weights()
    source.is_whole = True
    engine.send_weights()
    relay = open_relay(relay_url)
    follower = Follower(relay, "run", WeightMirror())
    assert follower.advance() and follower.mirror.planes is not None
    assert {spec.name for spec in follower.mirror.planes.layout.tensors} == {"a", "b"}
    engine.shutdown()
    relay.close()


def test_ranks_other_than_0_gather_but_publish_nothing(relay_url: str) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource

    from rose.engine.weights.trainer_backend import RelayTrainerEngine, RelayTrainerInit

    init = RelayTrainerInit(relay_url, rank=1)
    engine = RelayTrainerEngine.trainer_init(init, client=None, source=ModuleSource(torch.nn.Linear(3, 2)))
    engine.send_weights()
    engine.shutdown()
    relay = open_relay(relay_url)
    assert relay.keys("") == []
    relay.close()
