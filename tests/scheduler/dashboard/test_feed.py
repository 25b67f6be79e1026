"""What the dashboard asks of a scheduler, and what it tells when none answers."""

import pytest

from rose.errors import ConfigError
from rose.scheduler.dashboard.feed import Feed, without_password


async def test_an_absent_scheduler_is_a_state_with_its_beginning(tmp_path: object) -> None:
    feed = Feed(f"unix:{tmp_path}")
    first = state = await feed.state()
    assert (first["is_reachable"], first["cluster"]) == (False, None)
    while "rose sched serve" not in state["error"]:  # on a slow machine: no answer yet
        state = await feed.state()
    assert first["absent_since"] == state["absent_since"] is not None, "not since the last question"
    feed.close()


def test_an_unknown_channel_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tcp://x.*expected unix:FOLDER"):
        Feed("tcp://x")


def test_a_password_in_a_channel_is_not_shown() -> None:
    assert without_password("redis://me:s@cret@host:6379/0: refused") == "redis://host:6379/0: refused"
    assert without_password("unix:/a/b@c: gone") == "unix:/a/b@c: gone"
