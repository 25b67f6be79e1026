"""The shape of RAY.yaml: what `rose ray up` places on a Ray cluster.

Each service says what it needs of Ray, and has a `config` with what its own file or flags would say.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rose.config import Section, Settings
from rose.node.launch import check_engine_exposure
from rose.node.node_config import NodeConfig
from rose.ports import check_exposure
from rose.scheduler.rollout.router_config import RouterConfig, build_config
from rose.transfer.relay.embedded import DEFAULT_CAPACITY_BYTES

RAY_EXAMPLE = """\
name: policy
relay: {num_cpus: 1, config: {port: 8400}}
router: {num_cpus: 1, config: {port: 8100, policy: cost}}
nodes:
  - num_gpus: 1
    num_cpus: 8
    config:
      pool: {name: gpu0, num_slabs: 512, headroom_slabs: 32}
      engines:
        - {model: /models/chat, role: serving, port: 8000, slo_ttft_ms: 500, slo_tpot_ms: 100}
        - {model: /models/policy, role: rollout, port: 8001}
"""


_NODE = "on the address of a Ray node"


class ServiceBundle(Section):
    """What one service takes of a Ray node: its bundle in the placement group."""

    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPUs that Ray reserves for the service."""
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs that Ray reserves for the service."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Ray's custom resources, which can choose the nodes that a service may run on."""

    @model_validator(mode="after")
    def _takes_something(self) -> Self:
        if not self.bundle():
            raise ValueError(
                "it asks for no resources, so Ray can't place it; set num_cpus, num_gpus or resources"
            )
        return self

    def bundle(self) -> dict[str, float]:
        """Returns the resources under Ray's names."""
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in asked.items() if amount > 0}


class RelayConfig(Section):
    """The flags of `rose relay`."""

    kind: Literal["embedded", "mooncake"] = "embedded"
    """The store of the weights."""
    host: str | None = None
    """The address to listen on. None: that of the node that Ray chooses."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """The port to listen on; 0 takes any free port."""
    capacity_bytes: Annotated[int, Field(gt=0)] = DEFAULT_CAPACITY_BYTES
    """Memory for objects."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """How a Mooncake store's frames travel."""
    devices: tuple[str, ...] = ()
    """RDMA cards of the relay's node for `rdma`; none: all."""


class RelayService(ServiceBundle):
    config: RelayConfig = RelayConfig()
    """The flags of `rose relay`."""


class RouterService(ServiceBundle):
    config: RouterConfig = RouterConfig()
    """The keys of router.yaml. The rollout engines of `nodes` are workers in addition to its `workers`."""


class NodeService(ServiceBundle):
    config: NodeConfig
    """The keys of node.yaml."""


class RayConfig(Section):
    """RAY.yaml."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")] = "default"
    """The name of the services, for `rose ray status` and `rose ray down`."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "SPREAD"
    """How Ray spreads the services over nodes, in Ray's own word."""
    relay: RelayService | None = None
    """The relay, which all engines follow. None: there is none."""
    router: RouterService | None = RouterService()
    """The router before the rollout engines. null: there is none."""
    nodes: tuple[NodeService, ...] = ()
    """The nodes, each with a pool and its engines."""

    @model_validator(mode="after")
    def _has_services(self) -> Self:
        if not self.services():
            raise ValueError("there is no service; give relay, router or nodes")
        return self

    def check_exposure(self, settings: Settings, *, is_insecure: bool) -> None:
        """Raises: ConfigError if others than a service's own machine would reach it without keys."""
        if self.relay is not None:
            keys = {"ROSE_KEY": settings.key} if self.relay.config.kind == "embedded" else {}
            host = self.relay.config.host
            check_exposure("relay", host if host is not None else _NODE, keys, is_insecure=is_insecure)
        if self.router is not None:
            found = build_config(self.router.config.model_dump(exclude_unset=True), "router", settings)
            host = found.host if "host" in found.model_fields_set else _NODE
            found.check_exposure("router", host, is_insecure=is_insecure)
        for engine in [engine for node in self.nodes for engine in node.config.engines]:
            host = engine.host if "host" in engine.model_fields_set else _NODE
            opened = is_insecure or engine.insecure
            check_engine_exposure(engine.model_copy(update={"host": host, "insecure": opened}))

    def services(self) -> dict[str, ServiceBundle]:
        """Returns the services by name, in the order of start: engines need the relay, and the router the
        engines."""
        nodes = {f"node-{index}": node for index, node in enumerate(self.nodes)}
        named = {"relay": self.relay, **nodes, "router": self.router}
        return {name: service for name, service in named.items() if service is not None}
