"""A prefiller, a decoder and a rollout engine in one pool, with vLLM's NixlConnector on the stand-in card. A
stock engine is the peer of either.

ROSE's first two have async scheduling, and late devices. Each function runs in a process of its own.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The way between one prefiller and those that ask it, one after the other."""

    asked: "Queue[list[int]]"
    told: "Queue[Any]"
    """Where the blocks of each prompt are."""


Work = Sequence[tuple[Line, Prompts]]
"""What a decoder has prefilled, and by whom."""


def prefill(model: Path, pool: str, line: Line, stop: Event) -> int:
    """Computes the prompts that are asked for and tells where their blocks are, until told to stop. Returns
    the slabs that it had at last."""
    driver = _nixl_engine(model, pool, "kv_producer")
    _prefill_until(stop.is_set, driver, line)
    tenant_of(driver).pool.check_integrity()
    return tenant_of(driver).num_owned


def decode(model: Path, pool: str, work: Work, max_tokens: int, *, has_window: bool) -> list[Reply]:
    """Has each prompt prefilled elsewhere and decodes it. Without ``has_window`` the connector registers the
    memory that the model computes on, as it would without ROSE."""
    if not has_window:
        KVRange.over_window = lambda self, kv_caches: kv_caches  # type: ignore[method-assign]
    driver = _nixl_engine(model, pool, "kv_consumer")
    replies = _decode(driver, work, max_tokens)
    assert num_transfers() == len(replies), "every prompt came from its prefiller"
    tenant_of(driver).pool.check_integrity()
    assert LateDevice.most_in_flight == 2
    return replies


def prefill_and_decode_in_stock(
    model: Path, line: Line, decodes: Event, work: Work, max_tokens: int
) -> list[Reply]:
    """An engine without ROSE. It computes the prompts that are asked for until ``decodes`` is set, and then
    has its own prefilled elsewhere and decodes them."""
    stand_in_card.install()
    stand_in_card.keep_kv_in_files()
    driver = Driver(make_engine(model, None, kv_transfer_config=_nixl("kv_both")))
    _prefill_until(decodes.is_set, driver, line)
    replies = _decode(driver, work, max_tokens)
    assert num_transfers() == len(replies), "every prompt came from its prefiller"
    return replies


def num_transfers() -> int:
    """Returns how many times this process's card has fetched a prompt's blocks."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return len(get_kv_transfer_group().connector_worker.nixl_wrapper.transfers)


def _prefill_until(is_over: Callable[[], bool], driver: Driver, line: Line) -> None:
    while not is_over():
        driver.step_until(lambda: _pauses() and (is_over() or not line.asked.empty()), "a prompt", 1200.0)
        if not is_over():
            names = driver.ask([line.asked.get()], 1, extra_args=_transfer({"do_remote_decode": True}))
            (reply,) = driver.wait(names)
            line.told.put(reply.kv_transfer)
    driver.step_until(lambda: not driver.scheduler.requests, "every block is sent")


def _decode(driver: Driver, work: Work, max_tokens: int) -> list[Reply]:
    names: list[str] = []
    for line, prompts in work:
        for prompt in prompts:
            blocks = _prefilled(driver, line, prompt)
            names += driver.ask([prompt], max_tokens, extra_args=_transfer(blocks))
    return driver.wait(names)


def _prefilled(driver: Driver, line: Line, prompt: Sequence[int]) -> Any:
    """Returns where the prompt's blocks are, once they have been computed."""
    line.asked.put(list(prompt))
    driver.step_until(lambda: _pauses() and not line.told.empty(), "the prompt's blocks", 1200.0)
    return line.told.get()


def roll_out(
    model: Path, pool: str, prompts: Prompts, max_tokens: int, stop: Event, gate: str | None = "off"
) -> Moves:
    """Answers the prompts round after round, until told to stop. RL steps follow each other fast, so that
    the budget grows again soon after a cut. Without ``gate`` serving says what it may do."""
    settings = {
        "role": "rollout",
        "pool": pool,
        "gate": gate,
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


def _nixl_engine(model: Path, pool: str, role: str, **more: Any) -> Driver:
    use_late_device()
    stand_in_card.install()
    return lending_engine(model, pool, _nixl(role), engine_id=role, **more)


def _nixl(role: str) -> Any:
    from vllm.config import KVTransferConfig

    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    return KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role=role,
        kv_connector_extra_config={"kv_lease_duration": SEND_LEASE_S},
    )


def _pauses() -> bool:
    """Leaves the processor to the other engines for a moment, as an engine that only waits would."""
    time.sleep(0.002)
    return True


def _transfer(params: Any) -> dict[str, Any]:
    return {"kv_transfer_params": params}
