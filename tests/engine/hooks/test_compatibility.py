"""What of vLLM can't work together with ROSE is refused before a model is loaded, with reason and fix."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import engine_runs
import pytest
from forked_engines import Fork
from real_engine import new_folder, runtime_dir
from tiny_models import make_mamba_model, make_mla_model, make_moe_model, make_serving_model, make_state_model

from rose.memory.daemon.daemon import start_daemon

pytestmark = pytest.mark.vllm

POOL = "refusing"
TWO_SHARDS = "refusing-shards"
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
FLEXKV = {"kv_connector": "FlexKVConnectorV1", "kv_role": "kv_both"}
UNKNOWN = {
    "kv_connector": "UnknownConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "lingering_connector",
}


def connector(name: str, **extra: Any) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": name,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    }


TAKES_WEIGHTS = {"additional_config": {"rose": {"role": "serving", "pool": POOL, "takes_weights": True}}}


def staged(role: str) -> dict[str, Any]:
    """Two stages of a pipeline, in a pool of two shards."""
    return {"pipeline_parallel_size": 2, "additional_config": {"rose": {"role": role, "pool": TWO_SHARDS}}}


DEDICATED = {"additional_config": {"rose": {"role": "rollout"}}}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "nothing": ("serving", {}, ""),
    "copies inside the step": ("serving", connector("ExampleConnector"), ""),
    "nixl": ("serving", connector("NixlConnector"), ""),
    "mooncake": ("serving", connector("MooncakeConnector"), ""),
    "lmcache": ("serving", connector("LMCacheConnectorV1"), ""),
    "offloading flag": ("serving", {"kv_offloading_size": 1}, ""),
    "a connector of a pipeline": (
        "serving",
        {**staged("serving"), **connector("NixlConnector")},
        "NixlConnector with --pipeline-parallel-size 2: it has not been tested with such ranks",
    ),
    "offloading in a pipeline": ("serving", {**staged("serving"), "kv_offloading_size": 1}, ""),
    "offloading beside another in a pipeline": (
        "serving",
        {**staged("serving"), **connector("MultiConnector", connectors=[OFFLOADING, EXAMPLE])},
        "MultiConnector with --pipeline-parallel-size 2: it has not been tested with such ranks",
    ),
    "pipeline": ("rollout", staged("rollout"), ""),
    "unknown": (
        "serving",
        connector("MultiConnector", connectors=[EXAMPLE, OFFLOADING, UNKNOWN]),
        "UnknownConnector: it keeps addresses of the KV cache (register_kv_caches), and rose does not know",
    ),
    "exports": (
        "serving",
        connector("FlexKVConnectorV1"),
        "FlexKVConnectorV1: it exports the KV cache to another process by CUDA IPC handles",
    ),
    "rollout connector": ("rollout", connector("ExampleConnector"), "in the serving engine alone"),
    "rollout producer": (
        "rollout",
        {"kv_transfer_config": {**EXAMPLE, "kv_role": "kv_producer"}},
        "kv_role kv_producer: a rollout engine always computes both phases; leave",
    ),
    "speculation": (
        "serving",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        "",
    ),
    "speculation in a pipeline": (
        "rollout",
        {
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
            **staged("rollout"),
        },
        "--pipeline-parallel-size 2: vLLM's Model Runner V1, which this engine has, can't draft",
    ),
    "extraction": (
        "serving",
        {"speculative_config": {"method": "custom_class", "model": "a.B", "num_speculative_tokens": 2}},
        "--speculative-config method custom_class: vLLM does not say which KV it keeps",
    ),
    "watermark": ("serving", {"watermark": 0.1}, ""),
    "async": ("serving", {"async_scheduling": True}, ""),
    "store": (
        "serving",
        {**connector("ExampleConnector"), **TAKES_WEIGHTS},
        "ExampleConnector: vLLM can't empty its store, so it would give out KV of old weights",
    ),
    "store that resets": ("serving", {"kv_offloading_size": 1, **TAKES_WEIGHTS}, ""),
    "store with tiers": (
        "serving",
        {**connector("OffloadingConnector", spec_name="TieringOffloadingSpec"), **TAKES_WEIGHTS},
        "OffloadingConnector: vLLM can't empty its store with spec_name TieringOffloadingSpec",
    ),
    "shared store": (
        "serving",
        {**connector("MooncakeStoreConnector", cache_prefix="own"), **TAKES_WEIGHTS},
        "MooncakeStoreConnector: engines share its store, and its keys name no weights",
    ),
    "store of another process": (
        "rollout",
        {**connector("FlexKVConnectorV1"), **DEDICATED},
        "FlexKVConnectorV1: vLLM can't empty its store",
    ),
    "store of another process, inside": (
        "rollout",
        {**connector("MultiConnector", connectors=[OFFLOADING, FLEXKV]), **DEDICATED},
        "FlexKVConnectorV1: vLLM can't empty its store",
    ),
    "API servers": ("serving", {"_api_process_count": 2}, ""),
    "API servers of an updated engine": (
        "rollout",
        {"_api_process_count": 2, **DEDICATED},
        "--api-server-count 2: an engine that takes new weights or has data-parallel ranks needs one API",
    ),
    "API servers of replicas": (
        "serving",
        {"_api_process_count": 2, "data_parallel_size": 2},
        "vllm serve starts one for each data-parallel rank by default); add --api-server-count 1",
    ),
    "no store": ("serving", {**connector("NixlConnector"), **TAKES_WEIGHTS}, ""),
    "split replicas": (
        "serving",
        {"data_parallel_size": 2, "data_parallel_rank": 1},
        "--data-parallel-size 2 with ranks behind other API servers",
    ),
    "whole prefills": (
        "rollout",
        {"enable_chunked_prefill": False, "max_model_len": 256},
        "chunked prefill is off (--no-enable-chunked-prefill",
    ),
}


@pytest.fixture(scope="module")
def folder(engines_dir: Path) -> Iterator[Path]:
    path = new_folder(engines_dir, "refusing")
    with ExitStack() as undo:
        for pool in (POOL, f"{POOL}-1", TWO_SHARDS):  # the first two: of two data-parallel ranks
            daemon = start_daemon(
                pool,
                num_slabs=24,
                slab_bytes=512 << 10,
                headroom_slabs=4,
                num_shards=2 if pool == TWO_SHARDS else 1,
                runtime_dir=runtime_dir(path),
            )
            undo.callback(daemon.stop)
        yield path


def engine_args(model: Path, role: str, given: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": str(model),
        "max_model_len": 1024,
        "additional_config": {"rose": {"role": role, "pool": POOL}},
        **given,
    }


def test_what_cannot_live_in_a_pool_is_refused_with_reason_and_fix(folder: Path) -> None:
    model, state = make_serving_model(folder / "model"), make_state_model(folder / "state")
    cases = [engine_args(model, role, given) for role, given, _ in CASES.values()]
    cases.append(engine_args(state, "serving", {}))
    cases.append(engine_args(make_mla_model(folder / "mla"), "serving", connector("ExampleConnector")))
    latents = "ExampleConnector: it takes a layer's blocks of latent attention for one piece of memory"
    expected = [message for _, _, message in CASES.values()] + ["", latents]
    cases.append(
        engine_args(make_moe_model(folder / "moe"), "rollout", {"data_parallel_size": 2, **DEDICATED})
    )
    expected.append("a mixture of experts: its ranks compute every step together")
    experts = Path(cases[-1]["model"])
    cases.append(engine_args(experts, "serving", {"data_parallel_size": 2}))
    spends = {"rose": {"role": "serving", "pool": POOL, "spend_slo": 0.5}}
    cases.append(engine_args(experts, "serving", {"data_parallel_size": 2, "additional_config": spends}))
    expected += ["", "the other ranks would wait in theirs; use gate idle"]
    hybrid, drafts = make_mamba_model(folder / "hybrid"), CASES["speculation"][1]
    cases.append(engine_args(hybrid, "serving", {"enable_prefix_caching": True}))
    cases.append(engine_args(hybrid, "rollout", drafts))
    cases.append(engine_args(hybrid, "serving", connector("ExampleConnector")))
    expected += ["", "", "leave --kv-transfer-config out"]
    drafter = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    cases.append(engine_args(model, "rollout", {"speculative_config": drafter, **staged("rollout")}))
    expected.append("vLLM runs a draft model in the last stage, but loads only this stage's share")
    fork = Fork(folder, engine_runs.refusals, cases=cases)
    other = Fork(folder, engine_runs.refusals_by_another_version, version="0.34.0", cases=cases[:1])
    try:
        for got, part in zip(fork.result(), expected, strict=True):
            assert (part in got) if part else not got, got
            assert "\n" not in got
        assert other.result() == ["vllm 0.34.0 is not supported by rose; install 0.30 to 0.33"]
    finally:
        fork.stop()
        other.stop()
