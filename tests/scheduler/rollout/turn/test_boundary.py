"""A generation that is cut within a character is resumed at the beginning of that character."""

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rose.scheduler.rollout.turn.attempt.boundary import num_unfinished
from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker, expected_tokens

TEXT = "aé🙂b ß🙂"
PROMPT = [11, 12, 13]
TOKENS = expected_tokens(PROMPT, 9)
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 9}


def byte_tokenizer() -> Tokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def streamed(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """The text that vLLM 0.32 gives for tokens generated after a prompt."""
    stream = decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
    return "".join(stream.step(tokenizer, token) or "" for token in tokens)


async def test_cut_after_any_token_both_parts_make_the_whole_text() -> None:
    tokenizer = byte_tokenizer()
    prompt, tokens = tokenizer.encode("Say: ").ids, tokenizer.encode(TEXT).ids

    async def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids)))

    for cut in range(len(tokens)):
        kept = cut - await num_unfinished(tokens[:cut], decode)
        before = streamed(tokenizer, prompt, tokens[:cut])
        assert before + streamed(tokenizer, prompt + tokens[:kept], tokens[kept:]) == TEXT
        if kept < cut:  # what this is for: the prompt would come again
            assert streamed(tokenizer, prompt + tokens[:cut], tokens[cut:]).startswith("Say: ")


async def test_tokens_of_an_unfinished_character_are_made_again(start_router: StartRouter) -> None:
    async with ScriptedWorker(unfinished=frozenset(TOKENS[3:5])) as worker, start_router(worker) as client:
        worker.faults.append(Fault(kind="abort_reclaimed", after_tokens=5))
        logprobs = {"logprobs": 0, "return_tokens_as_token_ids": True}
        choice = (await client.complete({**BODY, **logprobs}))["choices"][0]
        assert worker.requests[1]["prompt"] == PROMPT + TOKENS[:3]
        assert (choice["token_ids"], choice["rose"]["resumes"]) == (TOKENS, 1)
        assert choice["text"] == "".join(f"<{t}>" for t in TOKENS if t not in TOKENS[3:5])
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in TOKENS]
        assert sum(span["tokens"] for span in choice["rose"]["spans"]) == 9


@pytest.mark.parametrize("has_ids", [False, True])
async def test_streamed_tokens_can_not_be_taken_back_but_text_need_not(
    start_router: StartRouter, has_ids: bool
) -> None:
    async with ScriptedWorker(unfinished=frozenset(TOKENS[3:5])) as worker, start_router(worker) as client:
        worker.faults.append(Fault(kind="abort_reclaimed", after_tokens=5))
        body = {**BODY, "stream": True, "return_token_ids": has_ids}
        async with client.http.post(f"{client.router.url}/v1/completions", json=body) as response:
            heard = await response.text()
    assert ("a part of a character" in heard) is has_ids
    assert ('"finish_reason":"length"' in heard) is not has_ids
