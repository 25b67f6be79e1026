"""These fixtures start real relays, each in its own process, and build the device's codec."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from relay_process import RelayProcess, SharedRelays, StartRelay

from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay

ROOT = Path(__file__).parents[2]
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
    """Starts one relay process of each kind, which all tests share."""
    started: dict[str, RelayProcess] = {}

    def get(kind: str) -> RelayProcess:
        if kind not in started:
            started[kind] = RelayProcess(kind)
        return started[kind]

    yield get
    for process in started.values():
        process.stop()


@pytest.fixture(params=KINDS)
def relay_url(request: pytest.FixtureRequest, shared_relays: SharedRelays) -> str:
    """Returns the URL of an empty relay of each kind."""
    return shared_relays(request.param).emptied_url()


@pytest.fixture
def embedded_url(shared_relays: SharedRelays) -> str:
    """Returns the URL of an empty embedded relay."""
    return shared_relays("embedded").emptied_url()


@pytest.fixture
def relay(relay_url: str) -> Iterator[Relay]:
    client = open_relay(relay_url)
    yield client
    client.close()


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the CUDA kernels as an operator builds them, and returns their path."""
    if shutil.which("nvcc") is None or shutil.which("make") is None:
        pytest.skip("no nvcc and make here")
    library = tmp_path_factory.mktemp("cuda") / "librose_delta_cuda.so"
    subprocess.run(["make", "-C", ROOT, "cuda", f"DELTA_LIBRARY={library}"], check=True)
    return library


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiles the work of the kernels' threads for the processor, and returns the path."""
    library = tmp_path_factory.mktemp("host") / "libgrid_on_host.so"
    options = ["-std=c++20", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    source = Path(__file__).with_name("grid_on_host.cpp")
    subprocess.run(["g++", *options, "-o", library, source], check=True)
    return library
