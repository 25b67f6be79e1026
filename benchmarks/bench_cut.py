"""An emergency cut is over one rollout step after serving needs the memory, and ends few requests.

`cut_p99_over_step_ms`: a real rollout engine runs under load, and this process plays serving. It halves the
rollout budget in the ledger (the need) and waits until that many slabs are free (usable). The engine obeys at
step boundaries, so the mean step around each cut is subtracted from that cut's time.

`abort_excess`: vLLM's block pool runs on slabs with its real placement and victim choice, without a model.
Requests grow block by block, end and begin again; slabs come when blocks run out and go when idle. Then half
of the slabs are cut. The figure is the requests aborted over the proportional minimum, which is the same
share of the requests as of the slabs, here half. Beside it stands the same for stock order (vLLM's LRU queue,
the request with the most blocks first), and for the fewest requests that would do if the survivors' blocks
could be moved together without a gap. Slabs can't be packed like that, because blocks stay where they are.

    python benchmarks/bench_cut.py --json cut.json
"""

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from statistics import median

from lib.harness import median_figure, run_benchmark
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from rose.engine.memory.block_pool import PINNED_POSITION, SlabBlockPool
from rose.measure.figures import Figure, percentile
from rose.measure.rig import Rig
from rose.memory.ledger.policy_word import PolicyState, Pressure
from rose.memory.policy.spread import Spread
from rose.memory.policy.victims import PositionUse, choose_victims
from rose.memory.pool.pool import PoolClient
from rose.memory.slabs.layout import SlabLayout
from rose.types import GateMode, Role

NUM_SLABS = 32
SLAB_BYTES = 1 << 20
CONCURRENCY = 24
FILL_TIMEOUT_S = 20.0
CUT_TIMEOUT_S = 10.0


def measure(args: argparse.Namespace) -> list[Figure]:
    return [*_abort_figures(args), *_cut_figures(args)]


# How long a cut takes ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Cuts:
    """Seconds and requests of every cut."""

    seconds: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    """The mean step around each cut; 0 where no step ended."""
    aborted: list[float] = field(default_factory=list)
    proportional: list[float] = field(default_factory=list)


def _cut_figures(args: argparse.Namespace) -> list[Figure]:
    num_cuts = 8 if args.quick else 60
    with Rig() as rig:
        pool = rig.pool("cut", num_slabs=NUM_SLABS, slab_bytes=SLAB_BYTES, headroom_slabs=2)
        rig.start_engine("rollout", Role.ROLLOUT, pool="cut", gate=GateMode.OFF)
        rollout = rig.wait_engine("rollout")
        load = rig.run(
            [
                *("-m", "rose.measure.rollout_load", "--url", rollout.url, "--model", rollout.model),
                *("--out", str(rig.folder / "load.json"), "--concurrency", str(CONCURRENCY)),
                *("--duration-s", "3600", "--seed", str(args.seed), "--vocab-size", "64"),
            ],
            "load",
        )
        cuts = _Cuts()
        for step in range(1, num_cuts + 1):
            rollout.begin_rl_step(step)
            _wait_full(pool, step)
            before = rollout.status()
            seconds = _cut_in_half(pool)
            after = rollout.status()
            cuts.seconds.append(seconds)
            cuts.aborted.append(after.reclaimed_requests - before.reclaimed_requests)
            cuts.proportional.append(before.num_running / 2)
            steps = max(after.steps - before.steps, 1)
            cuts.step_s.append((after.busy_s - before.busy_s) / steps)
        load.stop()
    over_s = [cut_s - step_s for cut_s, step_s in zip(cuts.seconds, cuts.step_s, strict=True)]
    p99_s = percentile(over_s, 99)
    assert p99_s is not None
    return [
        Figure(
            name="cut_p99_over_step_ms",
            value=p99_s * 1e3,
            unit="ms",
            target="<= 10",
            peers={
                "P50 of the cut, ms": median(cuts.seconds) * 1e3,
                "longest cut, ms": max(cuts.seconds) * 1e3,
                "longest mean step, ms": max(cuts.step_s) * 1e3,
            },
            spread=(min(over_s) * 1e3, max(over_s) * 1e3),
        ),
        median_figure(
            "aborted_per_cut",
            cuts.aborted,
            "requests",
            peers={"half of those running": median(cuts.proportional)},
        ),
    ]


def _wait_full(pool: PoolClient, rl_step: int) -> None:
    """Waits until rollout has begun the RL step and holds its whole budget."""
    ledger, deadline = pool.ledger, time.monotonic() + FILL_TIMEOUT_S
    while time.monotonic() < deadline:
        policy = ledger.policy
        if policy.rl_step == rl_step and _held(pool) >= policy.rollout_budget_slabs:
            return
        time.sleep(0.01)


def _cut_in_half(pool: PoolClient) -> float:
    """Returns the seconds from the write of half the budget until rollout holds no more than that."""
    ledger = pool.ledger
    seen = ledger.policy
    target = _held(pool) // 2
    cut = PolicyState(rl_step=seen.rl_step, rollout_budget_slabs=target, pressure=Pressure.PRESSURE)
    start_s = time.monotonic()
    ledger.swap_policy(seen, cut)
    while pool.num_slabs - ledger.num_free > target and time.monotonic() < start_s + CUT_TIMEOUT_S:
        ledger.wait_change(ledger.change_seq, 0.0005)
    return time.monotonic() - start_s


def _held(pool: PoolClient) -> int:
    return pool.num_slabs - pool.ledger.num_free


# How many requests a cut ends ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """A pool and the requests in it. Lengths in blocks."""

    name: str
    blocks_per_slab: int
    num_slabs: int
    num_requests: int
    min_blocks: int
    max_blocks: int


SHAPES = (
    _Shape(
        name="24 requests", blocks_per_slab=8, num_slabs=200, num_requests=24, min_blocks=4, max_blocks=24
    ),
    _Shape(
        name="256 requests", blocks_per_slab=7, num_slabs=2048, num_requests=256, min_blocks=8, max_blocks=64
    ),
)


def _abort_figures(args: argparse.Namespace) -> list[Figure]:
    figures = []
    for shape in SHAPES:
        seeds = range(args.seed, args.seed + (2 if args.quick else 9))
        ours = [_cut_sequences(shape, seed, is_stock=False) for seed in seeds]
        stock = [_cut_sequences(shape, seed, is_stock=True) for seed in seeds]
        figures.append(
            median_figure(
                f"abort_excess[{shape.name}]",
                [aborted / (shape.num_requests / 2) for aborted, _ in ours],
                "x minimum",
                target="<= 1.15",
                peers={
                    "stock order": median(aborted / (shape.num_requests / 2) for aborted, _ in stock),
                    "packed without a gap": median(fewest / (shape.num_requests / 2) for _, fewest in ours),
                },
            )
        )
    return figures


class _StockOrderPool(SlabBlockPool):
    """Placement left to vLLM's own queue."""

    def _bring_forward(self, num_blocks: int) -> None:
        pass


@dataclass(slots=True)
class _Sequence:
    length: int
    blocks: list[KVCacheBlock] = field(default_factory=list)


def _cut_sequences(shape: _Shape, seed: int, *, is_stock: bool) -> tuple[int, int]:
    """(requests aborted, fewest possible) by one cut in half after a while of traffic."""
    rng = random.Random(seed)
    layout = SlabLayout.plan(block_bytes=1, slab_bytes=shape.blocks_per_slab)
    pool = _pool(shape, layout, is_stock=is_stock)
    sequences = [
        _Sequence(rng.randint(shape.min_blocks, shape.max_blocks)) for _ in range(shape.num_requests)
    ]
    for _ in range(4 * shape.max_blocks):
        for sequence in rng.sample(sequences, len(sequences)):
            if len(sequence.blocks) == sequence.length:
                pool.free_blocks(reversed(sequence.blocks))
                sequence.blocks.clear()
                sequence.length = rng.randint(shape.min_blocks, shape.max_blocks)
            wanted = shape.min_blocks if not sequence.blocks else 1
            while wanted > pool.get_num_free_blocks():
                pool.back(0, pool.slab_of.index(None))
            pool.beside = layout.position_of(sequence.blocks[-1].block_id) if sequence.blocks else None
            sequence.blocks += pool.get_new_blocks(wanted)
        for position in pool.backed_positions():
            if position != PINNED_POSITION and not pool.num_used[position]:
                pool.unback(position)
    uses = _uses(pool, layout, sequences)
    needed = len(uses) // 2
    aborted = _stock_victims(uses, sequences, needed) if is_stock else _our_victims(uses, needed)
    return aborted, _fewest(sequences, layout, len(uses) - needed)


def _pool(shape: _Shape, layout: SlabLayout, *, is_stock: bool) -> SlabBlockPool:
    pool_class = _StockOrderPool if is_stock else SlabBlockPool
    stock = BlockPool(layout.num_ids(shape.num_slabs), enable_caching=True, hash_block_size=16)
    return pool_class.adopt(stock, layout, shape.num_slabs, 0, Spread.AFFINE)


def _uses(pool: SlabBlockPool, layout: SlabLayout, sequences: list[_Sequence]) -> list[PositionUse]:
    users: dict[int, set[str]] = {}
    for number, sequence in enumerate(sequences):
        for block in sequence.blocks:
            users.setdefault(layout.position_of(block.block_id), set()).add(str(number))
    return [
        PositionUse(
            position=position,
            request_ids=frozenset(users.get(position, ())),
            is_pinned=position == PINNED_POSITION,
        )
        for position in pool.backed_positions()
    ]


def _our_victims(uses: list[PositionUse], needed: int) -> int:
    return len(choose_victims(needed=needed, uses=uses, now=0.0).aborted_requests)


def _stock_victims(uses: list[PositionUse], sequences: list[_Sequence], needed: int) -> int:
    """The request with the most blocks, again and again, until enough slabs are empty."""
    left = {use.position: set(use.request_ids) for use in uses if not use.is_pinned}
    order = sorted(range(len(sequences)), key=lambda number: -len(sequences[number].blocks))
    aborted = 0
    while sum(not users for users in left.values()) < needed and aborted < len(order):
        for users in left.values():
            users.discard(str(order[aborted]))
        aborted += 1
    return aborted


def _fewest(sequences: list[_Sequence], layout: SlabLayout, num_slabs_left: int) -> int:
    """Requests to end so that the others' blocks fit, packed without a gap: no placement can do better."""
    lengths = sorted((len(sequence.blocks) for sequence in sequences), reverse=True)
    room = num_slabs_left * layout.blocks_per_slab - 1  # vLLM's padding block
    used, fewest = sum(lengths), 0
    while used > room:
        used -= lengths[fewest]
        fewest += 1
    return fewest


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
