"""Client, front, router and engine over TLS, each with a certificate that the next one checks."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from front.chats import CHATS
from front.running import ENVIRONMENT, PARSERS, READY_S
from real_engine import RealEngine, new_folder

from rose.errors import WorkerError
from rose.http import http_client
from rose.node.processes import ServerProcess
from rose.node.top import take_sample
from rose.ports import free_port
from rose.tls import client_context
from rose.trainers.router import router_announcer
from rose.trainers.turns import RouterTurns
from rose.transfer.follow.delivery import WorkerClient
from rose.types import Role
from tests.certificates import make_certificate

pytestmark = pytest.mark.vllm
KEY = "rose"
KEYS = {"ROSE_KEY": KEY, "ROSE_WORKER_API_KEY": "worker", "ROSE_ROUTER_API_KEY": "cli"}
CLIENT = {"Authorization": "Bearer cli"}


class Way:
    """Where engine and router answer, and the certificate that both show."""

    def __init__(self, engine_url: str, router_url: str, certificate: Path) -> None:
        self.engine_url = engine_url
        self.router_url = router_url
        self.certificate = certificate

    def ask(self, url: str, path: str, body: object = None, **headers: str) -> httpx.Response:
        with httpx.Client(verify=client_context(self.certificate), timeout=300) as client:
            method = "GET" if body is None else "POST"
            return client.request(method, url + path, json=body, headers=headers)


@pytest.fixture(scope="module")
def way(engines_dir: Path, scripted_model: Path) -> Iterator[Way]:
    folder = new_folder(engines_dir, "tls")
    certificate, key = make_certificate(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "ROSE_TLS_CA": str(certificate), "ROSE_ROUTER_ADMIN_KEY": "adm"}.items():
            patch.setenv(name, value)
        shown = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
        engine = RealEngine(scripted_model, Role.ROLLOUT, folder, *PARSERS, *shown)
        port = free_port()
        argv = [sys.executable, "-m", "rose.cli", "router", "--port", str(port), "--worker", engine.url]
        argv += ["--tls-certificate", str(certificate), "--tls-key", str(key), "--front", "1", "--"]
        argv += ["--model", str(scripted_model), *PARSERS]
        found = Way(engine.url, f"https://127.0.0.1:{port}", certificate)
        try:
            with ServerProcess(argv, "router", folder / "router.log", ENVIRONMENT) as router:
                engine.wait_ready()
                router.wait_until(lambda: _num_fronts(found) == 1, "a front answers", READY_S)
                yield found
        finally:
            engine.stop()


def _num_fronts(way: Way) -> int:
    try:
        return int(way.ask(way.router_url, "/health").json()["fronts"])
    except httpx.TransportError:
        return 0


def test_a_chat_goes_through_front_and_router_to_the_engine(way: Way) -> None:
    for kind in ("tools auto", "plain", "stop strings"):
        body = {"model": "tiny", **CHATS[kind]}
        own = way.ask(way.engine_url, "/v1/chat/completions", body, Authorization="Bearer worker")
        routed = way.ask(way.router_url, "/v1/chat/completions", body, **CLIENT)
        assert routed.status_code == own.status_code == 200, routed.text
        said = [answer.json()["choices"][0] for answer in (routed, own)]
        assert said[0]["message"]["content"] == said[1]["message"]["content"]
        assert said[0]["finish_reason"] == said[1]["finish_reason"]


def test_who_does_not_trust_the_certificate_or_speaks_plain_http_gets_no_answer(way: Way) -> None:
    for url in (way.router_url, way.engine_url):
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health", verify=client_context(None))
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url.replace('https', 'http')}/health")


def test_trainers_subscribers_and_commands_trust_the_file_that_the_environment_names(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def complete() -> int:
        turns = RouterTurns(way.router_url, "tiny", "cli", retry_s=0)
        try:
            return len(
                (await turns.complete("t", [40, 41, 42], {"max_tokens": 5, "ignore_eos": True})).token_ids
            )
        finally:
            await turns.close()

    def announce() -> None:
        router_announcer(way.router_url, "adm")(1)

    monkeypatch.setenv("ROSE_TLS_CA", str(way.certificate))
    assert asyncio.run(complete()) == 5
    announce()
    worker = WorkerClient(way.engine_url, KEY, ca=way.certificate)
    assert worker.weight_version() is None
    worker.close()
    with http_client(key=KEY, timeout=60, ca=way.certificate) as client:
        assert take_sample(client, way.engine_url).error is None
    monkeypatch.delenv("ROSE_TLS_CA")
    with pytest.raises(WorkerError, match="CERTIFICATE_VERIFY_FAILED"):
        asyncio.run(complete())
    with pytest.raises(WorkerError, match="CERTIFICATE_VERIFY_FAILED"):
        announce()
    stranger = WorkerClient(way.engine_url, KEY)
    with pytest.raises(WorkerError, match="CERTIFICATE_VERIFY_FAILED"):
        stranger.weight_version()
    stranger.close()
