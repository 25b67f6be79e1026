"""Chats for a LoRA adapter go through a front, and are answered by its newest version on the engine."""

import uuid
from pathlib import Path

import httpx
import pytest
from front.chats import CHATS, Json, streamed, whole
from front.running import Setup
from tiny_adapters import RANK, adapter_config, adapter_tensors, adapter_update, save_adapter

pytestmark = pytest.mark.vllm
MODULES = {
    "self_attn.q_proj": (128, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.up_proj": (128, 128),
    "mlp.down_proj": (128, 128),
}
"""Those of the scripted model."""
Answers = dict[tuple[str, str], list[Json]]
ASK = {"whole": whole, "streamed": streamed}
KINDS = ("tools auto", "tool named", "reasoning, then regex", "regex", "stop strings", "logprobs")
DIFFERENT = ("logprobs",)
"""Those whose answers show the adapter's version, whatever the model says."""
LONG = "You are an agent, and this is what all of your chats begin with. " * 5
"""More than two blocks of tokens: the KV of a chat is found again by the next one."""


def chat(kind: str, model: str) -> Json:
    """A chat of one of these kinds, whose answer ends though the adapter forgets the script."""
    known = CHATS[kind]
    messages = [{"role": "system", "content": LONG}, *known["messages"]]
    return {"max_tokens": 60, **known, "messages": messages, "model": model}


def load(front: Setup, folder: Path, number: int, run: str = "math") -> None:
    """Delivers a version to the engine as a subscriber does."""
    tensors = adapter_tensors(number, RANK, layers=2, modules=MODULES)
    saved = save_adapter(folder / str(number), tensors, adapter_config("tiny", RANK, MODULES))
    update = adapter_update(saved, f"{run}/{number}").model_dump()
    httpx.post(f"{front.engine_url}/rose/v1/adapters", json=update, timeout=300).raise_for_status()


def own(front: Setup, how: str, body: Json) -> list[Json]:
    """What the engine itself answers without the KV of any other chat."""
    return ASK[how](front.engine_url, {**body, "cache_salt": uuid.uuid4().hex})


def assert_as_the_engine(front: Setup, model: str) -> Answers:
    """Compares all chats with the engine's own answers, uncut and cut. Returns these."""
    found: Answers = {}
    for kind, how in ((kind, how) for kind in KINDS for how in ASK):
        body = chat(kind, model)
        expected = found[kind, how] = own(front, how, body)
        assert ASK[how](front.router_url, body) == expected, (kind, how)
        front.proxy.arm(2)
        while not front.proxy.has_cut:
            assert ASK[how](front.router_url, body) == expected, (kind, how)
    return found


def resumed(front: Setup) -> int:
    return int(httpx.get(f"{front.router_url}/admin/status").json()["counters"]["resumed"])


def test_chats_for_an_adapter_are_answered_by_its_newest_version_also_when_they_are_cut(
    front: Setup, tmp_path: Path
) -> None:
    base: Answers = {(kind, how): own(front, how, chat(kind, "tiny")) for kind in KINDS for how in ASK}
    run = f"math-{uuid.uuid4().hex[:4]}"  # a second run of this test finds the adapter of the first one
    unknown = httpx.post(f"{front.router_url}/v1/chat/completions", json=chat("regex", run), timeout=60)
    assert (unknown.status_code, run in unknown.text) == (404, True)
    answers = [base]
    for number in range(2):
        load(front, tmp_path, number, run)
        before = resumed(front)
        answers.append(assert_as_the_engine(front, run))
        assert resumed(front) - before >= len(KINDS)  # a cut behind the last token leaves nothing to resume
    for case in ((kind, how) for kind in DIFFERENT for how in ASK):
        first, second, third = (each[case] for each in answers)
        assert first != second != third != first, case
    assert ASK["whole"](front.router_url, chat("regex", "tiny")) == base["regex", "whole"]


def test_messages_for_an_adapter_are_answered(front: Setup, tmp_path: Path) -> None:
    load(front, tmp_path, 2)
    asked = {"model": "math", "messages": [{"role": "user", "content": "[count]"}], "max_tokens": 9}
    own, through = (
        httpx.post(f"{url}/v1/messages", json={**asked, "temperature": 0.0}, timeout=300).json()
        for url in (front.engine_url, front.router_url)
    )
    assert (through["model"], through["stop_reason"]) == ("math", own["stop_reason"])
    assert through["content"][0]["thinking"] == own["content"][0]["thinking"]


def test_what_an_engine_with_adapters_can_not_do_on_a_cpu_is_refused_and_ends_no_engine(front: Setup) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1, "echo": True, "logprobs": 1}
    answer = httpx.post(f"{front.router_url}/v1/completions", json=body, timeout=300)
    assert (answer.status_code, "ask an engine without adapters" in answer.text) == (400, True)
    assert whole(front.router_url, CHATS["plain"])
