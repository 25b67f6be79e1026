"""A thousand random versions arrive by any path without one wrong bit."""

import random

import numpy as np
import pytest
import torch

from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format.codec import Bits, Codec
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.relay.opening import open_relay

NUM_VERSIONS = 1000
SPECIAL = {
    torch.bfloat16: [0x7FC0, 0x7F81, 0xFFFF, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x8001],
    torch.float16: [0x7E00, 0x7C01, 0xFFFF, 0x7C00, 0xFC00, 0x8000, 0x0000, 0x0001, 0x8001],
    torch.float32: [0x7FC00000, 0x7F800001, 0x7F800000, 0xFF800000, 0x80000000, 0, 1],
    torch.float8_e4m3fn: [0x7F, 0xFF, 0x80, 0x00, 0x01, 0x81],
}
"""NaNs with payloads, infinities, both zeros and the smallest numbers."""
SHAPES: dict[torch.dtype, list[tuple[int, ...]]] = {
    torch.bfloat16: [(300, 7), (11,)],
    torch.float16: [(41, 5)],
    torch.float32: [(64,)],
    torch.float8_e4m3fn: [(500,)],
}
VIEWS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


class Trainer:
    """Holds tensors of every width, which take random steps or special values or return to older states."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.tensors = {
            f"{str(dtype).removeprefix('torch.')}.{number}": torch.zeros(shape, dtype=dtype)
            for dtype, shapes in SHAPES.items()
            for number, shape in enumerate(shapes)
        }
        for name in self.tensors:
            self.bits(name)[:] = self.random_bits(name)
        self.saved: list[dict[str, Bits]] = []

    def bits(self, name: str) -> Bits:
        """Returns the tensor's bits, in place."""
        tensor = self.tensors[name]
        return tensor.reshape(-1).view(VIEWS[tensor.element_size()]).numpy()

    def random_bits(self, name: str) -> Bits:
        bits = self.bits(name)
        return self.rng.integers(0, 256**bits.itemsize, bits.size).astype(bits.dtype)

    def step(self) -> None:
        kind = self.rng.choice(
            ["ulp", "special", "redraw", "rollback", "none"], p=[0.6, 0.15, 0.05, 0.1, 0.1]
        )
        self.saved = [*self.saved[-4:], {name: self.bits(name).copy() for name in self.tensors}]
        if kind == "rollback":
            older = self.saved[self.rng.integers(len(self.saved))]
            for name, bits in older.items():
                self.bits(name)[:] = bits
        elif kind != "none":
            for name in self.tensors:
                self.change(name, kind)

    def change(self, name: str, kind: str) -> None:
        bits = self.bits(name)
        chosen = self.rng.random(bits.size) < self.rng.choice([0.002, 0.02, 0.3])
        count = int(chosen.sum())
        if kind == "ulp":
            bits[chosen] += self.rng.choice(np.array([1, -1, 2, -3]), count).astype(bits.dtype)
        elif kind == "special":
            values = np.array(SPECIAL[self.tensors[name].dtype], np.uint64).astype(bits.dtype)
            bits[chosen] = self.rng.choice(values, count)
        else:
            bits[:] = self.random_bits(name)

    def check(self, mirror: WeightMirror) -> None:
        """Compares bit by bit with what the trainer holds."""
        held = {name: np.zeros(self.tensors[name].shape, self.bits(name).dtype) for name in self.tensors}
        assert mirror.planes is not None
        mirror.planes.read_into(held)
        for name, bits in held.items():
            assert np.array_equal(bits.reshape(-1), self.bits(name)), name


@pytest.mark.parametrize("codec", [None, Codec.EXPONENT])
@pytest.mark.slow
def test_no_bit_is_wrong_over_random_versions_skips_rollbacks_and_late_joins(
    embedded_url: str, codec: Codec | None
) -> None:
    trainer = Trainer(seed=1 if codec is None else 2)
    choices = random.Random(3)
    relay = open_relay(embedded_url)
    publisher = WeightPublisher(
        trainer.tensors, embedded_url, "run", dtype=None, codec=codec, snapshot_every=25, bucket_bytes=8000
    )
    followers = [Follower(relay, "run", WeightMirror()) for _ in range(3)]
    num_checks = 0
    for number in range(NUM_VERSIONS // 2):
        trainer.step()
        report = publisher.publish()
        assert report.version.number == number and report.snapshot_bytes == 0
        if choices.random() < 0.05:
            followers[choices.randrange(3)] = Follower(relay, "run", WeightMirror())
        for follower in followers:
            if choices.random() < 0.25:
                assert follower.advance()
                trainer.check(follower.mirror)
                num_checks += 1
    for follower in followers:
        follower.advance()
        trainer.check(follower.mirror)
        follower.mirror.check_integrity()
    assert num_checks > NUM_VERSIONS // 4
    publisher.close()
    relay.close()
