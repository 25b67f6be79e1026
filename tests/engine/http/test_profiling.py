"""Which steps a profiling run makes an engine take."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from rose.engine.http.profiling import Shapes, shapes_for


def shapes(max_model_len: int, step_tokens: int, max_seqs: int, num_drafts: int = 0) -> Shapes:
    speculation = SimpleNamespace(num_speculative_tokens=num_drafts) if num_drafts else None
    scheduling = SimpleNamespace(max_num_batched_tokens=step_tokens, max_num_seqs=max_seqs)
    model = SimpleNamespace(max_model_len=max_model_len)
    client: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(
            model_config=model, scheduler_config=scheduling, speculative_config=speculation
        )
    )
    return shapes_for(client)


def test_a_profile_reaches_a_whole_step_and_a_whole_batch() -> None:
    found = shapes(max_model_len=32768, step_tokens=8192, max_seqs=256)
    assert found.prompt_tokens == (8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 32759)
    contexts = (32759 // 16, 32759 // 4)
    assert found.batches == (*((n, c) for n in (1, 4, 16) for c in contexts), (256, 64))


def test_a_profile_of_a_small_engine_has_no_step_that_it_cannot_form() -> None:
    found = shapes(max_model_len=1024, step_tokens=512, max_seqs=8)
    assert found.prompt_tokens == (512, 256, 128, 64, 32, 16, 1015)
    assert found.batches == tuple((n, c) for n in (1, 2, 8) for c in (63, 253))
    tiny = shapes(max_model_len=64, step_tokens=2048, max_seqs=64)
    assert max(tiny.prompt_tokens) == 55 and len(tiny.prompt_tokens) == 6
    assert max(tiny.batches) == (64, 55)


def test_a_profile_with_draft_tokens_leaves_room_for_those_that_are_accepted() -> None:
    found = shapes(max_model_len=1024, step_tokens=512, max_seqs=8, num_drafts=3)
    assert max(found.prompt_tokens) == 1024 - 8 * 4 - 1
