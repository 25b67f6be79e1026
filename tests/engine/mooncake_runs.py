"""A prefiller and a decoder in one pool, and a stock decoder, with vLLM's MooncakeConnector over TCP. Each
function runs in a process of its own.

The prefiller's Mooncake writes the blocks of a prompt into a decoder's memory.
"""

import os
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
from connector_runs import lending_engine
from engine_runs import Prompts, tenant_of
from forked_engines import Driver, Reply, make_engine
from prefill_decode_runs import _pauses, _transfer

from rose.ports import free_port

Asked = tuple[str, list[int]]
"""The name of a transfer, and a prompt."""


def prefill(model: Path, pool: str, asked: "Queue[Asked]", stop: Event, ready: Event, port: int) -> int:
    """Computes the prompts that are asked for until told to stop. Returns the slabs that it had at last."""
    driver = _mooncake_engine(model, pool, "kv_producer", port)
    ready.set()
    while not stop.is_set():
        driver.step_until(lambda: _pauses() and (stop.is_set() or not asked.empty()), "a prompt", 1200.0)
        if not stop.is_set():
            name, prompt = asked.get()
            params = {"do_remote_decode": True, "transfer_id": name}
            driver.wait(driver.ask([prompt], 1, extra_args=_transfer(params)))
    driver.step_until(lambda: not driver.scheduler.requests, "every block is sent")
    tenant_of(driver).pool.check_integrity()
    return tenant_of(driver).num_owned


def decode(
    model: Path,
    pool: str | None,
    prompts: Prompts,
    max_tokens: int,
    asked: "Queue[Asked]",
    ready: Event,
    port: int,
) -> list[Reply]:
    """Has each prompt prefilled by the other engine and decodes it, without ROSE if there is no pool."""
    driver = _mooncake_engine(model, pool, "kv_consumer", free_port())
    ready.wait()
    names: list[str] = []
    for index, prompt in enumerate(prompts):
        transfer = f"{pool}-{index}"
        asked.put((transfer, list(prompt)))
        params = {
            "do_remote_prefill": True,
            "remote_engine_id": "kv_producer",
            "remote_bootstrap_addr": f"http://127.0.0.1:{port}",
            "transfer_id": transfer,
        }
        names += driver.ask([prompt], max_tokens, extra_args=_transfer(params))
    replies = driver.wait(names)
    if pool is not None:
        tenant_of(driver).pool.check_integrity()
    return replies


def _mooncake_engine(model: Path, pool: str | None, role: str, port: int) -> Driver:
    from vllm.config import KVTransferConfig

    # The only thing that it asks an accelerator for.
    torch.accelerator.current_device_index = lambda: 0
    os.environ.update(VLLM_HOST_IP="127.0.0.1", VLLM_MOONCAKE_BOOTSTRAP_PORT=str(port))
    connector = KVTransferConfig(
        kv_connector="MooncakeConnector",
        kv_role=role,
        engine_id=role if pool is not None else f"stock-{role}",
        kv_connector_extra_config={"mooncake_protocol": "tcp"},
    )
    if pool is None:
        return Driver(make_engine(model, None, kv_transfer_config=connector))
    return lending_engine(model, pool, connector, engine_id=role)
