"""The ranks of a trainer whose model torch has sharded publish their own parts, and all bits arrive."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import fsdp_ranks
import numpy as np
import pytest
import torch

from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.relay.opening import open_relay

PATIENCE_S = 600.0


@pytest.mark.parametrize(("sharding", "num_ranks"), [("fsdp", 2), ("tp", 2), ("both", 4)])
@pytest.mark.slow
def test_the_ranks_of_a_model_of_fsdp2_and_tensor_parallelism_publish_their_shards(
    sharding: str, num_ranks: int, embedded_url: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    arguments = [str(num_ranks), sharding, str(tmp_path / "rendezvous"), embedded_url]
    command = [sys.executable, fsdp_ranks.__file__, *arguments]
    ranks = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        assert ranks.wait(PATIENCE_S) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    model = fsdp_ranks.make_model(sharding)
    fsdp_ranks.step(model)
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
