"""Jobs of two ranks whose model FSDP shards. Forks the ranks, with the environment that torchrun gives them.

``fsdp_job.py FOLDER NAME...`` runs the jobs of these names one after another. Each notes when its phases ran,
and each rank writes its shards at the end.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # what an optimizer's first step loads, for seconds: here once for all ranks
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rose
from rose.trainers.torch_state import TorchState

NUM_RANKS = 2
NUM_ITERATIONS = 3
WIDTH = 64


def run(folder: Path, name: str, rank: int) -> None:
    """One rank of one job, to its end."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(sum(map(ord, name)))
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
    fully_shard(model, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = TorchState(lambda: [model, optimizer])

    def note(phase: str, iteration: int, begin_s: float) -> None:
        line = {"job": name, "rank": rank, "phase": phase, "iteration": iteration, "begin_s": begin_s}
        with (folder / "phases.jsonl").open("a") as log:
            log.write(json.dumps(line | {"end_s": time.monotonic()}) + "\n")

    @rose.phase("rollout")
    def rollout(iteration: int) -> torch.Tensor:
        begin_s = time.monotonic()
        generator = torch.Generator().manual_seed(100 * iteration + rank)
        samples = torch.randn(8, WIDTH, generator=generator)
        note("rollout", iteration, begin_s)
        return samples

    @rose.phase("train", working_set=state)
    def train(iteration: int, samples: torch.Tensor) -> None:
        begin_s = time.monotonic()
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()
        if iteration + 1 == NUM_ITERATIONS:
            shards = [parameter.to_local().detach().numpy() for parameter in model.parameters()]  # type: ignore[attr-defined]
            np.savez(folder / f"{name}-{rank}.npz", *shards)
        note("train", iteration, begin_s)

    @rose.runtime_hook
    def iteration(progress: rose.Progress) -> None:
        train(progress.iteration, rollout(progress.iteration))

    iteration(NUM_ITERATIONS)
    dist.destroy_process_group()


def launch(folder: Path, name: str) -> int:
    """Forks the ranks, and returns the status of the first that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pids = []
    for rank in range(NUM_RANKS):
        pid = os.fork()
        if pid == 0:
            os.environ.update(shared, RANK=str(rank))
            run(folder, name, rank)
            os._exit(0)
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


if __name__ == "__main__":
    sys.exit(max(launch(Path(sys.argv[1]), name) for name in sys.argv[2:]))
