"""A run goes back to an earlier version, which engines get as the next one."""

import pytest
import torch
from relay_process import wait_folded
from training_steps import step

from rose.errors import RelayError
from rose.signature import Signer, make_signing_key
from rose.transfer.adapters.publisher import AdapterPublisher
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format import manifest as keys
from rose.transfer.format.manifest import Ack, pack_body
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay
from rose.transfer.rollback import roll_back


def published(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.bfloat16, copy=True) for name, tensor in weights.items()}


def are_equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(some[name], others[name]) for name in some)


def test_each_version_that_the_relay_has_can_be_gone_back_to_bit_for_bit(
    relay_url: str, relay: Relay
) -> None:
    weights = {"a": torch.randn(200, 100), "b": torch.randn(7), "c": torch.randn(())}
    publisher = WeightPublisher(weights, relay_url, "run", snapshot_every=3, snapshot_share=10.0)
    follower = Follower(relay, "run", WeightMirror())
    # A worker that lags, so that the versions before the last snapshot stay.
    behind = Ack(worker="w", version=0, state_hash="")
    relay.upsert(keys.ack_prefix("run") + "w", pack_body(behind))
    versions, hashes = [], []
    for number in range(6):
        publisher.publish()
        versions.append(published(weights))
        hashes.append(publisher.state_hash)
        if number == 3:
            wait_folded(relay, "run", 3)
        follower.advance()
        step(weights)
    for wanted in (4, 1, 5):
        report = roll_back(publisher, wanted)
        assert are_equal(published(weights), versions[wanted])
        assert publisher.state_hash == hashes[wanted]
        assert follower.advance() and follower.mirror.version == report.version
        assert follower.mirror.version_hash == hashes[wanted]
        follower.mirror.check_integrity()
    assert report.version.number == 8
    step(weights)
    publisher.publish()
    assert follower.advance() and follower.mirror.version_hash == publisher.state_hash
    publisher.close()


def test_a_version_that_the_relay_does_not_have_is_refused_with_those_that_it_has(embedded_url: str) -> None:
    weights = {"a": torch.randn(20, 20)}
    publisher = WeightPublisher(weights, embedded_url, "run")
    with pytest.raises(RelayError, match="no version 0 of run run: the relay has none of it"):
        roll_back(publisher, 0)
    publisher.publish()
    step(weights)
    before = published(weights)
    with pytest.raises(RelayError, match="no version 3 of run run: the relay has 0 to 0"):
        roll_back(publisher, 3)
    assert are_equal(published(weights), before) and publisher.version is not None
    assert publisher.version.number == 0
    publisher.close()


def test_a_signed_run_goes_back_to_what_its_trainer_signed_alone(embedded_url: str) -> None:
    key = make_signing_key()
    weights = {"a": torch.randn(20, 20)}
    publisher = WeightPublisher(weights, embedded_url, "run", signing_key=key, snapshot_share=10.0)
    publisher.publish()
    first = published(weights)
    step(weights)
    publisher.publish()
    relay = open_relay(embedded_url)
    follower = Follower(relay, "run", WeightMirror(), public_key=Signer(key).public_key)
    follower.advance()
    roll_back(publisher, 0)
    assert are_equal(published(weights), first) and follower.advance()
    manifest = next(each for each in relay.keys("rose/run/1-0/") if each.endswith("MANIFEST"))
    relay.upsert(manifest, b"{}")
    with pytest.raises(RelayError):
        roll_back(publisher, 1)
    assert are_equal(published(weights), first)
    relay.close()
    publisher.close()


def test_an_adapter_goes_back_too(embedded_url: str) -> None:
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = {f"{module}.lora_A.weight": torch.randn(2, 6), f"{module}.lora_B.weight": torch.randn(4, 2)}
    config = {"base_model_name_or_path": "base", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    publisher = AdapterPublisher(weights, embedded_url, "math", config=config, dtype=None)
    first = {name: tensor.clone() for name, tensor in weights.items()}
    publisher.publish()
    step(weights)
    publisher.publish()
    assert roll_back(publisher, 0).version.number == 2 and are_equal(weights, first)
    publisher.close()
