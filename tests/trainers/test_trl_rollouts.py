"""RouterRollouts: a batch whose router ends is asked for again at the next one."""

from types import SimpleNamespace
from typing import Any

import pytest

from rose.errors import WorkerError

pytestmark = pytest.mark.vllm

ANSWER = {"prompt_ids": [[1]], "completion_ids": [[2]], "logprobs": [[[-1.0]]]}
ARGS = SimpleNamespace(
    **{"max_completion_length": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": None},
    **{"repetition_penalty": 1.0, "generation_kwargs": None},
)
TRAINER = SimpleNamespace(state=SimpleNamespace(global_step=0), args=ARGS)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What TRL's client gets from each router, call by call; it is refused where nothing is left."""
    pytest.importorskip("trl")
    from rose.trainers import trl  # here, because it takes long

    left: dict[str, list[Any]] = {}

    class ScriptedClient:
        def __init__(self, base_url: str, connection_timeout: float) -> None:
            self._left = left[base_url]

        def generate(self, prompts: list[Any], **_: Any) -> Any:
            outcome = self._left.pop(0) if self._left else ConnectionError("refused")
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

    monkeypatch.setattr(trl, "VLLMClient", ScriptedClient)
    monkeypatch.setattr(trl, "CONNECT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(trl, "_PAUSE_S", 0.0)
    return left


@pytest.mark.parametrize(
    "lost", [ConnectionError("reset"), Exception("Request failed: 503, the router shuts down")]
)
def test_the_next_router_is_asked_however_late_the_first_one_ends(
    outcomes: dict[str, list[Any]], lost: Exception
) -> None:
    outcomes |= {"http://one": [lost], "http://other": [ANSWER]}
    from rose.trainers.trl import RouterRollouts

    rollouts = RouterRollouts("http://one,http://other")
    assert rollouts(["a"], TRAINER)["completion_ids"] == [[2]]
    with pytest.raises(WorkerError, match="http://one: does not answer"):
        rollouts(["a"], TRAINER)


def test_what_the_router_refuses_is_not_asked_again(outcomes: dict[str, list[Any]]) -> None:
    from rose.trainers.trl import RouterRollouts

    outcomes |= {"http://one": [Exception("Request failed: 400, too long")], "http://other": [ANSWER]}
    with pytest.raises(Exception, match="400, too long"):
        RouterRollouts("http://one,http://other")(["a"], TRAINER)
