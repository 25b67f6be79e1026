"""KV that a connector loads for a request stays until it is loaded, whatever pauses the engine."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from lone_schedulers import BLOCK_TOKENS, lone_scheduler
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from rose.types import Role

LOADING = KVTransferConfig(
    kv_connector="LoadingConnector", kv_role="kv_both", kv_connector_module_path="lingering_connector"
)


def step(scheduler: Any, loaded: set[str] | None = None) -> list[str]:
    """Runs a step after which the KV of these requests is there; returns the requests that it computed."""
    output = scheduler.schedule()
    computed = list(output.num_scheduled_tokens)
    result = ModelRunnerOutput(
        req_ids=computed,
        req_id_to_index={name: index for index, name in enumerate(computed)},
        sampled_token_ids=[[1] for _ in computed],
        kv_connector_output=KVConnectorOutput(finished_recving=loaded),
    )
    scheduler.update_from_output(output, result)
    return computed


def test_a_pause_that_lets_loads_end_lets_no_other_request_go_on(runtime_dir: Path, tmp_path: Path) -> None:
    """So an engine can drop all KV of weights before it changes them."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    with lone_scheduler(tmp_path, Role.ROLLOUT, kv_transfer_config=LOADING) as scheduler:

        def drop() -> bool:
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
            is_empty: bool = scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            return is_empty

        for name, num_tokens in (("loading", 40), ("running", 20)):
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            scheduler.add_request(Request(name, list(range(num_tokens)), params, None, block_hasher=hasher))
        assert step(scheduler) == ["running"]
        with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
            drop()
        assert not scheduler.has_requests()  # so no step runs in which the load could end
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        assert [step(scheduler, loaded) for loaded in (None, {"loading"}, None)] == [[], [], ["loading"]]
        assert drop()
        scheduler.set_pause_state(PauseState.UNPAUSED)
        assert step(scheduler) == ["running"]
