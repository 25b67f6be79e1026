"""The pydantic bodies that pass between an engine, its router and its subscriber, and what a router and a job
scheduler have to write alike.

None of them is made per token or per step.
"""

import hashlib
import hmac

from pydantic import BaseModel, ConfigDict, Field

from rose.errors import WorkerError
from rose.types import Deployment, GateMode, Role, WeightVersion


class RoutingGate(BaseModel):
    """The part of GateStatus that a router needs."""

    model_config = ConfigDict(extra="allow")

    mode: str = ""
    admitted_steps: int = 0
    declined_steps: int = 0


class GateStatus(RoutingGate):
    """What an engine's compute gate has done since the engine started."""

    model_config = ConfigDict(extra="ignore")

    mode: GateMode
    tpot_target_ms: float | None = None
    """The target that was set last; None if it is the one that the engine was started with."""
    admitted_steps: int
    declined_steps: int


class HarmEstimate(BaseModel):
    """A share by which a latency differs with rollouts, with bounds at 95% confidence. 0.02 is 2% slower."""

    value: float
    low: float
    high: float


class Harvest(BaseModel):
    """What rollouts computed on serving's GPU over a stretch of time."""

    seconds: float
    tokens: int
    """Rollout tokens, including prefilled ones."""
    rollout_s: float
    """Time in rollout steps."""
    serving_s: float
    """Time in serving's own steps."""


class HarmWindow(BaseModel):
    """What rollouts cost serving over a stretch of time."""

    gate: GateMode
    """The gate's mode in this window. The figures of one mode say nothing about another mode."""
    ended_at_s: float
    """Unix time."""
    seconds: float
    num_requests: int
    requests_s: float
    """The length of time that the requests cover. It is less than ``seconds`` on a busy engine, which keeps
    16,384 requests."""
    num_closed_slices: int
    """Slices of time without rollouts that had serving steps: the measurement's controls."""
    slowdown: HarmEstimate | None = None
    """How much longer serving's own steps take, without waits for rollouts; None with too few slices."""
    latencies: dict[str, HarmEstimate] = {}
    """ttft_p50, ttft_p99, tpot_p50 and tpot_p99; empty while they are unknown."""
    with_rollouts_ms: dict[str, float] = {}
    """The same latencies as measured, with rollouts; empty with too few requests."""
    without_rollouts_ms: dict[str, float] = {}
    """The same latencies as they would be without rollouts: those with rollouts, less ``latencies``."""
    seconds_until_known: float | None = None
    """About how long it takes, with this traffic, until the bounds are as close as ``allow_harm``."""
    shown_in_a_day: float | None = None
    """About the least difference that a day of this traffic can show."""
    harvest: Harvest | None = None
    """What rollouts earned; None in the window of one tenant."""
    tenants: dict[str, "HarmWindow"] = {}
    """The windows of the tenants that requests name (``rose_tenant``, ``X-Rose-Tenant``): the 16 with the
    most requests."""


class TenantHarm(BaseModel):
    """One latency of one tenant's requests, and what rollouts cost it."""

    tenant: str
    latency: str
    """ttft_p99 or tpot_p99."""
    harm: HarmEstimate


class HarmStatus(BaseModel):
    """What an engine's status says of the harm."""

    gate: GateMode
    allow_harm: float
    is_bounded: bool
    """Whether rollouts are shut out above ``allow_harm``. Modes that spend slack are only measured."""
    closed_share: float
    """Share of the time in which rollouts are shut out: to measure, and to keep the harm within its bound."""
    is_retreating: bool
    """Whether rollouts are shut out for longer than measuring takes, because the harm was above its bound."""
    slo_ttft_ms: float | None = None
    """None on a decoder, which has no TTFT to keep."""
    slo_tpot_ms: float | None = None
    """None on a prefiller."""
    slo_problem: str | None = None
    """The SLO that serving would miss without rollouts too, with the numbers and the SLO that it could
    keep."""
    note: str | None = None
    """Why the harm is unknown; None if it is known."""
    recent: HarmWindow | None = None
    """The window by which the share of closed slices is chosen."""
    hour: HarmWindow | None = None
    """The present hour, without its tenants."""
    worst_tenant: TenantHarm | None = None
    """The tenant of the present hour whose P99 is slowed most, by the lower bound; None if none is known."""


class HarmHistory(HarmStatus):
    """Answer of ``GET /rose/v1/harm``: the status, and every hour that is known."""

    hours: list[HarmWindow] = []
    """Up to 24 hours with their tenants, the present hour first."""


class Lease(BaseModel):
    """What an engine grants a router until its next question (``rose/engine/http/leases.py``)."""

    router: str
    """The router's own name, which its turns carry."""
    turns: int = Field(ge=0)
    """The turns that it may have here."""
    others: int = 0
    """The turns that other routers have here."""
    other_users: int = 0
    """How many other routers have turns here, among which the GPU's time is divided."""
    lent_to: str | None = None
    """The job to which this GPU is lent; empty while the loan changes hands, None if no router lends it."""
    is_wanted: bool = False
    """Whether another job needs the GPU."""
    fence: int = 0
    """A number that grows with each change of the loan; turns carry the fence that their router knows."""
    run: str | None = None
    """The run whose weights the job's turns get, which the engine is to follow; None if the loan names
    none."""


NOTHING_PUBLISHED = "the run has published nothing in this relay"
"""The problem of a run for whose jobs base weights will do."""


class RoutingStatus(BaseModel):
    """The part of ``GET /rose/v1/status`` that a router needs. Fields that it doesn't know are kept."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    """The model that it serves."""
    weight_version: str | None = None
    """RUN/NUMBER of its weights; None for base weights."""
    num_running: int = 0
    """Requests in vLLM's running queue."""
    num_waiting: int = 0
    """Requests in vLLM's waiting queue, preempted ones included."""
    pressure: str | None = None
    """normal, pressure or frozen (ROSE §4.1)."""
    gate: RoutingGate | None = None
    is_active: bool = True
    """Whether the weights are on the device; an inactive engine refuses turns with 503."""
    is_updating: bool = False
    """Whether the weights are being changed. No step runs meanwhile, and that does not count as a stall."""
    continues_state: bool = False
    """Whether the engine counts tokens that another one generated as its own, so that grammars, penalties and
    bad words go on over them."""
    serving_busy_s: float | None = None
    """Seconds that serving's steps have taken on the shared GPU since the pool began; of several engines,
    those of the busiest. None without a pool."""
    serving_kv_usage: float | None = None
    """Serving's part of the pool's slabs, 0 to 1; None without a pool."""
    adapters: list[str] | None = None
    """The newest version of each run whose LoRA adapter turns may name as their model, such as "run/7"; None
    on an engine without --enable-lora."""
    lease: Lease | None = None
    """The lease of the router that asks; None if the router does not say its cap."""
    follows_loans: bool = False
    """Whether a subscriber beside the engine gives it the weights of the run that a loan names."""
    has_subscriber: bool = False
    """Whether a subscriber gives it the weights of runs, even one that has not been heard yet or has gone.
    Its base weights then say nothing of what a run has published."""
    awaits_weights: bool = False
    """Whether it has base weights, and its subscriber has not said that its run has published nothing. A
    dedicated engine then runs no turns of jobs with a run."""
    run_problems: dict[str, str] = {}
    """The runs whose weights the engine could not get lately, with the reasons."""


class WorkerStatus(RoutingStatus):
    """A ROSE engine's whole answer to ``GET /rose/v1/status``; counters run since the engine started."""

    model_config = ConfigDict(extra="ignore")

    role: Role
    deployment: Deployment | None = None
    """Which phases of its requests a serving engine computes."""
    model: str
    engine_id: str
    """The engine's name on its host."""
    weight_version: str | None
    steps: int
    """Steps that computed something."""
    num_running: int
    num_waiting: int
    kv_slabs_owned: int
    kv_slabs_in_use: int
    """Owned slabs with blocks that a request uses."""
    kv_slabs_budget: int
    """The most slabs that rollouts may hold now."""
    pool_slabs_quarantined: int = 0
    """Slabs of dead engines of the same pool; they come free once the last of those processes has ended."""
    kv_cached_blocks: int
    kv_live_blocks: int
    """Blocks in use or holding prefix cache. Compared with the slabs owned, they show how well memory is
    used."""
    pressure: str
    gate: GateStatus
    harm: HarmStatus | None = None
    """What rollouts cost serving; None on rollout engines and without a pool."""
    weights_in_place: int = 0
    """Weight updates of which only the changes were written."""
    weights_whole: int = 0
    """Weight updates for which the whole checkpoint was loaded."""
    whole_because: str | None = None
    """Why a whole checkpoint was last loaded."""
    stale_drafter: str | None = None
    """Why the drafter of speculative decoding was not updated with the model."""
    adapter_problems: list[str] = []
    """The versions of LoRA adapters that were delivered and are not loaded, with the reasons."""
    stalled_requests: int
    reclaimed_requests: int
    """Rollout requests that ended because serving took their slabs."""
    leases_expired: int
    """Slabs of the pool whose prefix cache was dropped at the end of its lease."""
    cuts: int
    """Emergency cuts of the pool's rollout budget."""
    generated_tokens: int
    computed_tokens: int = 0
    """Tokens of all steps, prefilled ones included."""
    busy_s: float
    """Seconds in steps."""
    is_active: bool
    activated_at_s: float
    """Unix time of the last activation, or of the start."""
    device_weights_bytes: int
    device_kv_bytes: int
    """Bytes of the slabs that it owns; without a pool, vLLM's own cache is part of device_fixed_bytes."""
    device_fixed_bytes: int
    """Everything else on the device; on a CPU, the rest of the engine core's anonymous memory."""
    ranks: list["WorkerStatus"] = []
    """The status of each data-parallel rank, if there are several. The engine's own is then their sum. Its
    pressure and its harm are those of the rank that has most of it, and what serving uses is their mean."""


_MOST_DIGITS = 18
"""Of a version's number, which then fits into 64 bits."""


def parse_version(text: str | None) -> WeightVersion | None:
    """Reads a ``weight_version`` such as "run/7"; None stays None. Raises: WorkerError."""
    if text is None:
        return None
    run_id, _, number = text.rpartition("/")
    if not run_id or not (number.isascii() and number.isdigit()) or len(number) > _MOST_DIGITS:
        raise WorkerError(
            f"weight version {text[:100]!r}: expected RUN/NUMBER, with at most {_MOST_DIGITS} digits"
        )
    return WeightVersion(run_id=run_id, number=int(number))


def key_proof(key: str, meter: str) -> str:
    """Returns a proof that a router's meter counts for a job's key. Whoever knows the key can check it."""
    return hmac.new(key.encode(), meter.encode(), hashlib.sha256).hexdigest()


class RlStep(BaseModel):
    """Body of ``POST /rose/v1/rl_step``: the trainer's step number; ends a freeze (ROSE §4.1)."""

    model_config = ConfigDict(extra="forbid")
    step: int = Field(ge=0)
    """The number of the RL step."""


class MemoryShare(BaseModel):
    """Body of ``POST /rose/v1/memory_share``: bounds a rollout engine, until its next activation."""

    model_config = ConfigDict(extra="forbid")
    share: float = Field(gt=0, le=1)
    """Share of the slabs that the rollout engines of its pool may hold together."""


class GateChange(BaseModel):
    """Body of ``POST /rose/v1/gate``."""

    model_config = ConfigDict(extra="forbid")
    mode: GateMode
    tpot_target_ms: float | None = Field(default=None, gt=0)
    """The TPOT of serving that the gate aims at; None for the target that the engine was started with."""


class WeightUpdate(BaseModel):
    """Body of ``POST /rose/v1/weights``: weights in files on the engine's host."""

    model_config = ConfigDict(extra="forbid")
    version: str
    path: str
    """A checkpoint: the mirror's planes, or any safetensors file that does not change any more."""
    state_hash: str
    changes: list[str] = []
    """Changes files that lead to the version from the one that the engine runs, in order."""
    whole_because: str | None = None
    """Why there are no changes, so that the engine has to load the whole checkpoint."""


class AdapterUpdate(BaseModel):
    """Body of ``POST /rose/v1/adapters``: a version of a LoRA adapter, in files on the engine's host."""

    model_config = ConfigDict(extra="forbid")
    version: str
    path: str
    """A folder as PEFT saves it: adapter_config.json and adapter_model.safetensors."""
    state_hash: str


class WeightUpdated(BaseModel):
    """Answer of ``POST /rose/v1/weights`` and ``/rose/v1/adapters`` once the engine serves the version."""

    version: str
    state_hash: str


class RunToFollow(BaseModel):
    """Answer of ``GET /rose/v1/loan``: the run that the engine is to follow; None if no loan names one."""

    run: str | None = None


class ActivationChange(BaseModel):
    """Answer of ``POST /rose/v1/activate`` and ``/rose/v1/deactivate``."""

    is_active: bool
    took_s: float
    """0 if nothing had to change."""


class Profile(BaseModel):
    """Answer of ``POST /rose/v1/profile``: the fitted step-time model, in seconds."""

    file: str
    model: dict[str, float]
    observations: list[tuple[int, int, int, float, float]]
    """Prefill tokens, decodes, their context tokens, prefill pairs and seconds of each step."""


class ConcurrencyPoint(BaseModel):
    """Rollout throughput at one number of concurrent turns."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    concurrency: int = Field(ge=1)
    tokens_per_s: float = Field(ge=0)


class ConcurrencyProfile(BaseModel):
    """What ``rose profile --concurrency`` stores; a router reads its cap from it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    model: str
    context_tokens: int
    """Length of each turn's prompt."""
    new_tokens: int
    gpus: int = Field(ge=1)
    """GPUs of the engine that was measured."""
    points: tuple[ConcurrencyPoint, ...]
    cap: int = Field(ge=1)
    """Concurrent turns on the whole engine."""
    turns_per_gpu: int = Field(ge=1)
