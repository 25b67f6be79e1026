"""The files that users write about pools and jobs: JOB.yaml and CLUSTER.yaml.

A file that parses gives jobs that each fit the pools' nodes alone. Every error names the job, the constraint
and the numbers.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from rose.config import Section
from rose.errors import ConfigError
from rose.scheduler.cluster.model import Job, SloKind
from rose.scheduler.cluster.pools import H20, H800, HOST_BYTES, Pool, Pools

CLUSTER_EXAMPLE = """\
pools:
  rollout: {name: h20, dollars_per_gpu_hour: 1.85, host_gb: 2000, num_nodes: 40}
  train: {name: h800, dollars_per_gpu_hour: 5.28, host_gb: 2000, num_nodes: 20}
jobs:
  - name: math-7b
    slo: 1.5
    max_tokens: 8192
    iterations: 500
    phases:
      rollout: {pool: h20, nodes: 1, seconds: 120, memory_gb: 276}
      train: {pool: h800, nodes: 1, seconds: 100, memory_gb: 240, after: [rollout]}
      sync: {seconds: 8, after: [train]}
"""
_GB = 10**9


class PhaseSpec(Section):
    """One phase. `seconds` at `max_tokens`; without them the job has to be profiled before it is placed."""

    pool: str | None = None
    nodes: Annotated[int, Field(ge=1, description="8-GPU nodes")] = 1
    seconds: Annotated[float | None, Field(gt=0)] = None
    memory_gb: Annotated[float, Field(ge=0, description="host memory on each node while suspended")] = 0.0
    after: tuple[str, ...] = ()


class JobSpec(Section):
    """One RL job as its user describes it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    phases: dict[str, PhaseSpec]
    slo: Annotated[float, Field(description="longest allowed iteration over the one alone")] = 2.0
    slo_kind: SloKind = SloKind.ITERATION
    max_tokens: Annotated[int, Field(ge=1)]
    iterations: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _could_run(self) -> Self:
        if not self.slo > 1:
            raise ValueError(
                f"job {self.name}: slo {self.slo:g} allows no slowdown at all; a shared job needs more than 1"
            )
        known = {"rollout", "train", "sync"}
        if unknown := sorted(set(self.phases) - known):
            raise ValueError(f"job {self.name}: no phase {unknown[0]}; phases are rollout, train and sync")
        if missing := sorted({"rollout", "train"} - set(self.phases)):
            raise ValueError(f"job {self.name}: phase {missing[0]} is missing; add it")
        self._check_order()
        return self

    def _check_order(self) -> None:
        """Each phase after those it names; what is left when none can start is a cycle."""
        for name, phase in self.phases.items():
            for earlier in phase.after:
                if earlier not in self.phases:
                    raise ValueError(
                        f"job {self.name}: {name} comes after {earlier}, which is no phase of it"
                    )
        left = {name: set(phase.after) for name, phase in self.phases.items()}
        while left:
            ready = {name for name, after in left.items() if not after & set(left)}
            if not ready:
                chain = " -> ".join(f"{name} after {', '.join(sorted(left[name]))}" for name in sorted(left))
                raise ValueError(f"job {self.name}: phases wait for each other ({chain}); remove one `after`")
            left = {name: after for name, after in left.items() if name not in ready}
        if "train" in self.phases["rollout"].after:
            raise ValueError(
                f"job {self.name}: rollout comes after train; training needs the rollout's tokens"
            )

    def to_job(self, pools: Pools) -> Job:
        """Returns the scheduler's Job. Raises: ConfigError if no node of the pools can run it."""
        rollout, train = self.phases["rollout"], self.phases["train"]
        for name, phase, pool in (("rollout", rollout, pools.rollout), ("train", train, pools.train)):
            self._check_phase(name, phase, pool)
        sync = self.phases.get("sync")
        return Job(
            name=self.name,
            rollout_s=rollout.seconds or 0.0,
            train_s=train.seconds or 0.0,
            sync_s=(sync.seconds or 0.0) if sync is not None else 0.0,
            num_rollout_nodes=rollout.nodes,
            num_train_nodes=train.nodes,
            slo=self.slo,
            slo_kind=self.slo_kind,
            num_iterations=self.iterations,
            rollout_bytes=round(rollout.memory_gb * _GB),
            train_bytes=round(train.memory_gb * _GB),
        )

    def _check_phase(self, name: str, phase: PhaseSpec, pool: Pool) -> None:
        if phase.pool is not None and phase.pool != pool.name:
            raise ConfigError(
                f"job {self.name}: {name} wants pool {phase.pool}, {name} phases run on {pool.name}"
            )
        if phase.seconds is None:
            raise ConfigError(f"job {self.name}: {name} has no seconds; rose sched profile measures them")
        if phase.memory_gb * _GB > pool.host_bytes:
            raise ConfigError(
                f"job {self.name}: {name} keeps {phase.memory_gb:g} GB on each node, a {pool.name} node has "
                f"{pool.host_bytes / _GB:g} GB; use more nodes or a smaller state"
            )
        if pool.num_nodes is not None and phase.nodes > pool.num_nodes:
            raise ConfigError(
                f"job {self.name}: {name} needs {phase.nodes} nodes, pool {pool.name} has {pool.num_nodes}"
            )


class PoolSpec(Section):
    """Nodes of one kind."""

    name: Annotated[str, Field(min_length=1)]
    dollars_per_gpu_hour: Annotated[float, Field(ge=0)]
    host_gb: Annotated[float, Field(gt=0)] = HOST_BYTES / _GB
    num_nodes: Annotated[int | None, Field(ge=1)] = None

    def to_pool(self) -> Pool:
        return Pool(
            name=self.name,
            dollars_per_gpu_hour=self.dollars_per_gpu_hour,
            host_bytes=round(self.host_gb * _GB),
            num_nodes=self.num_nodes,
        )


def _spec_of(pool: Pool) -> PoolSpec:
    return PoolSpec(name=pool.name, dollars_per_gpu_hour=pool.dollars_per_gpu_hour, num_nodes=pool.num_nodes)


class PoolsSpec(Section):
    """The pools of a cluster."""

    rollout: PoolSpec = _spec_of(H20)
    train: PoolSpec = _spec_of(H800)
    serving_gpus: Annotated[int, Field(ge=0, description="may be borrowed for rollouts, and taken back")] = 0
    max_residents: Annotated[int, Field(ge=1, description="most jobs in a group")] = 5

    @model_validator(mode="after")
    def _different(self) -> Self:
        if self.rollout.name == self.train.name:
            raise ValueError(f"both pools are named {self.rollout.name}; name them apart")
        return self

    def to_pools(self) -> Pools:
        return Pools(
            rollout=self.rollout.to_pool(),
            train=self.train.to_pool(),
            num_serving_gpus=self.serving_gpus,
            max_residents=self.max_residents,
        )


class ClusterSpec(Section):
    """CLUSTER.yaml: pools, and jobs in the order in which they come."""

    pools: PoolsSpec = PoolsSpec()
    jobs: tuple[JobSpec, ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [job.name for job in self.jobs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"{names.count(twice[0])} jobs are named {twice[0]}; give each a name of its own"
            )
        return self

    def to_jobs(self) -> list[Job]:
        pools = self.pools.to_pools()
        return [job.to_job(pools) for job in self.jobs]
