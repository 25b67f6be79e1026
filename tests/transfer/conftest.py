"""Real relays for the transfer tests, each in its own process."""

from collections.abc import Callable, Iterator

import pytest
from relay_process import RelayProcess

from rose.transfer.relay import Relay, open_relay

KINDS = ["embedded", pytest.param("mooncake", marks=pytest.mark.mooncake)]


@pytest.fixture
def start_relay() -> Iterator[Callable[..., RelayProcess]]:
    """Starts relay processes for one test: the kind, then options."""
    started: list[RelayProcess] = []

    def start(kind: str, *options: str) -> RelayProcess:
        started.append(RelayProcess(kind, *options))
        return started[-1]

    yield start
    for process in started:
        process.stop()


@pytest.fixture(scope="session")
def shared_relays() -> Iterator[Callable[[str], RelayProcess]]:
    """One relay process of each kind for all tests."""
    started: dict[str, RelayProcess] = {}

    def get(kind: str) -> RelayProcess:
        if kind not in started:
            started[kind] = RelayProcess(kind)
        return started[kind]

    yield get
    for process in started.values():
        process.stop()


@pytest.fixture(params=KINDS)
def relay_url(request: pytest.FixtureRequest, shared_relays: Callable[[str], RelayProcess]) -> str:
    """The URL of an empty relay of each kind."""
    return shared_relays(request.param).emptied_url()


@pytest.fixture
def embedded_url(shared_relays: Callable[[str], RelayProcess]) -> str:
    """The URL of an empty embedded relay."""
    return shared_relays("embedded").emptied_url()


@pytest.fixture
def relay(relay_url: str) -> Iterator[Relay]:
    client = open_relay(relay_url)
    yield client
    client.close()
