"""Chats through a front with other tool and reasoning parsers are answered as by an engine that has them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from front.chats import OTHERS_CHATS, streamed, whole
from front.other_parsers import PREFIX
from front.running import Setup, front_alone

pytestmark = pytest.mark.vllm
READ = {"reasoning": "reasoning", "tools auto": "tool_calls"}
"""What the parser finds in an answer that no grammar forces."""
CASES = [(parsers, kind) for parsers, chats in OTHERS_CHATS.items() for kind in chats]


@pytest.fixture(scope="module")
def front_url(front: Setup, engines_dir: Path) -> Iterator[str]:
    """A front of its own before the same router, which has all parsers at the paths of the engine's."""
    with front_alone(engines_dir, front) as url:
        yield url


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("parsers", "kind"), CASES)
def test_a_chat_is_answered_as_by_the_engine_also_when_it_is_cut(
    front: Setup, front_url: str, parsers: str, kind: str, is_streamed: bool
) -> None:
    chat, ask = OTHERS_CHATS[parsers][kind], streamed if is_streamed else whole
    own_url, url = (f"{each}/{PREFIX}/{parsers}" for each in (front.engine_url, front_url))
    own = ask(own_url, chat)
    if (part := READ.get(kind)) is not None:
        assert own[0][part], own
    assert ask(url, chat) == own
    for after in (1, 4):
        assert_equal_when_cut(front, lambda: ask(url, chat), own, after)


def assert_equal_when_cut(front: Setup, ask: Callable[[], Any], expected: Any, after: int) -> None:
    """Asks until an answer was cut behind that many events."""
    front.proxy.arm(after)
    while not front.proxy.has_cut:
        assert ask() == expected
