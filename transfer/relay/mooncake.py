"""Mooncake Store as the relay.

Owns the only import of mooncake, its client, the start of a master process, and the probe of its libraries.
Keeps the Relay protocol where Mooncake behaves differently: put() on an existing key raises (the store would
answer 0 without writing), remove() overrides read leases, and every object is pinned against eviction. New
objects are sent from where they lie. Several objects are read together into the client's buffer, from which
the caller takes them. Never decides what to store or when to remove it.
"""

import ctypes
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.config import default_variable
from rose.errors import ConfigError, RelayError, RelayFull, RelayUnreachable, install_hint
from rose.transfer.relay.calls import RelayCalls
from rose.transfer.relay.protocol import Relay, RelayChanges
from rose.types import BytesLike

CLIENT_BUFFER_BYTES = 160 << 20
_READ_BYTES = CLIENT_BUFFER_BYTES // 2
"""What is read into the buffer together. The reader may still hold a 64 MB frame of those before."""
_PUT_BYTES = 8 << 20
"""What is put together. Followers see none of it before all of it has arrived."""
_MOST_TOGETHER = 64
MASTER_START_TIMEOUT_S = 60.0
_LOOK_EVERY_S = 0.02
_RETRIES = 3
_RETRY_PAUSE_S = 0.2
INSTALL_LIBRARIES = "apt-get install -y libibverbs1 librdmacm1 libnuma1 libcurl4 liburing2"


class MooncakeRelay(Relay):
    """The client of a Mooncake master; see rose.transfer.relay.protocol.Relay.

    segment_bytes: the memory that this process lends to the store; 0 for trainers and subscribers.
    admin_port: the master's metrics port, which also lists keys. protocol: tcp or rdma, the same for all who
    use a store; cards: this host's RDMA cards that it goes over.
    """

    batch_bytes = _PUT_BYTES

    def __init__(
        self,
        host: str,
        port: int,
        admin_port: int,
        protocol: str = "tcp",
        cards: Sequence[str] = (),
        segment_bytes: int = 0,
    ) -> None:
        default_variable("GLOG_minloglevel", "2")  # its INFO log prints on every connection
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise RelayError(f"mooncake can't be loaded: {error}; run `rose doctor`") from error
        self._master = f"{host}:{port}"
        self._admin = RelayCalls(host, admin_port, None)
        _require_listener(host, port)
        self._lock = threading.Lock()
        self._config: Any = ReplicateConfig()
        self._config.with_hard_pin = True
        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(
            _local_address(host, port),
            "P2PHANDSHAKE",
            segment_bytes,
            CLIENT_BUFFER_BYTES,
            protocol,
            ",".join(cards),
            self._master,
        )
        if code != 0:
            over = " ".join((protocol, *cards))
            raise RelayError(
                f"mooncake master {self._master}: the client's set-up over {over} failed with code {code}"
            )

    def put(self, key: str, data: bytes) -> None:
        self.put_several([(key, data)])

    def put_several(self, objects: Sequence[tuple[str, bytes]]) -> int:
        names = [key for key, _ in objects]
        if found := sorted(set(names) - self.lacking(names)):
            raise RelayError(f"{found[0]} exists already and is immutable")
        _require_not_empty(objects)
        arrays = [np.frombuffer(data, np.uint8) for _, data in objects]
        with self._lock, self._registered(arrays) as places:
            codes = self._store.batch_put_from(
                names, places, [array.nbytes for array in arrays], self._config
            )
        num_put = next((number for number, code in enumerate(codes) if code != 0), len(names))
        self.remove(name for name, code in zip(names[num_put:], codes[num_put:], strict=True) if code == 0)
        if num_put == 0:
            raise _refusal("put", names[0], arrays[0].nbytes, codes[0])
        return num_put

    def upsert(self, key: str, data: bytes) -> None:
        _require_not_empty([(key, data)])
        with self._lock:
            code = self._store.upsert(key, data, self._config)
        if code != 0:
            raise _refusal("upsert", key, len(data), code)

    def get(self, key: str) -> bytes | None:
        for attempt in range(_RETRIES):
            if not self._exists(key):  # with a dead master this fails at once, get() after more than 4 s
                return None
            with self._lock:
                data = bytes(self._store.get(key))
            if data:
                return data
            # The object was replaced or removed between the two calls, or the lease expired: look again.
            time.sleep(_RETRY_PAUSE_S * (attempt + 1))
        raise RelayUnreachable(f"mooncake master {self._master}: get {key} failed {_RETRIES} times")

    def get_several(self, keys: Sequence[str]) -> list[BytesLike | None]:
        """The objects lie in the client's buffer."""
        names = list(keys[:_MOST_TOGETHER])
        missing = self.lacking(names)
        with self._lock:
            names = names[: self._num_fitting(names, missing)]
            present = [name for name in names if name not in missing]
            handles = self._store.batch_get_buffer(present) if present else []
        found: dict[str, BytesLike | None] = {}
        for name, handle in zip(present, handles, strict=True):  # one that was being removed has no handle
            found[name] = memoryview(handle).cast("B") if handle is not None else self.get(name)
        return [found.get(name) for name in names]

    def _num_fitting(self, names: Sequence[str], missing: set[str]) -> int:
        """Returns for how many of these objects, from the first on, the buffer has room; 1 at least."""
        if len(names) == 1:
            return 1
        replicas = self._store.batch_get_replica_desc([name for name in names if name not in missing])
        num_bytes = 0
        for number, name in enumerate(names):
            copies = [each.get_memory_descriptor() for each in replicas.get(name, ())]
            num_bytes += max((copy.buffer_descriptor.size for copy in copies), default=0)
            if number > 0 and num_bytes > _READ_BYTES:
                return number
        return len(names)

    def get_all(self, prefix: str) -> dict[str, bytes]:
        names = self.keys(prefix)
        with self._lock:
            objects = self._store.get_batch(names) if names else []
        found: dict[str, bytes] = {}
        for name, read in zip(names, objects, strict=True):
            data = bytes(read) or self.get(name)  # one that was being replaced comes back empty
            if data is not None:
                found[name] = data
        return found

    def lacking(self, keys: Sequence[str]) -> set[str]:
        """Asks for these keys alone: a listing would name every object of the store."""
        codes = self._store.batch_is_exist(list(keys))
        failed = [(key, code) for key, code in zip(keys, codes, strict=True) if code not in (0, 1)]
        if failed:
            raise RelayUnreachable(f"mooncake master {self._master}: batch_is_exist failed: {failed[:3]}")
        return {key for key, code in zip(keys, codes, strict=True) if code == 0}

    def remove(self, keys: Iterable[str]) -> None:
        names = list(keys)
        codes = self._store.batch_remove(names, True) if names else []
        # -704: no such key
        failed = [(name, code) for name, code in zip(names, codes, strict=True) if code not in (0, -704)]
        if failed:
            raise RelayUnreachable(f"mooncake master {self._master}: remove failed: {failed[:3]}")

    def keys(self, prefix: str) -> list[str]:
        try:
            answer = self._admin.call("GET", "/get_all_keys")
        except RelayUnreachable as error:
            raise RelayUnreachable(f"{error}; give the master's metrics port as ?admin=PORT") from error
        if not answer.is_success:
            raise RelayUnreachable(f"mooncake master {self._master}: get_all_keys answered {answer.status}")
        return sorted(name for name in answer.body.decode().split("\n") if name.startswith(prefix) and name)

    def wait(self, prefixes: Sequence[str], seen: str | None, timeout_s: float) -> RelayChanges:
        """Sleeps for as long as a client should wait between looks: the store does not report changes."""
        if seen is not None:
            time.sleep(min(timeout_s, _LOOK_EVERY_S))
        return RelayChanges(seen="", keys=None)

    def _exists(self, key: str) -> bool:
        """Raises: RelayUnreachable."""
        code = self._store.is_exist(key)
        if code not in (0, 1):
            raise RelayUnreachable(f"mooncake master {self._master}: is_exist {key} answered {code}")
        return bool(code)

    def close(self) -> None:
        self._admin.close()
        self._store.close()

    @contextmanager
    def _registered(self, arrays: Sequence[NDArray[np.uint8]]) -> Iterator[list[int]]:
        """Lets the store send from these arrays; gives where they lie. Raises: RelayError."""
        places: list[int] = []
        try:
            for array in arrays:
                place = array.ctypes.data
                if place not in places and (code := self._store.register_buffer(place, array.nbytes)) != 0:
                    raise RelayError(f"mooncake register_buffer of {array.nbytes} bytes answered {code}")
                places.append(place)
            yield places
        finally:
            for place in set(places):
                self._store.unregister_buffer(place)


def _require_not_empty(objects: Sequence[tuple[str, bytes]]) -> None:
    for key, data in objects:
        if not data:
            raise ValueError(f"{key} is empty: Mooncake can't tell an empty object from a missing one")


def _refusal(verb: str, key: str, num_bytes: int, code: int) -> RelayError:
    failed = f"mooncake {verb} {key} of {num_bytes} bytes answered {code}"
    return RelayFull(f"{failed}: the store is full") if code == -200 else RelayUnreachable(failed)


class MooncakeMaster:
    """A running mooncake_master process."""

    def __init__(self, process: subprocess.Popen[bytes], host: str, port: int, admin_port: int) -> None:
        self.process = process
        self.host = host
        self.port = port
        self.admin_port = admin_port

    @property
    def url(self) -> str:
        return f"mooncake://{self.host}:{self.port}?admin={self.admin_port}"

    def stop(self) -> None:
        """Kills the process. It has nothing to save, and ending on SIGTERM would take it a second."""
        self.process.kill()
        self.process.wait()


def start_mooncake_master(host: str, port: int = 0, admin_port: int = 0) -> MooncakeMaster:
    """Starts the wheel's mooncake_master and waits until it listens. It dies with this process.

    Port 0 picks a free port. Raises: ConfigError when a port is taken; RelayError when the master ends at
    once.
    """
    port = _free_port(host, port)
    admin_port = _free_port(host, admin_port)
    command = [
        str(_master_binary()),
        f"--rpc_address={host}",
        f"--rpc_port={port}",
        f"--metrics_port={admin_port}",
        "--logtostderr",
        "--minloglevel=2",
    ]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=_die_with_parent
    )
    deadline = time.monotonic() + MASTER_START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RelayError(f"mooncake_master ended with status {process.returncode}: {command}")
        if _listens(host, port) and _listens(host, admin_port):
            return MooncakeMaster(process, host, port, admin_port)
        time.sleep(0.05)
    process.kill()
    process.wait()
    raise RelayError(f"mooncake_master did not listen on {host}:{port} within {MASTER_START_TIMEOUT_S} s")


def mooncake_available() -> tuple[bool, str]:
    """Returns whether Mooncake loads here; if not, what is missing and the command that installs it.

    Probes in a child process, because a library clash inside Mooncake ends the process that imports it.
    """
    if importlib.util.find_spec("mooncake") is None:
        return False, f"Python package missing; {install_hint('mooncake')}"
    probe = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, timeout=300
    )
    if probe.returncode == 0:
        return True, "Mooncake Store loads"
    return False, explain_import_failure(probe.stderr, probe.returncode)


def explain_import_failure(stderr: str, status: int) -> str:
    """Returns one line: the missing library and the command that installs it, or the last line of the probe's
    output.
    """
    missing = re.search(r"(lib\S+\.so\S*): cannot open shared object file", stderr)
    if missing is not None:
        return f"system library {missing.group(1)} missing: {INSTALL_LIBRARIES}"
    last = (stderr.strip().splitlines() or [f"ended with status {status}"])[-1]
    return f"import mooncake.store failed: {last}"


def _master_binary() -> Path:
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        raise RelayError(f"Python package mooncake missing; {install_hint('mooncake')}")
    binary = Path(spec.origin).with_name("mooncake_master")
    if not os.access(binary, os.X_OK):
        binary.chmod(binary.stat().st_mode | 0o111)  # unpacking a wheel can lose the executable bit
    return binary


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # A parent that waits for its stop signals has blocked them, and a child inherits the blocked set.
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def _free_port(host: str, port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"--port: {host}:{port}: {error.strerror}; choose another port") from error
        return int(probe.getsockname()[1])


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def _require_listener(host: str, port: int) -> None:
    # Mooncake's own set-up would retry for a long time and print each attempt.
    if not _listens(host, port):
        raise RelayUnreachable(f"mooncake master {host}:{port}: nothing listens there")


def _local_address(host: str, port: int) -> str:
    """Returns the address of this process that other hosts on the way to the master can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
