"""Tests start the process behind `rose relay`, and wait for what it does."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable

from rose.transfer.format import manifest as keys
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay

CAPACITY_BYTES = 64 << 20


def wait_folded(relay: Relay, run_id: str, version: int) -> None:
    """Returns when the relay has made the snapshot that it was asked for."""
    key = keys.manifest_key(run_id, version, None)
    seen: str | None = None
    while relay.lacking([key]):
        seen = relay.wait([key], seen, 5.0).seen


def stored(relay: Relay, key: str) -> bytes:
    """Returns an object that the relay must hold."""
    data = relay.get(key)
    assert data is not None, key
    return data


class RelayProcess:
    """A process on a free port, which is ready when constructed."""

    def __init__(self, kind: str, *options: str) -> None:
        command = [sys.executable, "-m", "rose.transfer.relay.server", "--kind", kind]
        command += ["--capacity-bytes", str(CAPACITY_BYTES), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = str(json.loads(self.process.stdout.readline())["url"])

    @property
    def port(self) -> str:
        return self.url.split("?")[0].rsplit(":", 1)[1]

    def emptied_url(self) -> str:
        relay = open_relay(self.url)
        relay.remove(relay.keys(""))
        relay.close()
        return self.url

    def kill(self) -> None:
        self.process.kill()
        self._reap()

    def stop(self) -> None:
        """Sends SIGTERM and expects a clean end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            assert self._reap() == 0

    def _reap(self) -> int:
        assert self.process.stdout is not None
        status = self.process.wait(timeout=300)
        self.process.stdout.close()
        return status


StartRelay = Callable[..., RelayProcess]
"""Starts a relay process; takes its kind, then options of `rose relay`."""


class SharedRelays:
    """One relay process of each kind, which all tests share, from its first use on."""

    def __init__(self) -> None:
        self._started: dict[str, RelayProcess] = {}

    def __call__(self, kind: str) -> RelayProcess:
        if kind not in self._started:
            self._started[kind] = RelayProcess(kind)
        return self._started[kind]

    def stop(self) -> None:
        while self._started:
            self._started.popitem()[1].stop()
