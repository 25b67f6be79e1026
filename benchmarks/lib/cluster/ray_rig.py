"""A Ray cluster of several nodes on this machine, for benchmarks and tests.

Owns its processes. Never: measures.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from rose.config import default_variable, forget_variables

STORE_BYTES = 80 << 20
SETTINGS = {
    "prestart_worker_first_driver": False,  # no processes that nobody has asked for
    "health_check_period_ms": 500,  # as in examples/jobs-on-ray: a dead node is noticed within seconds
}


class RayRig:
    """A head without devices, and workers with two devices each."""

    def __init__(
        self,
        run_dir: Path,
        num_workers: int,
        redis: str | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """run_dir: the runtime directory of what Ray's workers start.

        redis: HOST:PORT of where the head keeps its state; None: in its memory. settings: more of Ray's.
        """
        self.cluster = Cluster()
        self._inherited = {
            "ROSE_RUNTIME_DIR": str(run_dir),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        self._redis = redis
        self._settings = {**SETTINGS, **(settings if settings is not None else {})}
        self._add_head()
        self.workers: list[Any] = []
        for _ in range(num_workers):
            self.add_worker()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add_worker(self) -> None:
        self.workers.append(self._add(num_cpus=8, num_gpus=2))

    def kill(self, node: Any) -> None:
        """Ends the node as a power failure of its host would."""
        self.workers.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def stop_head(self) -> None:
        """Ends the head's server, as a crash of it would. What else runs on the head's node goes on."""
        self.cluster.head_node.kill_gcs_server()

    def start_head(self) -> None:
        """Starts the head's server again, on the same port."""
        self.cluster.head_node.start_gcs_server()

    def replace_head(self) -> None:
        """Ends the head's whole node as a power failure would, and starts another one at its address."""
        port = int(self.address.rpartition(":")[2])
        self.cluster.remove_node(self.cluster.head_node, allow_graceful=False)
        self._add_head(gcs_server_port=port)

    def _add_head(self, **arguments: Any) -> None:
        head: dict[str, Any] = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
        if self._redis is not None:
            default_variable("RAY_REDIS_ADDRESS", self._redis)
        try:
            self._add(num_cpus=2, _system_config=self._settings, **head, **arguments)
        finally:
            forget_variables("RAY_REDIS_ADDRESS")

    def _add(self, **arguments: Any) -> Any:
        """Tries it again on a busy machine: Ray gives a node 30 s to start, which no setting changes."""
        arguments |= {"object_store_memory": STORE_BYTES, "env_vars": self._inherited}
        for attempts_left in reversed(range(4)):
            try:
                return self.cluster.add_node(wait=False, **arguments)
            except Exception as error:  # Ray has no type for it
                if attempts_left == 0 or "imed out" not in str(error):
                    raise
        raise AssertionError
