"""What the forked engines do in the tests of KV connectors. Each function runs in a process of its own."""

import os
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from engine_runs import WINDOW_S, Prompts, tenant_of
from forked_engines import Driver, Reply, make_engine
from late_device import LateDevice, use_late_device

from rose.engine.memory.tenant import Tenant
from rose.engine.stock import CHUNK_TOKENS
from rose.memory.ledger.ledger import EngineSlot
from rose.memory.policy.budget import BudgetPolicy
from rose.types import Deployment, Role

SEND = "send"
"""Name of the file in a connector's storage that lets it send."""


def _budget(tenant: Tenant) -> int:
    return tenant.ledger.policy.rollout_budget_slabs


def prefill_and_send_late(model: Path, pool: str, prompts: Prompts, store: Path) -> dict[str, int]:
    """A prefiller whose connector reads the blocks only when the engine has long been idle. All along, the
    ledger says that rollouts want every slab.

    Returns slabs owned by the engine: after traffic, once idle ones have gone back, after all blocks were
    sent; and how many of the second hold blocks of finished requests that are still to be sent. Then what
    rollouts may hold: once it has long been idle, and when traffic is back.
    """
    settings = {
        "role": "serving",
        "pool": pool,
        "gate": "dual",
        "serving_window_s": WINDOW_S,
        "lend_idle_s": WINDOW_S,
    }
    connector = _connector("LingeringConnector", store, "kv_producer", module="lingering_connector")
    driver = Driver(make_engine(model, settings, kv_transfer_config=connector, max_num_batched_tokens=2048))
    tenant, counts = tenant_of(driver), {}
    _want_everything(tenant)
    send = store / SEND
    # Nothing of it is sent, or a slow machine might see slabs go back before it has seen them all.
    driver.answer([[*prompt[at:], *prompt[:at]] for prompt in prompts for at in (1, 2)], 1)
    counts["after traffic"] = tenant.num_owned
    send.touch()
    driver.step_until(lambda: not driver.scheduler.requests, "the traffic is sent")
    send.unlink()
    for prompt in prompts:
        driver.answer([prompt], 1)
    counts["in use"] = tenant.pool.num_positions_in_use()
    driver.step_until(lambda: tenant.num_owned <= counts["in use"] + 1, "idle slabs go back")
    counts["unsent"] = tenant.num_owned
    send.touch()
    driver.step_until(lambda: tenant.num_owned == 1, "the others go back once their blocks are sent")
    counts["sent"] = tenant.num_owned
    policy = BudgetPolicy(num_slabs=tenant.client.num_slabs, headroom_slabs=tenant.client.headroom_slabs)
    driver.step_until(lambda: _budget(tenant) == policy.whole_budget, "the headroom is lent")
    counts["lent"] = _budget(tenant)
    send.unlink()
    driver.answer(prompts[:1], 1)
    counts["back"] = _budget(tenant)
    send.touch()
    driver.step_until(lambda: _budget(tenant) == policy.whole_budget, "the headroom is lent again")
    assert driver.scheduler.rose.deployment is Deployment.PREFILL
    tenant.pool.check_integrity()
    return counts


def _want_everything(tenant: Tenant) -> None:
    """The ledger says from now on that rollouts want every slab."""
    other = tenant.client.slot + 1
    tenant.ledger.set_engine(other, EngineSlot(role=Role.ROLLOUT, pid=0, world_size=1))
    tenant.ledger.want(other, tenant.client.num_slabs)


def answer_again_from_the_host(
    model: Path,
    pool: str,
    rounds: list[Prompts],
    max_tokens: int,
    *,
    is_async: bool = False,
    num_stages: int = 1,
) -> list[list[Reply]]:
    """An engine that offloads; with ``is_async`` it has two steps in flight on a late device, and with
    several stages one in each. In the last round it does not hold the slabs of pending copies. Returns the
    second answers of each round."""
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "LateOffloadingSpec",
            "spec_module_path": "late_offloading",
            "cpu_bytes_to_use": 64 << 20,
        },
    )
    if is_async:
        use_late_device()
    driver = lending_engine(model, pool, connector, num_stages=num_stages, lend_idle_s=WINDOW_S)
    _want_everything(tenant_of(driver))
    answers = []
    for prompts in rounds:
        if prompts is rounds[-1]:
            tenant_of(driver).holds = None
        answers.append(_answer_twice(driver, prompts, max_tokens))
    tenant_of(driver).pool.check_integrity()
    assert LateDevice.most_in_flight == (2 if is_async else 0)
    return answers


def answer_again_from_a_store(
    model: Path, pool: str, rounds: list[Prompts], max_tokens: int, store: Path, stored: Event, stop: Event
) -> list[list[Reply]]:
    """An engine whose blocks are kept in Mooncake's store, beside rollouts that take its slabs whenever it
    is idle. Says when all are stored, and stays until told to stop, because the store's memory is its own.
    Returns the second answers of each round."""
    driver = lending_engine(model, pool, _mooncake_store(store), lend_idle_s=WINDOW_S)
    answers = [_answer_twice(driver, prompts, max_tokens) for prompts in rounds]
    tenant_of(driver).pool.check_integrity()
    stored.set()
    driver.step_until(stop.is_set, "told to stop", at_most_s=1200.0)
    return answers


def answer_from_a_store(model: Path, prompts: Prompts, max_tokens: int, store: Path) -> list[Reply]:
    """A stock engine that has computed nothing, and finds in Mooncake's store what another one has kept."""
    return Driver(
        make_engine(model, None, enable_prefix_caching=True, kv_transfer_config=_mooncake_store(store))
    ).answer(prompts, max_tokens)


def lending_engine(
    model: Path,
    pool: str,
    connector: Any,
    engine_id: str = "serving",
    step_tokens: int = CHUNK_TOKENS,
    num_stages: int = 1,
    **more: Any,
) -> Driver:
    """A serving engine that keeps no slab which nobody holds once a window without requests has passed.
    ``more``: further settings of ROSE."""
    settings = {
        "role": "serving",
        "pool": pool,
        "engine_id": engine_id,
        "serving_window_s": WINDOW_S,
        "floor_slabs": 0,
        **more,
    }
    stages = {"pipeline_parallel_size": num_stages} if num_stages > 1 else {}
    return Driver(
        make_engine(
            model, settings, kv_transfer_config=connector, max_num_batched_tokens=step_tokens, **stages
        )
    )


def _answer_twice(driver: Driver, prompts: Prompts, max_tokens: int) -> list[Reply]:
    """Answers prompts, loses every slab and answers them again. Returns the second answers."""
    driver.answer(prompts, max_tokens)
    tenant = tenant_of(driver)
    driver.step_until(lambda: _is_offloaded(driver) and tenant.num_owned == 1, "the slabs have gone")
    return driver.answer(prompts, max_tokens)


def _mooncake_store(config: Path) -> Any:
    """Returns a connector for the store that the file describes. Block hashes are equal in all engines."""
    from vllm.config import KVTransferConfig

    os.environ.update(
        MOONCAKE_CONFIG_PATH=str(config), MOONCAKE_REQUESTER_LOCAL_HOSTNAME="127.0.0.1", PYTHONHASHSEED="0"
    )
    return KVTransferConfig(kv_connector="MooncakeStoreConnector", kv_role="kv_both")


def _is_offloaded(driver: Driver) -> bool:
    return not driver.scheduler.connector.has_pending_push_work()


def decode_from_disk(model: Path, pool: str, prompts: Prompts, max_tokens: int, store: Path) -> list[Reply]:
    """A decoder that reads the prefiller's files."""
    settings = {"role": "serving", "pool": pool, "gate": "dual"}
    connector = _connector("ExampleConnector", store, "kv_consumer")
    driver = Driver(make_engine(model, settings, kv_transfer_config=connector, max_num_batched_tokens=2048))
    names = driver.ask(prompts, max_tokens)
    # Its gate knows of no first token to wait for: they are all decodes from their arrival on.
    deadlines = driver.scheduler._deadlines
    assert (deadlines.num_decodes, deadlines.has_pending_prefill) == (len(prompts), False)
    return driver.wait(names)


def _connector(name: str, store: Path, role: str, module: str | None = None) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector=name,
        kv_role=role,
        kv_connector_module_path=module,
        kv_connector_extra_config={"shared_storage_path": str(store)},
    )
