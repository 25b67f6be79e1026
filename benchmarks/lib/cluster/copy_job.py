"""A trainer's process whose state goes to host memory and back, beside plain copies of as many bytes.

``copy_job.py NUM_PARAMETERS NUM_ROUNDS CACHE``. Prints one line of JSON: the bytes of the state, and the
seconds of the first offload. For each later round it has the seconds of one memmove between buffers whose
pages are there, of offload, of load, and of load's copies alone, done again into the memory that load has
just taken. Uses CUDA device 0 if there is one.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from rose.scheduler.runtime.job.cache import HostCache
from rose.trainers import torch_copies
from rose.trainers.torch_state import TorchState

Bytes = npt.NDArray[np.uint8]
WIDTH = 2048
"""Tensors of 16 MB, as those of a model of 1e9 parameters."""


def main() -> None:
    num_parameters, num_rounds, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_parameters // WIDTH**2))
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, WIDTH, device=device)).sum().backward()
    optimizer.step()
    cache = HostCache(folder, sys.maxsize, "the trainer")
    state = TorchState(lambda: [model, optimizer])
    first_s = _time(lambda: state.offload(cache))
    state.load(cache)
    buffers = (np.ones(cache.num_bytes, np.uint8), np.ones(cache.num_bytes, np.uint8))
    rounds = [_round(state, cache, buffers) for _ in range(num_rounds)]
    print(json.dumps({"num_bytes": cache.num_bytes, "first_s": first_s, "rounds": rounds}))


def _round(state: TorchState, cache: HostCache, buffers: tuple[Bytes, Bytes]) -> dict[str, float]:
    to, source = (each.ctypes.data for each in buffers)
    memmove_s = _time(lambda: ctypes.memmove(to, source, cache.num_bytes))
    offload_s = _time(lambda: state.offload(cache))
    load_s = _time(lambda: state.load(cache))
    kept = cache.arrays()
    copies = [(storage, kept[str(number)]) for number, storage in enumerate(state.storages())]
    copies_s = _time(lambda: torch_copies.to_device(copies))
    return {"memmove_s": memmove_s, "offload_s": offload_s, "load_s": load_s, "copies_s": copies_s}


def _time(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


if __name__ == "__main__":
    main()
