"""Serving's side of the memory policy, on a scheduler and a pool without a worker."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from lone_schedulers import BLOCK_TOKENS, pooled_scheduler
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from rose.engine.memory.block_pool import PINNED_POSITION
from rose.engine.memory.connector_holds import ConnectorHolds
from rose.engine.memory.serving_memory import ServingMemory
from rose.engine.memory.tenant import MAX_LOOKUP_BLOCKS, Tenant
from rose.memory.ledger.ledger import EngineSlot
from rose.memory.policy.budget import BudgetPolicy
from rose.types import Role

NUM_SLABS = 8


@pytest.fixture
def tenant(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tenant]:
    """Serving's, which holds all slabs, and whose pinned slab has one block to spare."""
    # The model has no weights, and no request is longer than its engine's longest.
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    init_none_hash(sha256)
    with pooled_scheduler(tmp_path, Role.SERVING, max_model_len=2048) as scheduler:
        tenant: Tenant = scheduler.tenant
        pinned = tenant.pool.get_new_blocks(tenant.pool.get_num_free_blocks())
        tenant.pool.free_blocks(pinned[:1])
        assert tenant.grow(NUM_SLABS) == NUM_SLABS - 1
        yield tenant


def request(name: str, tokens: list[int], **sampling: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1, **sampling),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
    )


def prompt(seed: int, num_blocks: int) -> list[int]:
    return [seed] * (num_blocks * BLOCK_TOKENS)


def cache(tenant: Tenant, tokens: list[int]) -> set[int]:
    """Computes a prompt and leaves it in the cache; returns where."""
    pool, num_blocks = tenant.pool, len(tokens) // BLOCK_TOKENS
    blocks = pool.get_new_blocks(num_blocks)
    pool.cache_full_blocks(request("ended", tokens), blocks, 0, num_blocks, BLOCK_TOKENS, 0)
    pool.free_blocks(reversed(blocks))
    return {tenant.layout.position_of(block.block_id) for block in blocks} - {PINNED_POSITION}


def memory_of(tenant: Tenant, policy: BudgetPolicy, *, window_s: float, now: float) -> ServingMemory:
    return ServingMemory(
        tenant, policy, window_s=window_s, lend_idle_s=None, tokens_per_pair=lambda: 0.0, now=now
    )


def test_of_two_slabs_used_at_the_same_time_serving_gives_the_one_nearer_to_the_beginning(
    tenant: Tenant,
) -> None:
    size = tenant.layout.blocks_per_slab
    cache(tenant, prompt(0, 1))  # the spare block of the pinned slab
    long, short = cache(tenant, prompt(1, 2 * size)), cache(tenant, prompt(2, size))
    others = set(tenant.idle_positions()) - long - short
    later_s = time.monotonic() + 100.0
    # If attention cost nothing, the end of the older context would go.
    assert set(tenant.least_valuable(1, others, later_s, 0.0)) < long
    assert set(tenant.least_valuable(1, others, later_s, 0.01)) == short


@pytest.mark.parametrize("other", Role)
def test_serving_gives_others_its_cache_but_for_the_prefix_that_a_waiting_request_hits(
    tenant: Tenant, other: Role
) -> None:
    size = tenant.layout.blocks_per_slab
    cache(tenant, prompt(0, 1))  # the spare block of the pinned slab
    oldest, *_ = [cache(tenant, prompt(seed, size)) for seed in range(1, NUM_SLABS)]
    waiting = [request("again", [*prompt(1, size), 7])]
    assert tenant.shortage([], waiting).hit_positions == oldest
    tenant.ledger.set_engine(2, EngineSlot(role=other, pid=0, world_size=1))
    tenant.ledger.want(2, NUM_SLABS - 1)
    policy = BudgetPolicy(num_slabs=NUM_SLABS, headroom_slabs=1)
    memory = memory_of(tenant, policy, window_s=1.0, now=time.monotonic())
    for _ in range(3):
        memory.tick(time.monotonic(), [], waiting)
    # The pinned slab, the hits, and one for the block that is not cached.
    assert tenant.num_owned == 3
    assert tenant.ledger.serving_used_slabs == 3
    assert tenant.shortage([], waiting).hit_positions == oldest
    tenant.pool.check_integrity()


def test_a_request_that_waits_for_slabs_cuts_the_budget_though_serving_has_an_empty_one(
    tenant: Tenant,
) -> None:
    """Rollouts have all slabs but that one and the pinned one, which is their budget."""
    ledger, budget = tenant.ledger, NUM_SLABS - 2
    tenant.give_back(tenant.idle_positions()[:budget])
    ledger.set_engine(2, EngineSlot(role=Role.ROLLOUT, pid=0, world_size=1))
    assert len(ledger.acquire(2, budget)) == budget
    ledger.begin_rl_step(1, budget)
    waiting = [request("long", prompt(1, 2 * tenant.layout.blocks_per_slab))]
    assert tenant.shortage([], waiting).evicting_cache == 1
    policy = BudgetPolicy(num_slabs=NUM_SLABS, headroom_slabs=0)
    memory_of(tenant, policy, window_s=1.0, now=0.0).tick(0.0, [], waiting)
    assert ledger.policy.rollout_budget_slabs < budget


def test_slabs_of_a_transfer_that_was_given_up_stay_for_another_lease_of_the_connector(
    runtime_dir: Path, tmp_path: Path
) -> None:
    init_none_hash(sha256)
    with pooled_scheduler(tmp_path, Role.SERVING) as scheduler:
        tenant: Tenant = scheduler.tenant
        lease_s = 0.05
        holds = tenant.holds = ConnectorHolds(None, {"kv_lease_duration": lease_s}, tenant.layout.position_of)
        tenant.pool.get_new_blocks(tenant.pool.get_num_free_blocks())  # what the pinned slab has
        assert tenant.grow(NUM_SLABS) == NUM_SLABS - 1
        positions = {name: _ends_with_blocks_kept(scheduler, name) for name in ("late", "sent")}
        time.sleep(2 * lease_s)
        scheduler._free_blocks(scheduler.requests["late"])
        assert holds.positions(0.0) == positions["late"]
        holds.keeps("sent", time.monotonic() + 60.0)  # the peer has answered in time
        scheduler._free_blocks(scheduler.requests["sent"])
        assert holds.positions(0.0) == positions["late"]
        tenant.ledger.set_engine(2, EngineSlot(role=Role.ROLLOUT, pid=0, world_size=1))
        tenant.ledger.want(2, NUM_SLABS)
        policy = BudgetPolicy(num_slabs=NUM_SLABS, headroom_slabs=1)
        memory = memory_of(tenant, policy, window_s=1e9, now=0.0)
        memory.tick(0.0, [], [])
        assert set(tenant.pool.backed_positions()) == positions["late"] | {PINNED_POSITION}
        ends_s = holds.next_end_s(0.0)
        assert ends_s is not None and memory.tick(0.0, [], []) == ends_s
        memory.tick(ends_s, [], [])
        assert tenant.pool.backed_positions() == [PINNED_POSITION]
        tenant.pool.check_integrity()


def test_a_transfer_that_was_given_up_holds_its_slabs_for_the_longest_lease() -> None:
    holds = ConnectorHolds(None, {"kv_lease_duration": 300, "decoder_kv_blocks_ttl": 10}, lambda block: block)
    holds.keeps("a", 0.0)
    assert holds.gives_up("a", 10.0)
    holds.hold([3], 10.0)
    assert holds.next_end_s(11.0) == 310.0
    short = ConnectorHolds(None, {}, lambda block: block)
    short.hold([3], 10.0)
    assert short.next_end_s(11.0) == 40.0


def _ends_with_blocks_kept(scheduler: Any, name: str) -> set[int]:
    """A request that takes a slab of its own and ends, while its connector keeps the blocks."""
    tenant: Tenant = scheduler.tenant
    ended = request(name, prompt(1, 1))
    scheduler.requests[name] = ended
    blocks = tenant.pool.get_new_blocks(tenant.layout.blocks_per_slab)
    (group,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    group.req_to_blocks[name] = blocks
    ended.status = RequestStatus.FINISHED_LENGTH_CAPPED
    scheduler._free_request(ended, delay_free_blocks=True)
    assert name in scheduler.requests
    return tenant.positions_of(name)


def test_a_long_queue_behind_one_system_prompt_lacks_only_what_differs(tenant: Tenant) -> None:
    system, num_requests = prompt(1, 100), 100
    cache(tenant, system)
    waiting = [request(f"r{index}", [*system, index]) for index in range(num_requests)]
    assert num_requests * 100 > 2 * MAX_LOOKUP_BLOCKS
    shortage = tenant.shortage([], waiting)
    assert shortage.keeping_cache == shortage.evicting_cache == 0
    more = [request(f"m{index}", [*system, *prompt(1000 + index, 4), 7]) for index in range(num_requests)]
    free = tenant.pool.get_num_free_blocks() - 100
    assert tenant.shortage([], more).evicting_cache == tenant.slabs_for(num_requests * 5 - free)


def test_a_request_that_wants_logprobs_of_its_prompt_hits_nothing(tenant: Tenant) -> None:
    system = prompt(1, 100)
    positions = cache(tenant, system)
    plain, skips = request("plain", [*system, 7]), request("skips", [*system, 7], prompt_logprobs=1)
    assert skips.skip_reading_prefix_cache
    assert tenant.shortage([], [plain]).hit_positions == positions
    assert tenant.shortage([], [skips]).hit_positions == frozenset()
    tenant.pool.get_new_blocks(tenant.pool.get_num_free_blocks() - 100)  # all but the cache
    assert tenant.shortage([], [plain]).keeping_cache == tenant.slabs_for(1)
    assert tenant.shortage([], [skips]).keeping_cache == tenant.slabs_for(101)
