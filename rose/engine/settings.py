"""What an operator may set for one engine, in the ``rose`` key of vLLM's ``--additional-config``.

Owns the names, types and defaults. Promises one clear line for bad input. Never reads the environment.
"""

import difflib
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rose.admission.gate import GateSettings, mode_problem
from rose.admission.reach import bound_problem
from rose.errors import ConfigError
from rose.memory.policy.budget import BudgetPolicy
from rose.memory.pool.pool import PoolClient
from rose.types import SLO, Deployment, GateMode, Role

CONFIG_KEY = "rose"


class EngineSettings(BaseModel):
    """One engine's ROSE settings. Operators write latencies in milliseconds; the code uses seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    role: Role
    """What the engine is for."""
    pool: str | None = None
    """Name of the engine's slab pool. The first data-parallel rank has the pool of this name, and rank N has
    NAME-N. None runs a dedicated engine with vLLM's own KV cache."""
    engine_id: str = ""
    """The engine's name on this host. By default it is made of role and process id."""
    gate: GateMode | None = None
    """The test that a rollout step must pass before it may start. The default of a serving engine is idle, or
    dual with spend_slo; a rollout engine by default follows what serving offers in these two modes. Any other
    mode has to be set in both engines."""
    allow_harm: float = Field(default=0.02, gt=0, le=1)
    """Share by which serving's P99 TTFT and TPOT may differ with rollouts on. While the measured difference
    is larger, rollouts are shut out for a part of the time. What spend_slo or another gate mode than idle
    spends is measured too, but not bounded. A bound below 0.0001 is refused, because no traffic can show so
    small a difference within a day."""
    spend_slo: float | None = Field(default=None, gt=0, le=0.95)
    """Share of the TPOT SLO to which rollouts may stretch serving's tokens (ROSE §4.1). By default rollouts
    spend none of it."""
    deployment: Deployment | None = None
    """The phases that a serving engine computes. The default is what its KV connector's role says, or else
    both."""
    lend_idle_s: float | None = Field(default=None, gt=0)
    """Time without a request after which a serving engine lends its headroom to rollouts, as on an instance
    that an autoscaler took out of service. By default it never does."""
    slo_ttft_ms: float = Field(default=500.0, gt=0)
    """The time to first token that serving keeps."""
    slo_tpot_ms: float = Field(default=150.0, gt=0)
    """The mean time per output token that serving keeps."""
    itl_cap_ms: float | None = Field(default=None, gt=0)
    """The longest gap between tokens that the gate may cause. The default is the TPOT SLO, or 1.5 TPOT
    targets if that is more."""
    max_step_ms: float | None = Field(default=None, gt=0)
    """The longest rollout step, even on an idle GPU, because a request that arrives may wait for the step's
    end. The serving engine's setting holds for both engines. The default is a quarter of the TTFT SLO, or on
    a decoder half the TPOT SLO."""
    chunk_tokens: int = Field(default=512, gt=0, le=512)
    """The most tokens of a rollout step, 512 at most."""
    stall_s: float = Field(default=2.0, gt=0)
    """How long a rollout request may hold a place while no rollout step runs, or while serving has the memory
    that it needs, before it ends as a stall."""
    lease_s: float = Field(default=10.0, gt=0)
    """How long an idle rollout slab keeps its prefix cache."""
    high_watermark: float = Field(default=0.5, gt=0, le=1)
    """Share of the headroom that serving may use before it cuts rollouts' budget."""
    takes_weights: bool = False
    """Whether a serving engine takes new weights while it runs, as a rollout engine always does."""
    has_subscriber: bool = False
    """Whether a subscriber beside the engine brings it new weights; rose serve and rose node set this. Until
    it has, the engine gets no turns of a job whose run may have published weights."""
    insecure: bool = False
    """Whether the engine may listen beyond this machine without keys."""
    poison_slabs: bool = False
    """For tests: fills a slab with NaN before it leaves, to make a later read of it visible. Costs 70 us
    per 2 MiB."""
    serving_window_s: float = Field(default=30.0, gt=0)
    """Window of serving's recent peak usage, which rollout budgets leave to it."""
    floor_slabs: int | None = Field(default=None, ge=0)
    """The slabs that a serving engine keeps for its KV and prefix cache when rollouts want memory. The
    default is the size of the pool's headroom, which rollouts never get."""
    compute_cpus: str | None = None
    """CPUs that stand for the GPU on a CPU-only host, for example "0". Only the model's thread is pinned
    there."""

    @classmethod
    def parse(cls, additional_config: Mapping[str, Any]) -> "EngineSettings | None":
        """Returns the settings in vLLM's ``additional_config``, or None without the ``rose`` key.

        Raises:
            ConfigError: a value is bad; the message is one line with the key and the fix.
        """
        raw = additional_config.get(CONFIG_KEY)
        if raw is None:
            return None
        if not isinstance(raw, Mapping):
            raise ConfigError(f"--additional-config: '{CONFIG_KEY}' must be an object, got {raw!r}")
        try:
            return cls.model_validate(dict(raw))
        except ValidationError as error:
            raise ConfigError(_one_line(error)) from error

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problem = (
            self._role_problem() or self.gate_problem(self.gate_mode, None) or bound_problem(self.allow_harm)
        )
        if problem is not None:
            raise ValueError(problem)
        return self

    def _role_problem(self) -> str | None:
        if self.role is Role.ROLLOUT and self.deployment not in (None, Deployment.COLLOCATED):
            return (
                f"deployment {self.deployment}: a rollout engine computes both phases wherever it runs; "
                "set it in the serving engine alone"
            )
        if self.role is Role.ROLLOUT and self.spend_slo is not None:
            return "spend_slo: the serving engine says what rollouts may spend; set it there alone"
        if self.spend_slo is not None and self.gate_mode is not GateMode.DUAL:
            return f"spend_slo with gate {self.gate}: only the dual gate spends slack; leave one of them out"
        if self.lend_idle_s is not None and (self.role is Role.ROLLOUT or self.pool is None):
            return "lend_idle_s: only a serving engine with a pool has anything to lend; leave it out"
        if self.floor_slabs is not None and (self.role is Role.ROLLOUT or self.pool is None):
            return "floor_slabs: only a serving engine with a pool keeps slabs from rollouts; leave it out"
        return None

    def gate_problem(self, mode: GateMode, tpot_target_ms: float | None) -> str | None:
        """Returns why a gate mode or a TPOT target does not fit the other settings, or None if both do."""
        deployment = self.deployment if self.deployment is not None else Deployment.COLLOCATED
        if problem := mode_problem(mode, deployment):
            return problem
        if tpot_target_ms is None or tpot_target_ms <= self.slo_tpot_ms:
            return None
        return (
            f"tpot_target_ms is {tpot_target_ms:g}, above slo_tpot_ms of {self.slo_tpot_ms:g}: "
            "the gate would aim past the SLO; lower the target or raise the SLO"
        )

    def named(self, pid: int) -> "EngineSettings":
        """Returns these settings with an engine id made of role and ``pid``, unless one was given."""
        return self if self.engine_id else self.model_copy(update={"engine_id": f"{self.role}-{pid}"})

    def of_rank(self, rank: int) -> Self:
        """Returns the settings of a data-parallel rank, which has a pool and an engine id of its own."""
        if rank == 0:
            return self
        pool = pool_of_rank(self.pool, rank) if self.pool is not None else None
        return self.model_copy(update={"pool": pool, "engine_id": f"{self.engine_id}-{rank}"})

    def deployed(self, deployment: Deployment) -> "EngineSettings":
        """Returns these settings with a deployment. Raises: ConfigError if the gate mode doesn't fit it."""
        found = self.model_copy(update={"deployment": deployment})
        if problem := found.gate_problem(self.gate_mode, None):
            raise ConfigError(f"--additional-config: '{CONFIG_KEY}': {problem}")
        return found

    @property
    def gate_mode(self) -> GateMode:
        """The gate's mode at the start."""
        if self.gate is not None:
            return self.gate
        spends = self.role is Role.ROLLOUT or self.spend_slo is not None
        return GateMode.DUAL if spends else GateMode.IDLE

    @property
    def is_updated(self) -> bool:
        """Whether new weights may come while the engine runs."""
        return self.role is Role.ROLLOUT or self.takes_weights

    def slo(self) -> SLO:
        return SLO(ttft_s=self.slo_ttft_ms / 1000, tpot_s=self.slo_tpot_ms / 1000)

    def gate_settings(self, mode: GateMode, tpot_target_ms: float | None = None) -> GateSettings:
        """Returns the gate's settings for a mode, and for a TPOT target if one is given."""
        target_ms = tpot_target_ms
        if target_ms is None and self.spend_slo is not None:
            target_ms = self.spend_slo * self.slo_tpot_ms
        return GateSettings(
            mode=mode,
            deployment=self.deployment if self.deployment is not None else Deployment.COLLOCATED,
            slo=self.slo(),
            tpot_target_s=None if target_ms is None else target_ms / 1000,
            itl_cap_s=None if self.itl_cap_ms is None else self.itl_cap_ms / 1000,
            max_step_s=None if self.max_step_ms is None else self.max_step_ms / 1000,
            chunk_tokens=self.chunk_tokens,
            stall_timeout_s=self.stall_s,
        )

    def check_floor(self, num_slabs: int) -> None:
        """Raises: ConfigError if a pool of ``num_slabs`` slabs is too small for the floor."""
        if self.floor_slabs is not None and self.floor_slabs >= num_slabs:
            raise ConfigError(
                f"floor_slabs {self.floor_slabs}: pool {self.pool} has {num_slabs} slabs, and rollouts need "
                f"at least 1: use {num_slabs - 1} or fewer"
            )

    def budget_policy(self, pool: PoolClient) -> BudgetPolicy:
        is_serving = self.role is Role.SERVING
        floor = self.floor_slabs if self.floor_slabs is not None else pool.headroom_slabs
        return BudgetPolicy(
            num_slabs=pool.num_slabs,
            headroom_slabs=pool.headroom_slabs,
            high_watermark=self.high_watermark,
            floor_slabs=floor if is_serving else 0,
        )


def pool_of_rank(name: str, rank: int) -> str:
    """Returns the name of a data-parallel rank's pool, where ``name`` is the first rank's."""
    return f"{name}-{rank}" if rank > 0 else name


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if not key:  # two settings that don't fit each other
        return f"--additional-config: '{CONFIG_KEY}': {first['ctx']['error']}"
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, EngineSettings.model_fields, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return f"--additional-config: unknown key '{CONFIG_KEY}.{key}'{hint}"
    return f"--additional-config: '{CONFIG_KEY}.{key}': {first['msg']} (got {first['input']!r})"
