"""The Ray cluster as the scheduler sees it: its nodes and their health, and how many groups' nodes fit there.

Owns the connection, the name by which one scheduler owns the cluster, and a thread that asks for the nodes.
Each scheduler has a namespace of its own for what goes on when it ends (adopt.py).
"""

import contextlib
import logging
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray._private.state import state as ray_state  # Ray has no public way to ask which nodes are draining
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # nor to ask which cluster a head has
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rose.errors import ConfigError, WorkerError
from rose.jobs.on_ray.actors import Owner
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.job.spec import RayClusterSpec

logger = logging.getLogger(__name__)

NAMESPACE = "rose-sched"
OWNER = "scheduler"
OWNER_S = 20.0
"""Ray may take so long to notice that an earlier scheduler was killed."""
OTHER_S = 5.0
LOOK_S = 1.0
CONNECT_S = 10.0
HEAD_LATE_S = 5.0
"""People are told that the head is away when it has not answered for this long."""
LIMIT_SETTING, LIMIT_S = "gcs_rpc_server_reconnect_timeout_s", 60.0
"""How long Ray's processes, this one included, do without the head before they end, and its default."""
STILL_S = 5.0
"""A process that looks at the clock again only after this long stood still meanwhile."""


class Silence:
    """How long the head has left a question without an answer. All threads may call.

    Time in which nobody asks, or in which this process stands still, does not count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen_s: float | None = None
        """Up to when the open question's time has been counted; None: no question is open."""
        self._silent_s = 0.0

    def ask(self, now: float) -> None:
        """Notes that the head is asked, again or for the first time since it last answered."""
        with self._lock:
            if self._seen_s is None:
                self._seen_s = now

    def answered(self) -> None:
        """Notes that the head has answered."""
        with self._lock:
            self._seen_s, self._silent_s = None, 0.0

    def seconds(self, now: float) -> float:
        """Returns 0 for a head that has answered all that it was asked. Ask more often than `STILL_S`."""
        with self._lock:
            if self._seen_s is not None:
                self._silent_s += min(now - self._seen_s, STILL_S)
                self._seen_s = now
            return self._silent_s


class RayNodes:
    """The nodes of the cluster that this process has joined."""

    def __init__(
        self,
        spec: RayClusterSpec,
        limits: Mapping[Phase, int | None],
        who: str,
        namespace: str,
        say: Callable[[str], None],
    ) -> None:
        """Joins the cluster as its only scheduler. limits: the most nodes of each pool.

        namespace: of this scheduler's actors. say: hears what is waited for.
        Raises: ConfigError without a cluster, beside another scheduler, or if no Ray node can hold a bundle.
        """
        self._spec = spec
        self._limits = limits
        self._silence = Silence()
        self._closed = threading.Event()
        say(f"the Ray head at {spec.address} to answer")
        _join(spec.address, namespace)
        try:
            self._head = str(ray.get_runtime_context().gcs_address)
            self._cluster_id = _cluster_id(self._head)
            self._is_other = False
            self._limit_s = float(ray_state.get_system_config().get(LIMIT_SETTING, LIMIT_S))
            self._look()
            self._check_bundles()
            self._owner = _own(who, say)
        except Exception:
            ray.shutdown()
            raise
        threading.Thread(target=self._watch, name="rose-ray-nodes", daemon=True).start()

    def check(self) -> None:
        """Raises: WorkerError when the head has been away for half of the time after which Ray ends, or was
        started again without its state."""
        self._check_same()
        if not self.is_there():
            silent_s = self._silence.seconds(time.monotonic())
            raise WorkerError(
                f"the Ray head at {self._head} has not answered for {silent_s:.0f} s, and Ray's nodes end "
                f"after {self._limit_s:.0f} s ({LIMIT_SETTING}) without it; start Ray and then this command "
                "again: jobs go on, or start again after their last iterations if their nodes have ended"
            )

    def _check_same(self) -> None:
        """Raises: WorkerError when the head has another cluster: Ray's own questions to it would abort us."""
        if self._is_other:
            raise WorkerError(
                f"the Ray head at {self._head} was started again without its state, so Ray ends the other "
                "nodes and the jobs with them; start those nodes again and then this command: the jobs start "
                "again after their last iterations (with the head's state in Redis they would have gone on)"
            )

    def is_there(self) -> bool:
        """Returns whether the head may still come back, as far as is known."""
        return not self._is_other and self._silence.seconds(time.monotonic()) <= self._limit_s / 2

    def late(self) -> str | None:
        """Returns what to wait for while the head does not answer; None if it does."""
        if self._silence.seconds(time.monotonic()) <= HEAD_LATE_S:
            return None
        return f"the Ray head at {self._head} to answer; jobs that run go on meanwhile"

    def addresses(self) -> list[str]:
        """Returns the addresses of the living nodes' hosts."""
        return sorted({str(node["NodeManagerAddress"]) for node in self._alive.values()})

    def is_alive(self, ray_node: str) -> bool:
        """Returns whether Ray holds the node for alive, as of this call. Raises: WorkerError."""
        self._check_same()
        return any(node["NodeID"] == ray_node and node["Alive"] for node in ray.nodes())

    def has_died(self, ray_node: str) -> bool:
        """Returns whether Ray held the node for dead when it was last asked. No such node comes back."""
        return ray_node in self._dead

    @property
    def draining(self) -> frozenset[str]:
        """The nodes that are about to go away."""
        return self._draining

    def num_nodes(self) -> dict[Phase, int]:
        """Returns the nodes of each pool that the living Ray nodes can hold at once."""
        free = [dict(node["Resources"]) for name, node in self._alive.items() if name not in self._draining]
        return capacity(free, {kind: self._spec.bundle(kind) for kind in Phase}, self._limits)

    def close(self) -> None:
        self._closed.set()
        ray.shutdown()

    def _watch(self) -> None:
        host, _, port = self._head.rpartition(":")
        while not self._closed.wait(LOOK_S):
            self._silence.ask(time.monotonic())
            with contextlib.suppress(OSError):  # without a head, Ray's own question would wait for long
                socket.create_connection((host, int(port)), timeout=LOOK_S).close()
                try:
                    self._is_other = _cluster_id(self._head) != self._cluster_id
                    if self._is_other:
                        return
                    self._look()
                    self._silence.answered()
                except ray.exceptions.RayError as error:
                    logger.info("the head did not answer reason=%s", error)

    def _look(self) -> None:
        self._draining = frozenset(ray_state.get_draining_nodes())
        nodes = ray.nodes()
        self._alive: dict[str, dict[str, Any]] = {node["NodeID"]: node for node in nodes if node["Alive"]}
        self._dead = {node["NodeID"] for node in nodes} - self._alive.keys()

    def _check_bundles(self) -> None:
        for kind in Phase:
            bundle = self._spec.bundle(kind)
            nodes = [node["Resources"] for node in self._alive.values()]
            if not any(_holds(node, bundle) for node in nodes):
                largest = {name: max(node.get(name, 0) for node in nodes) for name in bundle}
                raise ConfigError(
                    f"ray.{kind}: a {kind} node takes {_shown(bundle)}, and none of the {len(nodes)} Ray "
                    f"nodes can hold that (the most on one: {_shown(largest)}); ask for less in the cluster's"
                    " file, or start larger Ray nodes first"
                )


def _cluster_id(head: str) -> str:
    """Returns the id of the cluster whose head answers there. Raises: RayError."""
    return str(GcsClient(address=head).cluster_id)


def on_node(ray_node: str) -> NodeAffinitySchedulingStrategy:
    """Returns the strategy for work on one node alone."""
    return NodeAffinitySchedulingStrategy(ray_node, soft=False)


def capacity(
    free: Sequence[dict[str, float]],
    bundles: Mapping[Phase, Mapping[str, float]],
    limits: Mapping[Phase, int | None],
) -> dict[Phase, int]:
    """Returns how many nodes of each pool fit at once. Pools share the devices that both want equally."""
    found = dict.fromkeys(Phase, 0)
    left = [dict(each) for each in free]
    open_kinds = list(Phase)
    while open_kinds:
        for kind in list(open_kinds):
            limit = limits[kind]
            fits = [each for each in left if _holds(each, bundles[kind])]
            if not fits or (limit is not None and found[kind] >= limit):
                open_kinds.remove(kind)
                continue
            fullest = min(fits, key=lambda each: sum(each.get(name, 0) for name in bundles[kind]))
            for name, amount in bundles[kind].items():
                fullest[name] -= amount
            found[kind] += 1
    return found


def _holds(node: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    return all(node.get(name, 0) >= amount for name, amount in bundle.items())


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(resources.items()))


def _join(address: str, namespace: str) -> None:
    host, has_port, port = address.rpartition(":")
    try:
        if has_port and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"ray.address {address}: no Ray cluster there ({reason}); run `ray start --head`, or remove "
            "`ray` to run jobs on this machine alone"
        ) from error


def _own(who: str, say: Callable[[str], None]) -> Any:
    """Becomes the cluster's only scheduler. Raises: ConfigError, naming the other one."""
    here = on_node(ray.get_runtime_context().get_node_id())
    options = {"name": OWNER, "namespace": NAMESPACE, "num_cpus": 0, "scheduling_strategy": here}
    deadline = time.monotonic() + OWNER_S
    while True:
        try:
            return ray.remote(Owner).options(**options).remote(who)  # the name is ours before it runs
        except ValueError as error:
            other = _other()
            if time.monotonic() >= deadline or (other is not None and _lives_here(other)):
                found = other if other is not None else "which does not answer"
                raise ConfigError(
                    f"the Ray cluster has a scheduler already ({found}); submit jobs to it, or stop it first"
                ) from error
            say(f"Ray to notice that an earlier scheduler has ended ({other or 'it does not answer'})")
            time.sleep(LOOK_S)


def _other() -> str | None:
    try:
        found: str = ray.get(ray.get_actor(OWNER, namespace=NAMESPACE).who.remote(), timeout=OTHER_S)
    except (ValueError, ray.exceptions.RayError):
        return None
    return found


def channel_root(channel: str) -> str:
    """Names a scheduler's channel where its name must be short."""
    return f"{zlib.crc32(channel.encode()):08x}"


def describe_self(channel: str) -> str:
    """Names this scheduler for those that find it, without the channel's password."""
    shown = re.sub(r"//.*@", "//", channel)
    return f"host {os.uname().nodename}, pid {os.getpid()}, channel {shown}"


def _lives_here(who: str) -> bool:
    """Whether the other scheduler is a living process of this host. Only Ray knows about other hosts."""
    host, pid = who.split(", ")[:2]
    return host == f"host {os.uname().nodename}" and os.path.exists(f"/proc/{pid.removeprefix('pid ')}")
