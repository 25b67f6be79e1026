"""SkyRL's own source of weights, over a model that FSDP2 has sharded, sends through ROSE's relay."""

from typing import Any

import pytest
import torch

from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.publish.torch_source import load_planes
from rose.transfer.relay.opening import open_relay

sources: Any = pytest.importorskip(
    "skyrl.backends.skyrl_train.weight_sync.sources", reason="SkyRL is not installed (CONTRIBUTING.md)"
)

pytestmark = [pytest.mark.clients, pytest.mark.slow]


def test_each_sync_of_skyrls_is_a_version_with_the_trainers_bits(relay_url: str, model: Any) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from rose.engine.hooks.plugin import register_weight_backends
    from rose.engine.weights.trainer_backend import RelayTrainerInit

    register_weight_backends()
    source = sources.FsdpWeightSource(model, torch.bfloat16)
    init = RelayTrainerInit(relay_url, "skyrl", rank=0)
    engine = WeightTransferTrainerFactory.trainer_init(init, client=None, source=source)
    relay = open_relay(relay_url)
    follower = Follower(relay, "skyrl", WeightMirror())
    for number in range(3):
        engine.send_weights()
        assert follower.advance() and str(follower.mirror.version) == f"skyrl/{number}"
        assert follower.mirror.planes is not None
        expected = {name: each.full_tensor().bfloat16() for name, each in model.state_dict().items()}
        held = {name: torch.zeros_like(each) for name, each in expected.items()}
        load_planes(follower.mirror.planes, held)
        assert all(torch.equal(held[name], each) for name, each in expected.items())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
    engine.shutdown()
    relay.close()
