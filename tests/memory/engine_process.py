"""An engine's process for tests: attaches to a pool, then obeys one JSON list per line of input.

["acquire", n]       takes slabs                       -> their numbers
["map", [slab, ..], zero]  maps them at the next positions   -> the sum of the kinds of bytes found there
["fill", byte]       writes all mapped slabs           -> true
["read", slab]       the set of bytes in a slab        -> sorted list
["unmap", [slab]]    unmaps and releases drained slabs -> which became free
["drain", [slab], n] starts giving back                -> true
["churn", n]         acquires and gives back n times   -> slabs moved
"""

import json
import random
import sys
from pathlib import Path

from pool_setup import PATIENCE_S
from vmm_worlds import World

from rose.memory.pool.pool import PoolClient
from rose.memory.pool.wire import Kind
from rose.memory.slabs.backend import CUDA_DRIVER, BackendKind
from rose.types import Role


class Engine:
    def __init__(self, client: PoolClient) -> None:
        self.client = client
        self.world = World(CUDA_DRIVER if client.backend is BackendKind.CUDA else None)
        self.world.slab_bytes = client.slab_bytes
        self.range = client.open_slabs().reserve(4 * client.num_slabs)

    def position(self, slab: int) -> int:
        return next(p for p, s in self.range.mapped() if s == slab)

    def acquire(self, count: int) -> list[int]:
        return self.client.ledger.acquire(self.client.slot, count)

    def map(self, slabs: list[int], zero: bool = True) -> int:
        free = [p for p in range(self.range.num_positions) if self.range.slab_at(p) is None]
        self.range.map_many(free[: len(slabs)], slabs, zero=zero)
        return sum(sum(self.read(slab)) for slab in slabs)

    def fill(self, byte: int) -> bool:
        for position, _ in self.range.mapped():
            self.world.write(self.range, position, byte)
        return True

    def read(self, slab: int) -> list[int]:
        return sorted(self.world.read(self.range, self.position(slab)))

    def drain(self, slabs: list[int], num_ranks: int) -> bool:
        self.client.ledger.drain(slabs, num_ranks)
        return True

    def unmap(self, slabs: list[int]) -> list[int]:
        self.range.unmap_many([p for p, s in self.range.mapped() if s in slabs])
        return [slab for slab in slabs if self.client.ledger.release(slab)]

    def churn(self, rounds: int) -> int:
        """Owning a slab exclusively is checked by writing our slot into it and finding it again."""
        num_moved = 0
        rng = random.Random(self.client.slot)
        for _ in range(rounds):
            slabs = self.acquire(rng.randint(1, 6))
            assert self.map(slabs) == 0, "slabs arrive zeroed"
            self.fill(self.client.slot)
            assert all(self.read(slab) == [self.client.slot] for slab in slabs)
            self.drain(slabs, 1)
            assert self.unmap(slabs) == slabs
            num_moved += len(slabs)
        return num_moved


def main() -> None:
    runtime_dir, pool, role, engine_id, kind, rank, world_size = sys.argv[1:]
    client = PoolClient.attach(
        pool,
        role=Role(role),
        engine_id=engine_id,
        kind=Kind(kind),
        rank=int(rank),
        world_size=int(world_size),
        runtime_dir=Path(runtime_dir),
        timeout_s=PATIENCE_S,
    )
    engine = Engine(client)
    print(json.dumps(client.slot), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(engine, name)(*arguments)), flush=True)


main()
