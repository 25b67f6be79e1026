"""These fixtures start real relays, each in its own process, and build the device's codec."""

from collections.abc import Iterator

import pytest
from host_kernels import HostKernels
from relay_process import RelayProcess, SharedRelays, StartRelay
from vmm_worlds import build_library

from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay

KINDS = ["embedded", pytest.param("mooncake", marks=pytest.mark.mooncake)]


@pytest.fixture
def start_relay() -> Iterator[StartRelay]:
    """Starts relay processes for one test, and stops them."""
    started: list[RelayProcess] = []

    def start(kind: str, *options: str) -> RelayProcess:
        started.append(RelayProcess(kind, *options))
        return started[-1]

    yield start
    for process in started:
        process.stop()


@pytest.fixture(scope="session")
def shared_relays() -> Iterator[SharedRelays]:
    relays = SharedRelays()
    yield relays
    relays.stop()


def _emptied_url(kind: str, shared_relays: SharedRelays, request: pytest.FixtureRequest) -> str:
    """Starts another relay for a test's second run: threads of the first one may still write to theirs."""
    if getattr(request.node, "execution_count", 1) > 1:
        shared_relays.stop()
    return shared_relays(kind).emptied_url()


@pytest.fixture(params=KINDS)
def relay_url(request: pytest.FixtureRequest, shared_relays: SharedRelays) -> str:
    """Returns the URL of an empty relay of each kind."""
    return _emptied_url(request.param, shared_relays, request)


@pytest.fixture
def embedded_url(request: pytest.FixtureRequest, shared_relays: SharedRelays) -> str:
    """Returns the URL of an empty embedded relay."""
    return _emptied_url("embedded", shared_relays, request)


@pytest.fixture
def relay(relay_url: str) -> Iterator[Relay]:
    client = open_relay(relay_url)
    yield client
    client.close()


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    """Compiles the work of the kernels' threads for the processor."""
    folder = tmp_path_factory.mktemp("host")
    return HostKernels(build_library(folder / "libkernels_on_host.so", "kernels_on_host.cpp"))
