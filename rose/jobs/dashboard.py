"""The dashboard's process beside `rose sched serve`.

An address that can't be used is refused before anything starts. After that, no fault of the dashboard affects
the scheduler or its jobs.
"""

import logging
import sys
import time
from collections.abc import Sequence

from rose.node.processes import ServerProcess
from rose.ports import check_port_free
from rose.scheduler.dashboard.address import Address
from rose.scheduler.dashboard.nodes import checked_node

logger = logging.getLogger(__name__)

RESTART_S = 5.0
"""The time between two starts, so that a dashboard that dies at once does not keep a core busy."""
NICE = 10
"""The scheduler and the jobs come first where they want the same core."""


class DashboardProcess:
    """The supervised process. ``check`` starts it again, whatever ended it."""

    def __init__(
        self, http: str, channel: str, key: str | None, *, is_insecure: bool, nodes: Sequence[str] = ()
    ) -> None:
        """Starts nothing. ``key``: as the process finds it in the environment. ``nodes``: engines' URLs.

        Raises: ConfigError if nothing can, or may, listen on ``http``.
        """
        address = Address.parse(http)
        address.check_exposure(key, is_insecure=is_insecure)
        check_port_free(address.host, address.port)
        module = "rose.scheduler.dashboard.server"
        self._argv = [sys.executable, "-m", module, "--http", str(address), "--channel", channel]
        self._argv += ["--insecure"] if is_insecure else []
        self._argv += [f"--node={checked_node(url)}" for url in nodes]
        self._process: ServerProcess | None = None
        self._started_s = 0.0

    def check(self) -> None:
        """Starts the process if it has ended, at most once per RESTART_S. Raises nothing."""
        if self._process is not None and self._process.is_alive():
            return
        if self._process is not None:
            if time.monotonic() - self._started_s < RESTART_S:
                return
            logger.warning("dashboard ended status=%s, starting it again", self._process.stop(0.0))
        self._process = ServerProcess(self._argv, "dashboard", None, nice=NICE)
        self._started_s = time.monotonic()
        try:
            self._process.start()
        except OSError as error:  # no process to be had: the jobs need what there is
            logger.warning("can't start the dashboard error=%s", error)

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.stop(1.0)
