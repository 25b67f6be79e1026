"""The ranks of a trainer that hold parts of matrices with one fp8 scale each; they publish two versions.

python fp8_ranks.py NUM_RANKS RENDEZVOUS_FILE RELAY_URL CHECKPOINT
"""

import sys

import torch
import torch.distributed as dist
from fork_ranks import run_ranks
from fp8_checkpoint import QUANTIZED, model_tensors

from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.publish.torch_source import TensorShard


def weights_at(version: int) -> dict[str, torch.Tensor]:
    """The whole tensors. The largest number of a matrix is in another rank's part at each version."""
    weights = model_tensors(version)
    weights[QUANTIZED[0]][0 if version else -1, 7] = 3.0 + version
    return weights


def run(rank: int, num_ranks: int, rendezvous: str, relay_url: str, checkpoint: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
    own: list[tuple[str, TensorShard]] = []
    for name, whole in weights_at(0).items():
        parts = torch.tensor_split(whole, num_ranks) if name in QUANTIZED[:1] else (whole,)
        if rank < len(parts):
            begin = sum(len(each) for each in parts[:rank])
            start = (begin, *(0 for _ in whole.shape[1:]))
            own.append((name, TensorShard(tensor=parts[rank].clone(), shape=tuple(whole.shape), start=start)))
    publisher = WeightPublisher(
        own, relay_url, "run", rank=rank, num_ranks=num_ranks, quantized_like=checkpoint
    )
    publisher.publish()
    later = weights_at(1)
    for name, shard in own:
        shard.tensor.copy_(later[name][shard.start[0] :][: len(shard.tensor)])
    publisher.publish()
    publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_ranks(run, *sys.argv[1:]))
