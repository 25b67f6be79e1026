"""The nodes that can be had: what they cost, what their hosts hold, how many there are.

Owns the prices and the limits of a node. Costs are dollars an hour of nodes alone.

Source: WEAVE Table 1 (prices) and §3 (1 to 2 TB of host memory, two to five resident jobs).
"""

from dataclasses import dataclass, field

from rose.scheduler.group.model import Group

HOST_BYTES = 2 * 10**12
GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Nodes of one kind. `num_nodes` None: as many as are paid for."""

    name: str
    dollars_per_gpu_hour: float
    gpus_per_node: int = GPUS_PER_NODE
    host_bytes: int = HOST_BYTES
    num_nodes: int | None = None

    @property
    def dollars_per_node_hour(self) -> float:
        return self.dollars_per_gpu_hour * self.gpus_per_node


H20 = Pool(name="h20", dollars_per_gpu_hour=1.85)
H800 = Pool(name="h800", dollars_per_gpu_hour=5.28)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The pools of a cluster.

    `num_serving_gpus` may be borrowed for rollouts and taken back at any time, so no certificate counts on
    them. `serving_dollars_per_gpu_hour` is their price, which decides whether jobs borrow (`borrowed.lend`).
    By default they cost nothing, because the serving fleet pays for them anyway. `max_residents` is the most
    jobs in a group.
    """

    rollout: Pool = field(default=H20)
    train: Pool = field(default=H800)
    num_serving_gpus: int = 0
    serving_dollars_per_gpu_hour: float = 0.0
    max_residents: int = 5

    def dollars_per_hour(self, group: Group) -> float:
        """Returns the cost of a group's nodes, used or not."""
        return self.price(group.num_rollout_nodes, group.num_train_nodes)

    def price(self, num_rollout_nodes: int, num_train_nodes: int) -> float:
        """Dollars an hour of this many nodes."""
        return (
            num_rollout_nodes * self.rollout.dollars_per_node_hour
            + num_train_nodes * self.train.dollars_per_node_hour
        )
