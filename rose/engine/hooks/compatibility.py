"""Which of vLLM's features an engine under ROSE may use; docs/compatibility.md has the table.

Owns the refusals. Each names the flag, the reason and the fix. Promises that an engine with a feature that
can't work under ROSE ends before it loads a model. Never changes a setting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rose.admission.profile import load_profile
from rose.admission.reach import floors_s, unreachable_slo
from rose.config import Settings
from rose.engine.hooks.connectors import check_connectors, check_emptied, works_in_stages
from rose.engine.lockstep import in_lockstep, lockstep_problem
from rose.engine.settings import CONFIG_KEY, EngineSettings
from rose.errors import ConfigError
from rose.types import Deployment, GateMode, Role

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ModelConfig, VllmConfig

UNCOUNTED_DRAFTERS = ("custom_class", "extract_hidden_states")
"""Methods of speculative decoding that keep KV, or other data, in a way that vLLM does not describe."""
DEPLOYMENTS = {"kv_producer": Deployment.PREFILL, "kv_consumer": Deployment.DECODE}
"""The deployment for each of vLLM's kv_role. kv_both implies none: such a connector is a cache beside a
collocated engine, or belongs to a prefiller or a decoder."""


def check_parallelism(engine_args: Any, *, has_pool: bool) -> int:
    """Returns the number of ranks, which are on one host. Raises: ConfigError."""
    if engine_args.nnodes > 1:
        what = "a slab pool is" if has_pool else "the copy of new weights that all ranks read is"
        raise ConfigError(
            f"--nnodes {engine_args.nnodes}: {what} on one host, so all ranks must be; use one host"
        )
    # The ranks of decode context parallelism are tensor-parallel ones.
    num_ranks: int = engine_args.tensor_parallel_size * engine_args.pipeline_parallel_size
    return num_ranks * int(getattr(engine_args, "prefill_context_parallel_size", 1))


def check_data_parallelism(engine_args: Any) -> None:
    """Refuses data-parallel ranks that are not behind one API server on one host. Raises: ConfigError."""
    size = engine_args.data_parallel_size
    if size == 1:
        return
    is_split = (
        engine_args.data_parallel_size_local not in (None, size)
        or engine_args.data_parallel_rank is not None
        or engine_args.data_parallel_start_rank is not None
        or engine_args.data_parallel_external_lb
        or engine_args.data_parallel_hybrid_lb
        or engine_args.data_parallel_backend != "mp"
    )
    if is_split:
        raise ConfigError(
            f"--data-parallel-size {size} with ranks behind other API servers, on other hosts or on Ray: the "
            f"ranks of a ROSE engine are on one host; leave vLLM's other --data-parallel flags out, or start "
            f"an engine for each host and let the router balance them"
        )


def check_api_servers(settings: EngineSettings, engine_args: Any) -> None:
    """Refuses several API servers for an engine whose versions, loans or ranks only one of them would know.
    Raises: ConfigError.
    """
    count = getattr(engine_args, "_api_process_count", 1)
    if count > 1 and (settings.is_updated or engine_args.data_parallel_size > 1):
        raise ConfigError(
            f"--api-server-count {count}: an engine that takes new weights or has data-parallel ranks needs "
            f"one API server, because each knows only the updates and loans that it received itself (vllm "
            f"serve starts one for each data-parallel rank by default); add --api-server-count 1"
        )


def resolve_deployment(settings: EngineSettings, kv_transfer: KVTransferConfig | None) -> EngineSettings:
    """Returns the settings with the deployment that the operator set, else the one its connector implies.

    Raises: ConfigError for a rollout engine with one phase alone, and for a deployment that its connector
    contradicts.
    """
    kv_role = kv_transfer.kv_role if kv_transfer is not None else None
    derived = DEPLOYMENTS.get(kv_role) if kv_role is not None else None
    if settings.role is Role.ROLLOUT:
        if derived is not None:
            raise ConfigError(
                f"--kv-transfer-config kv_role {kv_role}: a rollout engine always computes both "
                f"phases; leave the connector out, or set kv_both if it is a cache"
            )
        return settings
    wanted = settings.deployment
    if wanted is None:
        return settings.deployed(derived if derived is not None else Deployment.COLLOCATED)
    if wanted is Deployment.COLLOCATED:
        return settings
    if kv_role is None:
        raise ConfigError(
            f"--additional-config: '{CONFIG_KEY}.deployment' is {wanted}, but nothing carries KV between "
            f"prefiller and decoder; set --kv-transfer-config, or leave deployment out"
        )
    if derived not in (None, wanted):
        raise ConfigError(
            f"--additional-config: '{CONFIG_KEY}.deployment' is {wanted}, but --kv-transfer-config has "
            f"kv_role {kv_role}, which says {derived}; drop one of the two"
        )
    return settings


def check_config(config: VllmConfig, settings: EngineSettings) -> None:
    """Refuses what can't work in a slab pool. An engine without a pool may use all of vLLM.

    Raises: ConfigError.
    """
    _check_lockstep(config, settings)
    if settings.is_updated and settings.pool is None:
        check_emptied(config)
    if settings.pool is None:
        return
    _check_model(config.model_config)
    _check_states(config)
    _check_connected_ranks(config)
    check_connectors(config, settings.role)
    if settings.is_updated:
        check_emptied(config)
    _check_speculation(config)
    _check_scheduling(config, settings)
    if settings.role is Role.SERVING:
        _check_slo(config, settings)


def _check_lockstep(config: VllmConfig, settings: EngineSettings) -> None:
    """Refuses data-parallel ranks that compute every step together, except in a serving engine that gives its
    GPUs to rollouts only while all ranks are idle."""
    if not in_lockstep(config):
        return
    size = config.parallel_config.data_parallel_size
    what = (
        f"--data-parallel-size {size} with {config.model_config.model}, a mixture of experts: its ranks "
        f"compute every step together"
    )
    if settings.is_updated:
        raise ConfigError(
            f"{what}, so none can wait for its own grant or weights; use --tensor-parallel-size, or start an "
            f"engine for each replica"
        )
    if problem := lockstep_problem(config, settings.gate_mode):
        raise ConfigError(f"{what}: {problem}")


def _check_slo(config: VllmConfig, settings: EngineSettings) -> None:
    """Refuses an SLO that the engine can't reach by its profile. The error says what it can reach."""
    from rose.engine.scheduling.recorder import num_draft_tokens, profile_key  # imports vllm

    stored = load_profile(Settings.from_environment().profile_dir, profile_key(config))
    if stored is None:
        return
    deployment = settings.deployment if settings.deployment is not None else Deployment.COLLOCATED
    floors = floors_s(stored[0], 1 + num_draft_tokens(config))
    if problem := unreachable_slo(settings.slo(), floors, deployment):
        raise ConfigError(f"--additional-config: '{CONFIG_KEY}': {problem}")


def _check_model(model: ModelConfig) -> None:
    if model.is_encoder_decoder:
        raise ConfigError(
            f"--model {model.model}: it is an encoder-decoder, and a slab pool holds the KV and states of "
            f"decoders alone; serve it without --pool"
        )


def _check_states(config: VllmConfig) -> None:
    """Refuses KV connectors for a model whose layers keep states."""
    model = config.model_config
    if not (model.is_hybrid or model.is_attention_free):
        return
    if config.kv_transfer_config is not None:
        raise ConfigError(
            f"--model {model.model} with --kv-transfer-config: its layers keep states, and a slab pool gives "
            f"connectors attention's KV alone; leave --kv-transfer-config out, or serve without --pool"
        )


def _check_connected_ranks(config: VllmConfig) -> None:
    """Refuses a KV connector whose ranks have different layers or different tokens of a request, except
    those that are tested in a pipeline."""
    transfer = config.kv_transfer_config
    if transfer is None:
        return
    for kind in ("pipeline", "prefill_context", "decode_context"):
        size = getattr(config.parallel_config, f"{kind}_parallel_size", 1)
        if size > 1 and not (kind == "pipeline" and works_in_stages(transfer)):
            raise ConfigError(
                f"--kv-transfer-config {transfer.kv_connector} with --{kind.replace('_', '-')}-parallel-size "
                f"{size}: it has not been tested with such ranks in a slab pool; use --tensor-parallel-size "
                f"alone, or serve without --pool"
            )


def _check_speculation(config: VllmConfig) -> None:
    """Refuses drafters that a slab pool can't count, and those that vLLM can't run in a pipeline. vLLM
    refuses a draft model of another vocabulary."""
    speculative = config.speculative_config
    if speculative is None:
        return
    if speculative.method in UNCOUNTED_DRAFTERS:
        raise ConfigError(
            f"--speculative-config method {speculative.method}: vLLM does not say which KV it keeps, so a "
            f"slab pool can't hold it; use ngram, a draft model, EAGLE or MTP, or serve without --pool"
        )
    num_stages = config.parallel_config.pipeline_parallel_size
    if num_stages == 1:
        return
    what = f"--speculative-config with --pipeline-parallel-size {num_stages}"
    if speculative.uses_draft_model():
        # The first draft would end the engine (vLLM 0.32).
        raise ConfigError(
            f"{what}: vLLM runs a draft model in the last stage, but loads only this stage's share of its "
            f"layers there; use EAGLE or MTP, or leave one of the two flags out"
        )
    if not config.use_v2_model_runner:
        # V1 looks for a drafter in every stage, and finds none before the last one (vLLM 0.32).
        raise ConfigError(
            f"{what}: vLLM's Model Runner V1, which this engine has, can't draft in a pipeline; use Model "
            f"Runner V2, which is vLLM's default on a GPU, or leave one of the two flags out"
        )


def _check_scheduling(config: VllmConfig, settings: EngineSettings) -> None:
    is_gated = settings.role is Role.ROLLOUT and settings.gate is not GateMode.OFF
    if is_gated and not config.scheduler_config.enable_chunked_prefill:
        raise ConfigError(
            "chunked prefill is off (--no-enable-chunked-prefill, or latent attention on a CPU): the gate "
            "splits rollouts' prefills to fit them into serving's slack; leave it on, or set --gate off"
        )
