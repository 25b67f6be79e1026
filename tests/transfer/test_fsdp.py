"""The ranks of a trainer whose model FSDP2 has sharded publish their own parts, and all bits arrive."""

import os
import subprocess
import sys
from pathlib import Path

import fsdp_rank
import numpy as np
import torch

from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.relay.opening import open_relay


def test_the_ranks_of_an_fsdp2_model_publish_their_shards(embedded_url: str, tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, fsdp_rank.__file__]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", tmp_path / "rendezvous", embedded_url], env=environment)
        for rank in range(2)
    ]
    try:
        assert [rank.wait() for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    model = fsdp_rank.make_model()
    fsdp_rank.step(model)
    expected = {
        name: tensor.to(torch.bfloat16).view(torch.uint16).numpy()
        for name, tensor in model.state_dict().items()
    }
    relay = open_relay(embedded_url)
    follower = Follower(relay, "run", WeightMirror())
    assert follower.advance() and str(follower.mirror.version) == "run/1"
    assert follower.mirror.planes is not None
    held = {name: np.zeros_like(bits) for name, bits in expected.items()}
    follower.mirror.planes.read_into(held)
    for name, bits in expected.items():
        assert np.array_equal(held[name], bits), name
    relay.close()
