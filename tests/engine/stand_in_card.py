"""A network card without a network, behind the module ``nixl`` that vLLM's NixlConnector imports.

A real card translates the addresses that are registered into physical pages once, and goes on reading those
pages whatever is mapped at the addresses later. This one does the same with the pages of memfds: it maps
them anew at registration, and every transfer goes through these mappings alone. An address that has no page
at registration reads as zeros for ever, and what is written there is lost, as with the guards of a GPU's
range. A transfer happens ``LATENESS_S`` after it was asked for.
"""

from __future__ import annotations

import bisect
import mmap
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

LATENESS_S = 0.3
Bytes = npt.NDArray[np.uint8]


def install() -> None:
    """Makes this module's card what ``import nixl`` finds in this process."""
    api, bindings, package = (ModuleType(name) for name in ("nixl._api", "nixl._bindings", "nixl"))
    api.nixl_agent, api.nixl_agent_config = Card, SimpleNamespace  # type: ignore[attr-defined]
    bindings.nixlXferTelemetry = SimpleNamespace  # type: ignore[attr-defined]
    sys.modules.update({"nixl": package, "nixl._api": api, "nixl._bindings": bindings})


def keep_kv_in_files() -> None:
    """Has a stock engine of this process allocate its KV cache in a memfd, where the card finds its pages."""
    zeros = torch.zeros

    def in_file(*size: Any, **given: Any) -> torch.Tensor:
        if len(size) != 1 or given.get("dtype") is not torch.int8:
            return zeros(*size, **given)
        fd = os.memfd_create("kv")
        os.ftruncate(fd, size[0])
        return torch.frombuffer(mmap.mmap(fd, size[0]), dtype=torch.int8)

    torch.zeros = in_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Addresses with neighbouring pages of one memfd, or without any: then the descriptor is None."""

    start: int
    num_bytes: int
    fd: int | None
    offset: int


class Pages:
    """The physical pages behind the registered addresses of one process, as they were at registration."""

    def __init__(self, pid: int, runs: Sequence[Run]) -> None:
        self.runs = sorted(runs, key=lambda run: run.start)
        self._starts = [run.start for run in self.runs]
        self._bytes = [_map(pid, run) for run in self.runs]

    def at(self, address: int, num_bytes: int) -> Bytes:
        index = bisect.bisect_right(self._starts, address) - 1
        start = address - self._starts[index]
        found = self._bytes[index][start : start + num_bytes]
        assert len(found) == num_bytes, f"{num_bytes} bytes at {address:#x} are not registered as one piece"
        return found


def _map(pid: int, run: Run) -> Bytes:
    if run.fd is None:
        return np.zeros(run.num_bytes, np.uint8)
    fd = os.open(f"/proc/{pid}/fd/{run.fd}", os.O_RDWR)
    try:
        return np.frombuffer(mmap.mmap(fd, run.num_bytes, offset=run.offset), np.uint8)
    finally:
        os.close(fd)


def _runs(start: int, num_bytes: int) -> Iterator[Run]:
    """Yields what is mapped at these addresses of this process now."""
    fds: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, as the descriptor of the listing itself
            if "memfd:" in os.readlink(f"/proc/self/fd/{name}"):
                fds[os.stat(f"/proc/self/fd/{name}").st_ino] = int(name)
    end = start + num_bytes
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, offset, _, inode, *_ = line.split()
            low, high = (int(edge, 16) for edge in span.split("-"))
            begin, stop = max(low, start), min(high, end)
            if begin < stop:
                fd = fds.get(int(inode)) if inode != "0" else None
                yield Run(start=begin, num_bytes=stop - begin, fd=fd, offset=int(offset, 16) + begin - low)


class Card:
    """The part of NIXL's agent that vLLM's NixlConnector calls in pull mode."""

    def __init__(self, name: str, _config: object) -> None:
        self._name = name
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notices.bind(_address(name))
        self._notices.setblocking(False)
        self._pages: dict[str, Pages] = {}
        self._runs: list[Run] = []
        self._lists: list[tuple[str, Any]] = []
        self.transfers: list[_Transfer] = []

    # Registration ---------------------------------------------------------------------------------

    def get_reg_descs(self, ranges: list[tuple[int, int, int, str]], _kind: str) -> Any:
        return ranges

    def register_memory(self, ranges: list[tuple[int, int, int, str]], backends: object = None) -> None:
        self._runs += [run for start, num_bytes, *_ in ranges for run in _runs(start, num_bytes)]
        self._pages[self._name] = Pages(os.getpid(), self._runs)

    def deregister_memory(self, _ranges: object) -> None:
        pass

    # Peers ----------------------------------------------------------------------------------------

    def get_agent_metadata(self) -> bytes:
        return pickle.dumps((self._name, os.getpid(), self._runs))

    def add_remote_agent(self, metadata: bytes) -> str:
        name, pid, runs = pickle.loads(metadata)
        self._pages[name] = Pages(pid, runs)
        return str(name)

    def remove_remote_agent(self, name: str) -> None:
        self._pages.pop(name, None)

    def check_remote_metadata(self, name: str) -> bool:
        return name in self._pages

    def send_notif(self, name: str, notif_msg: bytes) -> None:
        self._notices.sendto(pickle.dumps((self._name, notif_msg)), _address(name))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        received: dict[str, list[bytes]] = {}
        while True:
            try:
                sender, message = pickle.loads(self._notices.recv(1 << 16))
            except BlockingIOError:
                return received
            received.setdefault(sender, []).append(message)

    # Transfers ------------------------------------------------------------------------------------

    def get_xfer_descs(self, blocks: Any, _kind: str) -> Any:
        return np.asarray(blocks)

    def prep_xfer_dlist(self, name: str, blocks: Any) -> int:
        self._lists.append((self._name if name == "NIXL_INIT_AGENT" else name, blocks))
        return len(self._lists) - 1

    def release_dlist_handle(self, _handle: int) -> None:
        pass

    def make_prepped_xfer(
        self, kind: str, mine: int, my_ids: Any, theirs: int, their_ids: Any, notif_msg: bytes = b""
    ) -> int:
        assert kind == "READ"
        peer = self._lists[theirs][0]
        copies = [
            (self._found(mine, to), self._found(theirs, source))
            for to, source in zip(my_ids, their_ids, strict=True)
        ]
        self.transfers.append(_Transfer(copies, lambda: self.send_notif(peer, notif_msg)))
        return len(self.transfers) - 1

    def _found(self, handle: int, index: int) -> Bytes:
        name, blocks = self._lists[handle]
        address, num_bytes, _ = (int(value) for value in blocks[index])
        return self._pages[name].at(address, num_bytes)

    def transfer(self, handle: int) -> None:
        self.transfers[handle].start()

    def check_xfer_state(self, handle: int) -> str:
        return "PROC" if self.transfers[handle].is_alive() else "DONE"

    def get_xfer_telemetry(self, handle: int) -> Any:
        return SimpleNamespace(xferDuration=1, postDuration=1, totalBytes=1, descCount=1)

    def release_xfer_handle(self, handle: int) -> None:
        self.transfers[handle].join()


class _Transfer(threading.Thread):
    """Copies pages late, and then tells the peer."""

    def __init__(self, copies: list[tuple[Bytes, Bytes]], tell: Any) -> None:
        super().__init__(daemon=True)
        self._copies, self._tell = copies, tell

    def run(self) -> None:
        time.sleep(LATENESS_S)
        for to, source in self._copies:
            to[:] = source
        self._tell()


def _address(name: str) -> str:
    return f"\0rose-card-{name}"
