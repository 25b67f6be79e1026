"""The files of `rose sched serve` (pools and groups) and `rose sched submit` (a job to run).

They extend the files of `rose sched explain`, which rose.scheduler.cluster.spec reads.
"""

from enum import StrEnum
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rose.config import Section, parse_config, read_yaml
from rose.errors import ConfigError
from rose.scheduler.cluster.groups import PAUSE_S
from rose.scheduler.cluster.pools import Pools
from rose.scheduler.cluster.preemption import Preemption
from rose.scheduler.cluster.spec import DEFAULT_POLICY, JobSpec, PoolsSpec
from rose.scheduler.group.model import Phase
from rose.scheduler.group.tail import RolloutSpeed

EXAMPLE = """\
name: math-7b
command: [python, train.py]
slo: 1.5
max_tokens: 8192
iterations: 500
phases:
  rollout: {nodes: 1, seconds: 120, memory_gb: 276}
  train: {nodes: 1, seconds: 100, memory_gb: 240, after: [rollout]}
"""


LEAST = (
    "{name: math-7b, command: [python, train.py], max_tokens: 8192, iterations: 500, "
    "phases: {rollout: {seconds: 120}, train: {seconds: 100}}}"
)
"""The least file of a job, on one line."""


class TailSpec(Section):
    """How fast a rollout node decodes, as profiled. Without it, a job's tail is never moved.

    A decode step takes `step_s + running responses on the node * request_s`.
    """

    step_s: float = Field(gt=0)
    """The part of a step that does not depend on the responses."""
    request_s: float = Field(ge=0)
    """The part of a step for each response."""
    prompt_tokens: int = Field(ge=0)
    """The length of a prompt."""
    prefill_tokens_per_s: float = Field(gt=0)
    """The speed at which a moved response is prefilled again."""
    pause_s: float = Field(default=1.0, ge=0)
    """The time to stop the responses and send them on."""


class RaySpec(Section):
    """A Ray instance that lives as long as the job's process. The job's `ray.init()` finds it."""

    num_cpus: int = Field(default=1, ge=1)
    """The CPUs that the instance offers."""
    num_gpus: int = Field(default=0, ge=0)
    """The GPUs that the instance offers."""
    object_store_gb: float | None = Field(default=None, gt=0)
    """The size of the object store. None: Ray's own default, a share of the host's memory."""


class Launch(StrEnum):
    """How the command of a job is started."""

    ONCE = "once"
    """One process, on the job's first rollout node. It starts its ranks itself, as torchrun does."""
    PER_NODE = "per-node"
    """One process on each node, such as torchrun with $NODE_RANK and $MASTER_ADDR."""
    PER_RANK = "per-rank"
    """`num_ranks` processes, as many on each node, with RANK, WORLD_SIZE and LOCAL_RANK."""


class PlacementStrategy(StrEnum):
    """Where a Ray cluster puts the nodes of the job's group."""

    PACK = "pack"
    """Ray puts the nodes on few hosts, if they have room."""
    SPREAD = "spread"
    """Ray puts the nodes on many hosts, if they have room."""
    STRICT_PACK = "strict-pack"
    """Ray puts all nodes on one host."""
    STRICT_SPREAD = "strict-spread"
    """Ray puts each node on a host of its own."""

    @property
    def is_strict(self) -> bool:
        """Whether a group keeps the nodes that it starts with: Ray can't keep the promise for more."""
        return self in (PlacementStrategy.STRICT_PACK, PlacementStrategy.STRICT_SPREAD)


class RunSpec(JobSpec):
    """JOB.yaml of a job that is run and not only placed."""

    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments. Each attempt runs it in `folder`."""
    folder: str = "."
    """The folder in which the command runs, relative to the job's file."""
    priority: int = 0
    """The queue tries the highest first; equal ones by their teams' shares, then by submission.

    A queued job may take the place of a running one of lower priority.
    """
    team: str | None = None
    """The job's team in the cluster's file, whose share and quota count. None: no team, and no quota."""
    group: str | None = None
    """A group of the cluster's file, or a running one. None: the policy chooses."""
    rollout_nodes: tuple[int, ...] | None = None
    """The rollout nodes of `group` that the job is pinned to. None: the first ones."""
    num_ranks: int = Field(default=1, ge=1)
    """The processes that enter the phases together: torchrun's WORLD_SIZE."""
    launch: Launch = Launch.ONCE
    """How the command is started: once, on each node, or for each rank."""
    placement: PlacementStrategy = PlacementStrategy.PACK
    """Where a Ray cluster puts the nodes. Jobs share a group only with jobs of the same placement."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """What a Ray cluster prepares on each host, such as `working_dir` and `pip`.

    A `working_dir` that is a folder, relative to the file, is sent to each host, and the command runs there.
    """
    max_restarts: int = Field(default=3, ge=0)
    """The crashes without an iteration in between that the job survives; the next one fails it.

    0: the job can't be started again, and is never preempted.
    """
    start_s: float = Field(default=1800.0, gt=0)
    """The time from an attempt's start in which each rank must call a phase; else the attempt is ended."""
    hung_s: float = Field(default=1800.0, gt=0)
    """The time by which a rank may be later than the file says, in a phase without a report of progress or
    outside of phases; then the attempt is ended. In its first phase `start_s` counts if it is longer."""

    tail: TailSpec | None = None
    """Set it for rollouts on several nodes whose `rose.phase` has a `move_tail`.

    `rose sched profile` measures it where the rollouts run on `OwnEngines`.
    """
    ray: RaySpec | None = None
    """Gives each attempt a Ray instance of its own. None: it gets none."""

    @model_validator(mode="after")
    def _pins_make_sense(self) -> Self:
        nodes = self.rollout_nodes
        if nodes is None:
            return self
        if self.group is None:
            raise ValueError(
                f"rollout_nodes {list(nodes)} belong to no group: add `group`, or remove `rollout_nodes`"
            )
        wanted = self.phases["rollout"].nodes
        if len(nodes) != wanted or len(set(nodes)) != len(nodes) or min(nodes) < 0:
            raise ValueError(
                f"rollout_nodes {list(nodes)}: expected {wanted} different numbers from 0, as phases.rollout "
                f"asks for {wanted} nodes"
            )
        return self

    @model_validator(mode="after")
    def _can_be_right_sized(self) -> Self:
        if self.borrow is None or self.borrow.fewest_nodes is None:
            return self
        if self.group is not None:
            raise ValueError(
                f"borrow.fewest_nodes: group is {self.group}, but only a job whose group the policy chooses "
                "can hand nodes back; remove `group` or `borrow.fewest_nodes`"
            )
        if self.has_ranks_on_each_node and self.num_ranks % self.num_nodes:
            raise ValueError(
                f"borrow.fewest_nodes: num_ranks {self.num_ranks} on {self.num_nodes} nodes; each node keeps "
                f"an equal number when others are handed back: use a multiple of {self.num_nodes}"
            )
        return self

    @model_validator(mode="after")
    def _ranks_are_equal(self) -> Self:
        num_nodes = self.num_nodes
        if self.launch is Launch.PER_RANK and self.num_ranks % num_nodes:
            raise ValueError(
                f"num_ranks {self.num_ranks} on {num_nodes} nodes: launch per-rank starts equally many on "
                f"each node; use a multiple of {num_nodes}, or another `launch`"
            )
        return self

    @property
    def num_nodes(self) -> int:
        """The nodes that the job asks for, of both pools."""
        return self.phases["rollout"].nodes + self.phases["train"].nodes

    @property
    def has_ranks_on_each_node(self) -> bool:
        """Whether the job has several ranks, and each node starts its own."""
        return self.num_ranks > 1 and self.launch is not Launch.ONCE

    def ranks_on(self, num_rollout_nodes: int) -> int:
        """Returns the job's ranks on another number of rollout nodes: each node keeps as many."""
        if not self.has_ranks_on_each_node:
            return self.num_ranks
        num_nodes = self.num_nodes - self.phases["rollout"].nodes + num_rollout_nodes
        return self.num_ranks // self.num_nodes * num_nodes

    @property
    def speed(self) -> RolloutSpeed | None:
        """The rollout's speed, with each node as one worker; None if it is unknown."""
        if self.tail is None:
            return None
        return RolloutSpeed(
            num_workers=self.phases["rollout"].nodes, max_tokens=self.max_tokens, **self.tail.model_dump()
        )

    @property
    def pins(self) -> tuple[int, ...]:
        """The rollout nodes of the job's group that it is pinned to."""
        return (
            self.rollout_nodes
            if self.rollout_nodes is not None
            else tuple(range(self.phases["rollout"].nodes))
        )


def read_job(path: Path) -> tuple[dict[str, Any], RunSpec]:
    """A job's file as it was written, and as it was understood. Raises: ConfigError."""
    content = read_yaml(path, RunSpec)
    try:
        return content, parse_config(content, RunSpec, str(path))
    except ConfigError as error:
        required = [name for name, field in RunSpec.model_fields.items() if field.is_required()]
        missing = [name for name in required if name not in content]
        if not missing or not str(error).startswith(f"{path}: {missing[0]}: missing"):
            raise
        raise ConfigError(f"{path}: {', '.join(missing)} missing; the least job is {LEAST}") from error


class GroupSpec(Section):
    """Nodes that jobs may be pinned to, whether or not any job runs there."""

    num_rollout_nodes: int = Field(default=1, ge=1)
    """The rollout nodes of the group."""
    num_train_nodes: int = Field(default=1, ge=1)
    """The training nodes of the group."""


class TeamSpec(Section):
    """A team's part in the cluster. It uses the nodes that its running jobs ask for, shared or not: their
    price counts for its share, their number for its quota."""

    share: float = Field(default=1.0, gt=0)
    """Orders queued jobs of equal priority: those of the team that uses least for its share come first."""
    max_rollout_nodes: int | None = Field(default=None, ge=1)
    """The most rollout nodes that the team may use: its quota. None: no quota."""
    max_train_nodes: int | None = Field(default=None, ge=1)
    """The same for training nodes."""

    def quota(self, phase: Phase) -> int | None:
        """Returns the most nodes of this kind that the team may use."""
        return self.max_rollout_nodes if phase is Phase.ROLLOUT else self.max_train_nodes


class PreemptionSpec(Section):
    """When a waiting job takes the place of a running one, which goes back to the queue after an iteration.
    By default, none does.

    A job with `max_restarts: 0` can't be started again, and is never preempted.
    """

    by_priority: bool = False
    """A job takes the places of jobs of lower priority."""
    by_share: bool = False
    """At equal priority, a job takes places from teams that use more for their shares than its own team."""
    min_run_s: float = Field(default=600.0, ge=0)
    """A job runs at least this long before it gives its place away."""


class RayClusterSpec(Section):
    """The Ray cluster that runs the jobs. A node of a group is a bundle of resources on one Ray node."""

    address: str = "auto"
    """Where its head answers: HOST:PORT. auto: the one that runs on this host, or $RAY_ADDRESS."""
    rollout: dict[str, float] = Field(default={"GPU": 8, "CPU": 8})
    """What a rollout node takes of a Ray node, in Ray's names. Custom resources choose the hosts."""
    train: dict[str, float] = Field(default={"GPU": 8, "CPU": 8})
    """The same for a training node."""
    hung_s: float = Field(default=60.0, ge=1)
    """The time after which a part of a job that does not answer is ended, and the job starts again."""

    @field_validator("rollout", "train")
    @classmethod
    def _takes_something(cls, bundle: dict[str, float]) -> dict[str, float]:
        if not bundle or min(bundle.values()) <= 0:
            raise ValueError(f"{bundle}: a node takes a positive amount of each resource; remove the others")
        if (gpus := bundle.get("GPU", 1)) != int(gpus):
            raise ValueError(f"{gpus} GPUs: a node takes whole GPUs, which no other group uses")
        return bundle

    def bundle(self, node: str) -> dict[str, float]:
        """Returns the resources of a node such as rollout-0."""
        return self.rollout if node.startswith(Phase.ROLLOUT) else self.train


class RouterSpec(Section):
    """The router of the serving fleet, which lends GPUs to jobs.

    The environment has its admin key (`ROSE_ROUTER_ADMIN_KEY`).
    """

    url: str
    """http://HOST:PORT, or those of several routers before the same workers, separated by commas."""

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        urls = [each.strip().rstrip("/") for each in url.split(",")]
        for parts in map(urlsplit, urls):
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"expected http://HOST:PORT of rose router, got {url!r}")
        return ",".join(urls)

    def variables(self, key: str) -> dict[str, str]:
        """Returns how a job's processes reach the router, for ROSE's trainers and for OpenAI clients."""
        return {
            "ROSE_ROUTER_URL": self.url,
            "ROSE_ROUTER_API_KEY": key,
            "OPENAI_BASE_URL": f"{self.url.split(',')[0]}/v1",
            "OPENAI_API_KEY": key,
        }


class ServeSpec(Section):
    """CLUSTER.yaml of `rose sched serve`."""

    pools: PoolsSpec = PoolsSpec()
    """The nodes of both kinds, and the serving GPUs that jobs may borrow."""
    policy: str = DEFAULT_POLICY
    """The policy that places the jobs that name no group. `lifetime` moves them after an iteration, too.

    `lifetime-multirate` does that too, and lets short jobs of a group run more often than long ones.
    """
    move_pause_s: float = Field(default=PAUSE_S, ge=0)
    """The time that a move is assumed to cost the job. Its SLO must allow it, and the gain must exceed it."""
    groups: dict[str, GroupSpec] = Field(default_factory=dict)
    """Groups that jobs may name. For all other jobs the policy forms groups."""
    teams: dict[str, TeamSpec] = Field(default_factory=dict)
    """The shares and quotas of teams, by name."""
    preemption: PreemptionSpec = PreemptionSpec()
    """Which jobs take the places of running ones. By default, none does."""
    ray: RayClusterSpec | None = None
    """The Ray cluster that runs the jobs. None: they run on the scheduler's own machine."""
    router: RouterSpec | None = None
    """The router that lends `pools.serving_gpus` GPUs to jobs with `borrow`. None: no job borrows."""
    lease_s: float = Field(default=10.0, gt=0)
    """A permit without a heartbeat for this long is taken back. A dead process is noticed at once instead."""

    def to_pools(self) -> Pools:
        """Returns the pools as policies see them."""
        bundles = {kind: self.ray.bundle(kind) for kind in Phase} if self.ray is not None else {}
        return self.pools.to_pools({kind: each["GPU"] for kind, each in bundles.items() if "GPU" in each})

    def team_of(self, spec: RunSpec) -> str:
        """Names the job's team; empty: it has none, or one that this file lacks."""
        return spec.team if spec.team is not None and spec.team in self.teams else ""

    @model_validator(mode="after")
    def _has_what_it_lends(self) -> Self:
        if self.router is not None and self.pools.serving_gpus == 0:
            raise ValueError(
                "router: pools.serving_gpus is 0, so it would lend nothing; set it to the serving GPUs that "
                "jobs may borrow together, or remove `router`"
            )
        return self

    @model_validator(mode="after")
    def _shares_have_teams(self) -> Self:
        if self.preemption.by_share and not self.teams:
            raise ValueError(
                "preemption.by_share compares teams, and there are none: add `teams`, or remove it"
            )
        return self

    def to_preemption(self) -> Preemption:
        """Returns the rules of preemption with the teams' shares."""
        shares = {name: team.share for name, team in self.teams.items()}
        return Preemption(**self.preemption.model_dump(), shares=shares)

    @field_validator("policy")
    @classmethod
    def _is_known(cls, policy: str) -> str:
        known = ("lifetime-multirate", "lifetime", "lifetime-static", "weave", "solo")
        if policy not in known:
            raise ValueError(f"{policy!r}: a running cluster has the policies {', '.join(known)}")
        return policy
