"""A trainer's process that starts from a checkpoint, and is then suspended and resumed.

``warm_job.py CHECKPOINT NUM_PARAMETERS NUM_CYCLES CACHE``. Writes the checkpoint if there is none. Prints one
line of JSON: when it could compute (CLOCK_MONOTONIC), how long each load from host memory took, and the bytes
of the suspended state. Never: trains anything worth keeping.
"""

import json
import sys
import time
from pathlib import Path

import torch

from rose.scheduler.runtime.job.cache import HostCache
from rose.trainers.torch_state import TorchState

WIDTH = 1024


def main() -> None:
    checkpoint, num_parameters, num_cycles = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_parameters // WIDTH**2))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    ready_s = time.monotonic()
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    if not checkpoint.exists():
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    cache = HostCache(Path(sys.argv[4]), sys.maxsize, "the trainer")
    state = TorchState(lambda: [model, optimizer])
    load_s = []
    for _ in range(num_cycles):
        state.offload(cache)
        begin_s = time.monotonic()
        state.load(cache)
        load_s.append(time.monotonic() - begin_s)
    state.offload(cache)
    print(json.dumps({"ready_s": ready_s, "load_s": load_s, "num_bytes": cache.num_bytes}))


if __name__ == "__main__":
    main()
