"""Why a server with a certificate of its own does not answer a command."""

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from rose.errors import WorkerError
from rose.http import http_client, reason_of
from rose.node.control import EngineControl
from rose.node.top import take_sample
from tests.certificates import make_certificate

FIX = "; set ROSE_TLS_CA to the file of the certificates to trust"


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, and its key."""
    return make_certificate(tmp_path)


@pytest.fixture
def port(certificate: tuple[Path, Path]) -> Iterator[int]:
    """The port of an https server that shows the certificate."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_who_does_not_trust_the_certificate_is_told_the_variable(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROSE_TLS_CA", raising=False)
    with http_client(key=None, timeout=60.0) as client:
        error = take_sample(client, f"https://127.0.0.1:{port}").error
    assert error is not None and error.endswith(FIX)
    control = EngineControl(f"https://127.0.0.1:{port}", "tiny")
    with pytest.raises(WorkerError, match=FIX):
        control.status()
    control.close()


def test_a_trusted_certificate_of_another_name_is_no_matter_of_trust(
    port: int, certificate: tuple[Path, Path]
) -> None:
    with (
        http_client(key=None, timeout=60.0, ca=certificate[0]) as client,
        pytest.raises(httpx.ConnectError) as caught,
    ):
        client.get(f"https://localhost:{port}")
    assert "mismatch" in reason_of(caught.value) and FIX not in reason_of(caught.value)


def test_an_error_without_a_text_shows_its_type() -> None:
    assert reason_of(httpx.ConnectError("")) == "ConnectError"
