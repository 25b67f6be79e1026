"""ROLL's real worker and FSDP2 strategy, over a model that FSDP2 has sharded, publish to ROSE's relay."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.publish.torch_source import load_planes
from rose.transfer.relay.opening import open_relay

strategies: Any = pytest.importorskip(
    "roll.distributed.strategy.fsdp2_strategy", reason="ROLL is on no package index (CONTRIBUTING.md)"
)

pytestmark = pytest.mark.clients


def make_worker(proxy: dict[str, Any], model: Any = None, **arguments: Any) -> Any:
    """A worker after ROLL's initialize(), without Ray and without the model that ROLL would load."""
    from roll.configs.model_args import ModelArguments
    from roll.configs.worker_config import StrategyArguments, WorkerConfig

    from rose.trainers.roll_weights import RelayActorWorker

    name = arguments.pop("strategy_name", "fsdp2_train")
    worker = RelayActorWorker.__new__(RelayActorWorker)  # its __init__() wants Ray
    worker.cluster_name, worker._logger = "actor_train", None
    worker.worker_config = WorkerConfig(
        model_args=ModelArguments(**arguments),
        strategy_args=StrategyArguments(strategy_name=name, strategy_config={}),
    )
    environments = SimpleNamespace(llm_proxy=SimpleNamespace(proxy_config=proxy))
    worker.pipeline_config = SimpleNamespace(train_env_manager=environments, model_update_buffer_size_mb=1)
    worker.strategy = strategies.FSDP2TrainStrategy(worker)
    worker.strategy.model = model
    return worker


def test_each_model_update_of_rolls_is_a_version_with_the_trainers_bits(relay_url: str, model: Any) -> None:
    proxy = {"weights": {"relay_url": relay_url, "run_id": "roll"}}
    worker = make_worker(proxy, model, model_name_or_path=model.config._name_or_path)
    worker.setup_model_update(infer_cluster=None, model_update_name="train_2_infer")
    relay = open_relay(relay_url)
    follower = Follower(relay, "roll", WeightMirror())
    for number in range(3):
        # start_model_update() calls this once it has the weights on a GPU, which a CPU can't do.
        assert worker.strategy.model_update(model_update_name="train_2_infer") == {}
        assert follower.advance() and str(follower.mirror.version) == f"roll/{number}"
        assert follower.mirror.planes is not None
        published = {spec.name for spec in follower.mirror.planes.layout.tensors}
        whole = {name: each.full_tensor().bfloat16() for name, each in model.named_parameters()}
        assert published == whole.keys()
        held = {name: torch.zeros_like(each) for name, each in whole.items()}
        load_planes(follower.mirror.planes, held)
        assert all(torch.equal(held[name], each) for name, each in whole.items())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
    worker.strategy.weight_updaters["train_2_infer"].weights.publisher.close()
    relay.close()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"strategy_name": "megatron_train"}, "strategy_name=megatron_train: must be fsdp2_train"),
        ({"lora_target": "all-linear"}, r"lora_target=\['all-linear'\]: must be unset; whole weights"),
        ({}, r"llm_proxy\.proxy_config\.weights\.relay_url: missing"),
    ],
)
def test_what_can_not_be_published_is_refused_with_the_setting(given: dict[str, Any], told: str) -> None:
    worker = make_worker({}, **given)
    with pytest.raises(ValueError, match=told):
        worker.setup_model_update(infer_cluster=None, model_update_name="train_2_infer")
