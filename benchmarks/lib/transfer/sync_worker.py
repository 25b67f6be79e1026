"""One process of bench_sync.py and bench_modelsync.py: a trainer rank, or a rank that holds what it sends.

Owns: a model's tensors in memory, or a mirror. Takes requests as JSON lines and answers each with one; times
are CLOCK_MONOTONIC, which all processes of the machine share. Receivers end where an engine would start to
load: the version is in the mirror, every hash checked. Never reports what it did not do: a failure ends it.

    python benchmarks/lib/transfer/sync_worker.py trainer|follower
"""

import json
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from rose.config import Settings
from rose.transfer.format.layout import TensorSpec
from rose.transfer.model_sync import ModelReceiver, ModelSender
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import remove_run

HIDDEN, WIDTH, KV = 2048, 6144, 1024
LEARNING_RATE = 6.3e-7
"""Changes about 1% of the elements per step (bench_codec.py)."""
_STREAM_CHUNK = bytes(1 << 20)


def model_specs(num_layers: int) -> list[TensorSpec]:
    """Projections of a dense transformer, 100 MB of bf16 per layer."""
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(num_layers):
        for name, rows, columns in (
            ("q", HIDDEN, HIDDEN),
            ("k", KV, HIDDEN),
            ("v", KV, HIDDEN),
            ("o", HIDDEN, HIDDEN),
            ("gate", WIDTH, HIDDEN),
            ("up", WIDTH, HIDDEN),
            ("down", HIDDEN, WIDTH),
        ):
            shapes[f"model.layers.{layer}.{name}.weight"] = (rows, columns)
    return [TensorSpec(name=name, dtype="BF16", shape=shape) for name, shape in shapes.items()]


class Trainer:
    """One trainer rank: its rows of every tensor in bf16, rounded from an fp32 master copy."""

    def __init__(self) -> None:
        import torch

        from rose.transfer.publish.torch_source import TensorShard

        torch.set_num_threads(1)
        self._torch = torch
        self._shard = TensorShard
        self._generator = torch.Generator()

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Makes the model and the run, and publishes version 0."""
        from rose.transfer.format.codec import Codec

        rank, num_ranks, num_layers = request["rank"], request["num_ranks"], request["num_layers"]
        self._generator.manual_seed(request["seed"])
        self._make_model(num_layers, rank, num_ranks)
        self._run_id, self._relays = request["run"], request["relays"]
        self._sender = ModelSender(
            self._shards,
            self._relays,
            self._run_id,
            rank=rank,
            num_ranks=num_ranks,
            receivers=request["receivers"],
            bucket_bytes=request["bucket_bytes"],
            codec=Codec[request["codec"]] if request["codec"] is not None else None,
            link_gbps=request["gbps"],
        )
        return self._publish()

    def _make_model(self, num_layers: int, rank: int, num_ranks: int) -> None:
        torch = self._torch
        tile = torch.empty(WIDTH * HIDDEN).normal_(0, 0.02, generator=self._generator)
        # An Adam step: the ratio of noisy moments is spread over (-1, 1).
        self._ratios = (
            torch.empty(2 * WIDTH * HIDDEN).normal_(0, 0.4, generator=self._generator).clamp_(-1, 1)
        )
        self._masters: list[Any] = []
        self._shards: list[Any] = []
        self._copies: list[Any] = []
        for number, spec in enumerate(model_specs(num_layers)):
            rows = spec.shape[0] // num_ranks
            size = rows * spec.shape[1]
            master = tile.roll(1009 * (number + 1))[:size].clone()
            tensor = master.to(torch.bfloat16).view(rows, spec.shape[1])
            self._masters.append(master)
            shard = self._shard(tensor=tensor, shape=spec.shape, start=(rank * rows, 0))
            self._shards.append((spec.name, shard))

    def step(self, request: dict[str, Any]) -> dict[str, Any]:
        """One optimizer step."""
        for master, (_, shard) in zip(self._masters, self._shards, strict=True):
            start = int(self._torch.randint(WIDTH * HIDDEN, (), generator=self._generator))
            master.add_(self._ratios[start : start + master.numel()], alpha=LEARNING_RATE)
            shard.tensor.copy_(master.view(shard.tensor.shape))
        return {}

    def publish(self, request: dict[str, Any]) -> dict[str, Any]:
        """Publishes what step() made."""
        return self._publish()

    def _publish(self) -> dict[str, Any]:
        started_s = time.monotonic()
        report = self._sender.send()
        return {
            "started_s": started_s,
            "ended_s": time.monotonic(),
            "state_hash": report.state_hash,
            "wire_bytes": report.wire_bytes,
            "num_changed": report.num_changed,
            "encode_s": report.encode_s,
        }

    def copy(self, request: dict[str, Any]) -> dict[str, Any]:
        """Copies this rank's weights with memcpy; the first time, makes room for them."""
        sources = [shard.tensor for _, shard in self._shards]
        if not self._copies:
            self._copies = [source.clone() for source in sources]
        started_s = time.monotonic()
        for copy, source in zip(self._copies, sources, strict=True):
            copy.copy_(source)
        return {"started_s": started_s, "ended_s": time.monotonic()}

    def close(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ends the run and takes it out of the relay."""
        self._sender.close()
        relay = open_relay(",".join(self._relays), Settings.from_environment().key)
        remove_run(relay, self._run_id)
        relay.close()
        del self._sender, self._masters, self._shards, self._ratios, self._copies
        return {}

    def stream(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends plain bytes over TCP and waits for the other end's word that it has them."""
        with socket.create_connection((request["host"], request["port"])) as connection:
            started_s = time.monotonic()
            for at in range(0, request["num_bytes"], len(_STREAM_CHUNK)):
                connection.sendall(_STREAM_CHUNK[: request["num_bytes"] - at])
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
            return {"taken_s": time.monotonic() - started_s}


class Serving:
    """The receiver of one serving rank."""

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Joins the run at version 0."""
        self._receiver = ModelReceiver(
            request["relays"], request["run"], rank=request["rank"], num_ranks=request["num_ranks"]
        )
        return self.reach({"version": 0})

    def reach(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns when this rank holds the version."""
        self._receiver.receive(request["version"])
        return {"held_s": time.monotonic(), "state_hash": str(self._receiver.mirror.state_hash)}

    def close(self, request: dict[str, Any]) -> dict[str, Any]:
        """All bits that were received are hashed anew."""
        self._receiver.mirror.check_integrity()
        self._receiver.close()
        del self._receiver
        return {}

    def listen(self, request: dict[str, Any]) -> dict[str, Any]:
        """Opens the port that sink() reads from."""
        self._listener = socket.create_server((request["host"], 0))
        return {"port": self._listener.getsockname()[1]}

    def sink(self, request: dict[str, Any]) -> dict[str, Any]:
        """Takes one stream() and throws it away."""
        with self._listener, self._listener.accept()[0] as connection:
            buffer, total = bytearray(1 << 20), 0
            while size := connection.recv_into(buffer):
                total += size
            connection.sendall(b".")
        return {"num_bytes": total}


def main() -> None:
    """Answers until its input ends."""
    worker: Trainer | Serving = Trainer() if sys.argv[1] == "trainer" else Serving()
    for line in sys.stdin:
        request = json.loads(line)
        do: Callable[[dict[str, Any]], dict[str, Any]] = getattr(worker, request["do"])
        print(json.dumps(do(request)), flush=True)


if __name__ == "__main__":
    main()
