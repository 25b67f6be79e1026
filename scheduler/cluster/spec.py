"""The files that users write about jobs: JOB.yaml, and JOBS.yaml with several jobs and the pools for them.

A file that parses gives jobs that each fit the pools' nodes alone. Every error names the job, the constraint
and the numbers.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from rose.config import Section
from rose.errors import ConfigError
from rose.scheduler.cluster.pools import GPUS_PER_NODE, H20, H800, HOST_BYTES, Pool, Pools
from rose.scheduler.group.model import Job, Phase, SloKind

DEFAULT_POLICY = "lifetime-static"
"""The policy of the running scheduler, and of the commands that say or simulate what it would do."""
JOBS_EXAMPLE = """\
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
PHASE_NAME = r"^[a-z][a-z0-9_-]{0,31}$"
"""The names of phases. A phase's folder in the host cache has its name."""
_GB = 10**9


class PhaseSpec(Section):
    """One phase. `seconds` at `max_tokens`; without them the job has to be profiled before it is placed."""

    pool: str | None = None
    """The pool's name, which is checked. None: the pool of the phase's kind."""
    nodes: Annotated[int, Field(ge=0, description="whole nodes; 0 for a phase that needs none")] = 1
    seconds: Annotated[float | None, Field(gt=0)] = None
    """The longest time that the phase takes, copies of its working set included."""
    memory_gb: Annotated[float, Field(ge=0, description="host memory on each node while suspended")] = 0.0
    after: tuple[str, ...] = ()
    """The phases that come before it in an iteration."""


class OutsideSpec(Section):
    """The longest times of an iteration in which the job is in no phase."""

    after_rollout_s: Annotated[float, Field(ge=0)] = 0.0
    """From the end of the rollout to training."""
    after_train_s: Annotated[float, Field(ge=0)] = 0.0
    """From the end of training to the next rollout."""


class BorrowSpec(Section):
    """What a job's turns may use of the serving fleet, and whose weights they need there."""

    run_id: Annotated[str, Field(min_length=1, description="the training run whose weights its turns get")]
    model: Annotated[str | None, Field(description="the model of its turns; null: any of the fleet's")] = None
    max_serving_gpus: Annotated[
        int | None,
        Field(ge=1, description="N_serving, the most that it borrows; null: the GPUs of its rollout nodes"),
    ] = None
    fewest_nodes: Annotated[
        int | None,
        Field(ge=1, description="the fewest rollout nodes that it keeps while it borrows; null: all"),
    ] = None
    asked_nodes: Annotated[
        int | None,
        Field(ge=1, description="set by the scheduler: the rollout nodes before it handed some back"),
    ] = None
    weight: Annotated[
        float, Field(ge=1e-3, le=1e3, description="its part of the tokens that jobs contend for")
    ] = 1.0


class JobSpec(Section):
    """One RL job as its user describes it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    """The job's name, for all commands and for its files."""
    phases: dict[Annotated[str, Field(pattern=PHASE_NAME)], PhaseSpec]
    """`rollout` and `train`, and any others, which need no nodes: `sync`, `checkpoint`."""
    outside: OutsideSpec = OutsideSpec()
    """The time that the job spends in no phase."""
    slo: Annotated[float, Field(description="longest allowed iteration over that of the job alone")] = 2.0
    slo_kind: SloKind = SloKind.ITERATION
    """Whether the SLO bounds each iteration, or their mean."""
    max_tokens: Annotated[int, Field(ge=1)]
    """The length of the longest response."""
    iterations: Annotated[int, Field(ge=1)]
    """The iterations after which the job is done."""
    borrow: BorrowSpec | None = None
    """Lets its rollouts also run on serving GPUs. None: they run on the job's own nodes alone."""

    @model_validator(mode="after")
    def _could_run(self) -> Self:
        if not self.slo > 1:
            raise ValueError(
                f"job {self.name}: slo {self.slo:g} allows no slowdown at all; a shared job needs more than 1"
            )
        if missing := sorted(set(Phase) - set(self.phases)):
            close = difflib.get_close_matches(missing[0], set(self.phases) - set(Phase), n=1)
            fix = f"{close[0]} may be a misspelling of it" if close else "add it"
            raise ValueError(f"job {self.name}: phase {missing[0]} is missing; {fix}")
        for name, phase in self.phases.items():
            if name in set(Phase) and phase.nodes == 0:
                raise ValueError(f"job {self.name}: {name} with nodes: 0; {name} needs at least one node")
            if name not in set(Phase) and phase.nodes:
                raise ValueError(
                    f"job {self.name}: {name} with nodes: {phase.nodes}; only rollout and train hold nodes; "
                    "write nodes: 0"
                )
        fewest = self.borrow.fewest_nodes if self.borrow is not None else None
        if fewest is not None and fewest > (nodes := self.phases["rollout"].nodes):
            raise ValueError(
                f"job {self.name}: borrow.fewest_nodes {fewest}: the job asks for {nodes} rollout nodes; "
                f"use at most {nodes}, or leave it out"
            )
        self._check_order()
        return self

    @field_validator("phases", mode="before")
    @classmethod
    def _others_need_no_nodes(cls, phases: Any) -> Any:
        if not isinstance(phases, Mapping):
            return phases
        return {
            name: {"nodes": 0, **phase} if isinstance(phase, Mapping) and name not in set(Phase) else phase
            for name, phase in phases.items()
        }

    def free_phases(self, after: Phase) -> list[str]:
        """Names the phases without nodes between the end of this phase and the next that holds some.

        A phase that comes after neither is between training and the next rollout.
        """
        return [name for name in self.phases if name not in set(Phase) and self._follows(name) is after]

    def after_s(self, phase: Phase) -> float:
        """The longest time from the end of a phase until the job asks for the next."""
        outside = self.outside
        outside_s = outside.after_rollout_s if phase is Phase.ROLLOUT else outside.after_train_s
        return outside_s + sum(self.phases[name].seconds or 0.0 for name in self.free_phases(phase))

    def _follows(self, name: str) -> Phase:
        earlier, left = set[str](), [name]
        while left:
            left += [each for each in self.phases[left.pop()].after if each not in earlier]
            earlier.update(left)
        is_between = Phase.ROLLOUT in earlier and Phase.TRAIN not in earlier
        return Phase.ROLLOUT if is_between else Phase.TRAIN

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
        for name in (*self.free_phases(Phase.ROLLOUT), *self.free_phases(Phase.TRAIN)):
            if self.phases[name].seconds is None:
                raise ConfigError(f"job {self.name}: {name} has no seconds; rose sched profile measures them")
        return Job(
            name=self.name,
            rollout_s=rollout.seconds or 0.0,
            train_s=train.seconds or 0.0,
            after_rollout_s=self.after_s(Phase.ROLLOUT),
            after_train_s=self.after_s(Phase.TRAIN),
            num_rollout_nodes=rollout.nodes,
            num_train_nodes=train.nodes,
            slo=self.slo,
            slo_kind=self.slo_kind,
            num_iterations=self.iterations,
            rollout_bytes=round(rollout.memory_gb * _GB),
            train_bytes=round(train.memory_gb * _GB),
            max_serving_gpus=self._max_serving_gpus(pools),
            fewest_rollout_nodes=self.borrow.fewest_nodes if self.borrow is not None else None,
        )

    @property
    def asked_nodes(self) -> int:
        """The rollout nodes that the job asked for. Right-sizing may have handed some back."""
        asked = self.borrow.asked_nodes if self.borrow is not None else None
        return asked if asked is not None else self.phases["rollout"].nodes

    @property
    def fewest_nodes(self) -> int:
        """The rollout nodes that the job keeps at least."""
        fewest = self.borrow.fewest_nodes if self.borrow is not None else None
        return fewest if fewest is not None else self.phases["rollout"].nodes

    def _max_serving_gpus(self, pools: Pools) -> int:
        """At most as many as the nodes that it asked for have, which at best halves its rollout."""
        if self.borrow is None:
            return 0
        most = self.asked_nodes * pools.rollout.gpus_per_node
        own = self.borrow.max_serving_gpus
        return min(own, most) if own is not None else most

    def _check_phase(self, name: str, phase: PhaseSpec, pool: Pool) -> None:
        if phase.pool is not None and phase.pool != pool.name:
            raise ConfigError(
                f"job {self.name}: {name} names pool {phase.pool}, but {name} phases run on "
                f"{pool.name}; correct `pool`, or leave it out"
            )
        if phase.seconds is None:
            raise ConfigError(f"job {self.name}: {name} has no seconds; rose sched profile measures them")
        if phase.memory_gb * _GB > pool.host_bytes:
            raise ConfigError(
                f"job {self.name}: {name} keeps {phase.memory_gb:g} GB on each node, but {pool.name} nodes "
                f"have {pool.host_bytes / _GB:g} GB; use more nodes or a smaller state"
            )
        if pool.num_nodes is not None and phase.nodes > pool.num_nodes:
            raise ConfigError(
                f"job {self.name}: {name} needs {phase.nodes} nodes, but pool {pool.name} has "
                f"{pool.num_nodes}; use fewer"
            )


class PoolSpec(Section):
    """Nodes of one kind."""

    name: Annotated[str, Field(min_length=1)]
    """The name of the kind, such as h20."""
    dollars_per_gpu_hour: Annotated[float, Field(ge=0)]
    """The price of a GPU of these nodes."""
    gpus_per_node: Annotated[int | None, Field(ge=1)] = None
    """The GPUs of a node, for its price and for how many serving GPUs a job may borrow.

    None: those that the node takes of a Ray node, or 8.
    """
    host_gb: Annotated[float, Field(gt=0)] = HOST_BYTES / _GB
    """The host memory of a node for suspended phases."""
    num_nodes: Annotated[int | None, Field(ge=1)] = None
    """The most nodes that all groups may have. None: no limit."""

    def to_pool(self, num_gpus: float | None = None) -> Pool:
        """Returns the pool. num_gpus: what a node takes of a Ray node; None: not known."""
        given = self.gpus_per_node if self.gpus_per_node is not None else num_gpus
        return Pool(
            name=self.name,
            dollars_per_gpu_hour=self.dollars_per_gpu_hour,
            gpus_per_node=int(given) if given else GPUS_PER_NODE,
            host_bytes=round(self.host_gb * _GB),
            num_nodes=self.num_nodes,
        )


def _spec_of(pool: Pool) -> PoolSpec:
    return PoolSpec(name=pool.name, dollars_per_gpu_hour=pool.dollars_per_gpu_hour, num_nodes=pool.num_nodes)


class PoolsSpec(Section):
    """The pools of a cluster."""

    rollout: PoolSpec = _spec_of(H20)
    """The nodes for rollouts."""
    train: PoolSpec = _spec_of(H800)
    """The nodes for training."""
    serving_gpus: Annotated[int, Field(ge=0, description="the most that all jobs borrow together")] = 0
    serving_dollars_per_gpu_hour: Annotated[
        float, Field(ge=0, description="the price of a borrowed GPU; 0: serving pays for it anyway")
    ] = 0.0
    max_residents: Annotated[int, Field(ge=1, description="most jobs in a group")] = 5

    @model_validator(mode="after")
    def _different(self) -> Self:
        if self.rollout.name == self.train.name:
            raise ValueError(f"both pools are named {self.rollout.name}; name them apart")
        return self

    def to_pools(self, num_gpus: Mapping[str, float] | None = None) -> Pools:
        """Returns the pools. num_gpus: what a node of each kind takes of a Ray node, as far as it is
        known."""
        known = num_gpus if num_gpus is not None else {}
        return Pools(
            rollout=self.rollout.to_pool(known.get(Phase.ROLLOUT)),
            train=self.train.to_pool(known.get(Phase.TRAIN)),
            num_serving_gpus=self.serving_gpus,
            serving_dollars_per_gpu_hour=self.serving_dollars_per_gpu_hour,
            max_residents=self.max_residents,
        )


class ClusterSpec(Section):
    """JOBS.yaml: pools, and jobs in the order in which they come."""

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
