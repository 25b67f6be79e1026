"""A prefiller, a decoder and a rollout engine in one pool, with vLLM's NixlConnector on the stand-in card.

The first two have async scheduling, and late devices. Each function runs in a process of its own.
"""

import os
import time
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import async_on_cpu  # noqa: F401
import stand_in_card
from connector_runs import lending_engine
from engine_runs import LEASE_S, STALL_S, WINDOW_S, Moves, Prompts, begin_rl_step, num_changes, tenant_of
from forked_engines import Driver, Reply, make_engine
from late_device import LateDevice, use_late_device

from rose.engine.memory.kv_range import KVRange
from rose.ports import free_port

SEND_LEASE_S = 900
"""NixlConnector's lease of a prefiller's blocks: longer than a machine stalls."""


def prefill(model: Path, pool: str, asked: "Queue[list[int]]", told: "Queue[Any]", stop: Event) -> int:
    """Computes the prompts that are asked for and tells where their blocks are, until told to stop. Returns
    the slabs that it had at last."""
    driver = _nixl_engine(model, pool, "kv_producer")
    tenant = tenant_of(driver)
    while not stop.is_set():
        driver.step_until(lambda: _pauses() and (stop.is_set() or not asked.empty()), "a prompt", 1200.0)
        if not stop.is_set():
            names = driver.ask([asked.get()], 1, extra_args=_transfer({"do_remote_decode": True}))
            (reply,) = driver.wait(names)
            told.put(reply.kv_transfer)
    driver.step_until(lambda: not driver.scheduler.requests, "every block is sent")
    tenant.pool.check_integrity()
    return tenant.num_owned


def decode(
    model: Path,
    pool: str,
    prompts: Prompts,
    max_tokens: int,
    asked: "Queue[list[int]]",
    told: "Queue[Any]",
    *,
    has_window: bool,
) -> list[Reply]:
    """Has each prompt prefilled elsewhere and decodes it. Without ``has_window`` the connector registers the
    memory that the model computes on, as it would without ROSE."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if not has_window:
        KVRange.over_window = lambda self, kv_caches: kv_caches  # type: ignore[method-assign]
    driver = _nixl_engine(model, pool, "kv_consumer")
    names: list[str] = []
    for prompt in prompts:
        asked.put(list(prompt))
        driver.step_until(lambda: _pauses() and not told.empty(), "the prompt's blocks", 1200.0)
        names += driver.ask([prompt], max_tokens, extra_args=_transfer(told.get()))
    replies = driver.wait(names)
    card = get_kv_transfer_group().connector_worker.nixl_wrapper
    assert len(card.transfers) == len(prompts), "every prompt came from the prefiller"
    tenant_of(driver).pool.check_integrity()
    assert LateDevice.most_in_flight == 2
    return replies


def roll_out(model: Path, pool: str, prompts: Prompts, max_tokens: int, stop: Event) -> Moves:
    """Answers the prompts round after round, until told to stop. RL steps follow each other fast, so that
    the budget grows again soon after a cut."""
    settings = {
        "role": "rollout",
        "pool": pool,
        "engine_id": "rollout",
        "lease_s": LEASE_S,
        "stall_s": STALL_S,
    }
    driver = Driver(make_engine(model, settings))
    before, replies = num_changes(tenant_of(driver)), []
    began_s, step = time.monotonic(), 0

    def is_over(names: list[str]) -> bool:
        nonlocal began_s, step
        if time.monotonic() > began_s + WINDOW_S:
            began_s, step = time.monotonic(), step + 1
            begin_rl_step(driver, step)
        return all(name in driver.replies and driver.replies[name].finish_reason for name in names)

    while not stop.is_set():
        names = driver.ask(prompts, max_tokens)
        driver.step_until(partial(is_over, names), "a round of rollouts")
        replies.append([driver.replies[name] for name in names])
    return Moves(replies=replies, num_moves=num_changes(tenant_of(driver)) - before)


def _nixl_engine(model: Path, pool: str, role: str) -> Driver:
    from vllm.config import KVTransferConfig

    use_late_device()
    stand_in_card.install()
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    connector = KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role=role,
        kv_connector_extra_config={"kv_lease_duration": SEND_LEASE_S},
    )
    return lending_engine(model, pool, connector, engine_id=role)


def _pauses() -> bool:
    """Leaves the processor to the other engines for a moment, as an engine that only waits would."""
    time.sleep(0.002)
    return True


def _transfer(params: Any) -> dict[str, Any]:
    return {"kv_transfer_params": params}
