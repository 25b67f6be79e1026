"""Two network namespaces with one rate-limited link between them: a trainer's and a serving cluster.

Owns the namespaces, the link, its limit and its counters. Promises: everything is removed on the way out,
also after a failure or a signal, and what a killed run left is removed by the next. Both directions are
limited and counted. Never touches the machine's own interfaces. Needs root, `ip` and `tc`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from rose.errors import RoseError

TRAINER, SERVING = "trainer", "serving"
MTU = 9000
_DEVICE = "slow0"
_PREFIX = "rose-sync-"
_ADDRESSES = {TRAINER: "10.91.7.1", SERVING: "10.91.7.2"}
_BURST_S = 250e-6
"""What the limit lets through at once: little beside any transfer, and no less than a few frames."""
_MIN_BURST_BYTES = 2 * MTU
_QUEUE_S = 0.025


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """Since the limit was set, both directions together."""

    on_wire: int
    """The bytes that the limit's queue counted, which counts the headers of every frame."""
    by_interface: int
    """The bytes that the interfaces counted, which count the headers of a burst of frames once."""

    def __sub__(self, other: "LinkBytes") -> "LinkBytes":
        return LinkBytes(
            on_wire=self.on_wire - other.on_wire, by_interface=self.by_interface - other.by_interface
        )


class SlowLink:
    """A context: made on the way in, removed on the way out."""

    def __init__(self) -> None:
        self._names = {side: f"{_PREFIX}{os.getpid()}-{side}" for side in _ADDRESSES}

    def __enter__(self) -> "SlowLink":
        """Raises: RoseError naming the command that failed."""
        if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
            raise RoseError("network namespaces need root and the commands ip and tc (package iproute2)")
        _remove_leftovers()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _make(self) -> None:
        for name in self._names.values():
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        first, second = self._names.values()
        frames = ("mtu", str(MTU))
        peer = ("peer", "name", _DEVICE, *frames, "netns", second)
        _run("ip", "-n", first, "link", "add", "name", _DEVICE, *frames, "type", "veth", *peer)
        for side, name in self._names.items():
            _run("ip", "-n", name, "address", "add", f"{_ADDRESSES[side]}/24", "dev", _DEVICE)
            _run("ip", "-n", name, "link", "set", _DEVICE, "up")

    def _remove(self) -> None:
        for name in self._names.values():
            with suppress(RoseError):  # not made yet
                _run("ip", "netns", "delete", name)

    @staticmethod
    def address(side: str) -> str:
        """Returns the address of a side, as the other side reaches it."""
        return _ADDRESSES[side]

    def command(self, side: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs argv on that side, in the process that is started."""
        return ["ip", "netns", "exec", self._names[side], *argv]

    def limit(self, gbps: float, queue_s: float = _QUEUE_S) -> None:
        """Limits both directions from now on, and counts from 0.

        queue_s: what waits before the link at most, in time; many streams need room for a few frames each.
        """
        burst = max(_MIN_BURST_BYTES, int(gbps * 1e9 / 8 * _BURST_S))
        queue = int(gbps * 1e9 / 8 * queue_s) + burst
        self.unlimit()
        for name in self._names.values():
            limit = ("rate", f"{gbps}gbit", "burst", str(burst), "limit", str(queue))
            _run("tc", "-n", name, "qdisc", "add", "dev", _DEVICE, "root", "tbf", *limit)

    def unlimit(self) -> None:
        """Lets the link run as fast as the machine can."""
        for name in self._names.values():
            if any(queue["kind"] == "tbf" for queue in self._queues(name)):
                _run("tc", "-n", name, "qdisc", "delete", "dev", _DEVICE, "root")

    def count(self) -> LinkBytes:
        """Returns the bytes since the limit was set; call it under a limit."""
        on_wire = by_interface = 0
        for name in self._names.values():
            on_wire += sum(queue["bytes"] for queue in self._queues(name) if queue["kind"] == "tbf")
            shown = json.loads(_run("ip", "-n", name, "-j", "-s", "link", "show", "dev", _DEVICE))
            by_interface += shown[0]["stats64"]["tx"]["bytes"]
        return LinkBytes(on_wire=on_wire, by_interface=by_interface)

    @staticmethod
    def _queues(name: str) -> list[dict[str, Any]]:
        queues: list[dict[str, Any]] = json.loads(
            _run("tc", "-n", name, "-j", "-s", "qdisc", "show", "dev", _DEVICE)
        )
        return queues


@contextmanager
def stop_signals_raise() -> Iterator[None]:
    """SIGTERM leaves through the clean-ups as Ctrl-C does; a second signal does not cut them short."""

    def leave(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {each: signal.signal(each, leave) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _remove_leftovers() -> None:
    """Removes what killed runs left: their namespaces carry their process id."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        match = re.fullmatch(rf"{_PREFIX}(\d+)-\w+", name)
        if match is not None and not os.path.exists(f"/proc/{match[1]}"):
            _run("ip", "netns", "delete", name)


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RoseError(f"{' '.join(argv)} ended with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout
