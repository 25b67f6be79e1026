"""Chats through a front are answered as by the engine itself, also where the answer is cut and resumed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from forked_server import ForkedServer
from front.chats import CHATS, streamed, whole
from front.running import ENVIRONMENT, READY_S, Setup

from rose.node.processes import ServerProcess

pytestmark = pytest.mark.vllm
ASK = {"whole": whole, "streamed": streamed}


def counters(front: Setup) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{front.router_url}/admin/status").json()["counters"]
    return found


@pytest.mark.parametrize(("how", "after"), [("whole", 1), ("streamed", 4)])
@pytest.mark.parametrize("kind", CHATS)
def test_a_chat_is_answered_as_by_the_engine_itself_also_when_it_is_cut(
    front: Setup, kind: str, how: str, after: int
) -> None:
    """``after``: the events behind which the first answer is cut."""
    expected, before = ASK[how](front.engine_url, CHATS[kind]), counters(front)
    assert ASK[how](front.router_url, CHATS[kind]) == expected
    front.proxy.arm(after)
    # An engine that is held up puts several tokens into one event, and all of a short answer into one.
    while counters(front)["resumed"] == before["resumed"]:
        if front.proxy.has_cut:
            front.proxy.arm(after)
        assert ASK[how](front.router_url, CHATS[kind]) == expected
    assert counters(front)["restarted"] == before["restarted"]


def test_responses_and_messages_are_answered_and_resumed(front: Setup) -> None:
    """A worker's own answer would be called complete when it is cut."""
    own = (response(front.engine_url), message(front.engine_url))
    assert_equal_when_cut(front, lambda: response(front.router_url), own[0])
    assert_equal_when_cut(front, lambda: message(front.router_url), own[1])


def assert_equal_when_cut(front: Setup, ask: Callable[[], object], expected: object) -> None:
    """Asks until an answer was cut behind its third event."""
    front.proxy.arm(3)
    while not front.proxy.has_cut:
        assert ask() == expected


def response(url: str) -> tuple[str, list[tuple[str, list[str]]]]:
    """What /v1/responses answers: its status, and the texts of each item."""
    question = {"model": "tiny", "input": "[think]", "temperature": 0.0, "max_output_tokens": 40}
    answer = httpx.post(f"{url}/v1/responses", json=question, timeout=300).json()
    items = [(item["type"], [part["text"] for part in item["content"] or ()]) for item in answer["output"]]
    return answer["status"], items


def message(url: str) -> tuple[str, list[tuple[str, str]]]:
    """What /v1/messages answers: its stop reason, and the text of each block."""
    said = [{"role": "user", "content": "[think]"}]
    asked = {"model": "tiny", "messages": said, "temperature": 0.0, "max_tokens": 40}
    answer = httpx.post(f"{url}/v1/messages", json=asked, timeout=300).json()
    blocks = [(block["type"], block[block["type"]]) for block in answer["content"]]
    return answer["stop_reason"], blocks


def test_jobs_and_sessions_of_a_chat_reach_its_turns(front: Setup) -> None:
    headers = {"X-Rose-Job": "agents", "X-Session-ID": "trajectory-7"}
    whole(front.router_url, CHATS["tools auto"], **headers)
    status = httpx.get(f"{front.router_url}/admin/status").json()
    assert status["jobs"]["agents"]["turns"] == 1


def test_errors_of_the_router_reach_the_client_with_their_status(front: Setup) -> None:
    body = {"model": "tiny", **CHATS["tools auto"]}
    url = f"{front.router_url}/v1/chat/completions"
    late = httpx.post(url, json=body, headers={"X-Rose-Timeout-S": "0.001"}, timeout=60)
    assert (late.status_code, "deadline" in late.json()["error"]["message"]) == (504, True)
    long = httpx.post(url, json={**body, "max_tokens": 100_000}, timeout=60)
    assert (long.status_code, "max_tokens" in long.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    "flags", [["--enable-auto-tool-choice", "--tool-call-parser"], ["--reasoning-parser"]], ids=str
)
def test_a_front_with_an_unknown_parser_says_so_before_it_serves(
    front: Setup, tmp_path: Path, flags: list[str]
) -> None:
    argv = ["front", "--router", front.router_url, "--model", str(front.model), *flags, "nobodys"]
    log = tmp_path / "front.log"
    command = ServerProcess([sys.executable, "-m", "rose.cli", *argv], "front", log, ENVIRONMENT)
    with ForkedServer(command) as started:
        assert started.wait(READY_S) == 2
    (error,) = [line for line in log.read_text().splitlines() if line.startswith("rose: error")]
    assert error.startswith("rose: error: front: ") and "nobodys" in error
