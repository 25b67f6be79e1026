"""The token endpoints: each shape of answer, and the origin of each token."""

import json
from typing import Any

import pytest

from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker, expected_tokens

PROMPT = [11, 12, 13]
SIX = expected_tokens(PROMPT, 6)


async def test_generate_answers_with_both_spellings_of_a_token(start_router: StartRouter) -> None:
    async with ScriptedWorker(version="run/3") as worker, start_router(worker) as client:
        body = {
            "token_ids": PROMPT,
            "sampling_params": {"max_tokens": 6, "logprobs": 1},
            "request_id": "mine",
        }
        status, answer = await client.post("/inference/v1/generate", body)
        assert status == 200
        (choice,) = answer["choices"]
        assert (answer["request_id"], choice["token_ids"], choice["finish_reason"]) == ("mine", SIX, "length")
        tokens = choice["logprobs"]["content"]
        assert [each["token_id"] for each in tokens] == SIX
        assert [each["token"] for each in tokens] == [f"token_id:{token}" for token in SIX]
        assert [each["logprob"] for each in tokens] == [-token / 1000 for token in SIX]
        assert tokens[0]["top_logprobs"][0]["token_id"] == SIX[0]
        assert choice["weight_versions"] == [{"start": 0, "end": 6, "version": "run/3"}]
        assert choice["rose"]["cached_tokens"] == 1
        assert answer["usage"]["prompt_tokens"] == 3


async def test_generate_is_resumed_like_a_completion(start_router: StartRouter) -> None:
    async with ScriptedWorker(version="run/1") as a, ScriptedWorker(version="run/1") as b:
        a.faults.append(Fault(kind="disconnect", after_tokens=4))
        async with start_router(a, (b, "serving"), avoid_s=60) as client:
            body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 6, "logprobs": 0}}
            _, answer = await client.post("/inference/v1/generate", body)
            (choice,) = answer["choices"]
            assert choice["token_ids"] == SIX
            assert len(choice["logprobs"]["content"]) == 6
            spans = [(s["start"], s["end"], s["version"]) for s in choice["weight_versions"]]
            assert spans == [(0, 4, "run/1"), (4, 6, "run/1")]
            assert choice["rose"]["resumes"] == 1


async def test_generate_fans_out_and_streams(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        sampling = {"max_tokens": 6, "n": 2}
        body = {"token_ids": PROMPT, "sampling_params": sampling, "stream": True}
        body["stream_options"] = {"include_usage": True}
        async with client.http.post(f"{client.router.url}/inference/v1/generate", json=body) as response:
            lines = (await response.text()).split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
        for index in (0, 1):
            choices = [c for event in events for c in event["choices"] if c["index"] == index]
            assert [token for choice in choices for token in choice["token_ids"]] == SIX
            assert choices[-1]["finish_reason"] == "length"
        assert events[-1]["usage"]["completion_tokens"] == 12


async def test_sglang_generate_has_its_meta_info(start_router: StartRouter) -> None:
    async with ScriptedWorker(version="run/3") as worker, start_router(worker) as client:
        sampling = {"max_new_tokens": 6, "temperature": 0.0, "no_stop_trim": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "rid": "mine"}
        status, answer = await client.post("/generate", body)
        assert status == 200
        meta = answer["meta_info"]
        assert (answer["output_ids"], meta["id"]) == (SIX, "mine")
        assert meta["finish_reason"] == {"type": "length", "length": 6}
        assert meta["output_token_logprobs"] == [[-token / 1000, token, None] for token in SIX]
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 6, 1)
        assert (meta["weight_version"], meta["rose"]["resumes"]) == ("run/3", 0)
        assert worker.requests[0]["max_tokens"] == 6


async def test_sglang_takes_batches_and_streams_the_whole_answer_so_far(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        body: dict[str, Any] = {"input_ids": [[1], [2]], "sampling_params": {"max_new_tokens": 3}}
        _, answers = await client.post("/generate", body)
        assert [each["output_ids"] for each in answers] == [expected_tokens([p], 3) for p in (1, 2)]
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6}, "stream": True}
        async with client.http.post(f"{client.router.url}/generate", json=body) as response:
            lines = [line for line in (await response.text()).split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        last = json.loads(lines[-2].removeprefix("data: "))
        assert (last["output_ids"], last["meta_info"]["finish_reason"]["type"]) == (SIX, "length")


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("/inference/v1/generate", {}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [[1]]}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [-1]}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"warmth": 1}}, "warmth"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": 3}, "sampling_params"),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"x": 1}}, "features"),
        ("/generate", {"sampling_params": {}}, "input_ids"),
        ("/generate", {"input_ids": [1], "sampling_params": [{}]}, "sampling_params"),
        ("/generate", {"text": ""}, "prompt"),
    ],
)
async def test_an_unsupported_parameter_is_400_and_named(
    start_router: StartRouter, path: str, body: dict[str, Any], problem: str
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        status, answer = await client.post(path, body)
        assert (status, answer["error"]["code"]) == (400, 400)
        assert problem in answer["error"]["message"]
        assert not worker.requests


async def test_generate_hands_on_reasoning_and_extra_arguments(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        body = {
            "token_ids": PROMPT,
            "sampling_params": {"max_tokens": 2, "extra_args": {"own": 1}},
            "reasoning_ended": False,
            "reasoning_parser_kwargs": {"chat_template_kwargs": {"enable_thinking": True}},
        }
        assert (await client.post("/inference/v1/generate", body))[0] == 200
        (sent,) = worker.requests
        assert sent["vllm_xargs"] == {
            "own": 1,
            "rose_reasoning_ended": 0,
            "rose_chat_template_kwargs": '{"enable_thinking":true}',
        }


async def test_a_turn_without_text_is_resumed_within_a_character(start_router: StartRouter) -> None:
    """Its client makes the text of all tokens itself, so none has to be dropped."""
    async with ScriptedWorker(unfinished=frozenset(SIX[2:4])) as worker, start_router(worker) as client:
        worker.faults.append(Fault(kind="abort_reclaimed", after_tokens=4))
        sampling = {"max_tokens": 6, "detokenize": False}
        body = {"token_ids": PROMPT, "sampling_params": sampling, "stream": True}
        async with client.http.post(f"{client.router.url}/inference/v1/generate", json=body) as response:
            lines = (await response.text()).split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == SIX
        assert worker.requests[1]["prompt"] == PROMPT + SIX[:4]
