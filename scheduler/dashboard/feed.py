"""The scheduler's answers for all who look at once: asked seldom, kept, and never waited for long.

Owns: the connection to the scheduler, the last answer, and since when there is none. Promises: however many
look, the scheduler is asked at most once in REFRESH_S, and not at all while nobody looks; its absence is a
state and no error. Never: sends anything but questions.
"""

import asyncio
import logging
import os
import time
from typing import Any

from rose.errors import ChannelError
from rose.scheduler.dashboard.view import state_view
from rose.scheduler.runtime.channel import ChannelUrl
from rose.scheduler.runtime.client import ControlClient
from rose.scheduler.runtime.messages import Call, History, Overview, Reply

logger = logging.getLogger(__name__)

REFRESH_S = 0.5
RETRY_S = 3.0
"""While it does not answer: questions to an absent scheduler stay in a Redis channel until it is back."""
ANSWER_S = 2.0
NUM_SHOWN_EVENTS = 100


class Feed:
    """One scheduler. One event loop."""

    def __init__(self, channel: str) -> None:
        """Raises: ConfigError for a URL that no channel has."""
        self._channel = ChannelUrl.parse(channel)
        self._client: ControlClient | None = None
        self._lock = asyncio.Lock()
        self._next_s = 0.0
        self._view: dict[str, Any] | None = None
        self._answered_at: float | None = None
        self._absent_since: float | None = None
        self._error: str | None = None

    @property
    def is_reachable(self) -> bool:
        """Whether the last question was answered."""
        return self._error is None and self._view is not None

    async def state(self) -> dict[str, Any]:
        """The last answer and how old it is, after asking again if it is time. Wall-clock times, for people."""
        async with self._lock:
            if time.monotonic() >= self._next_s:
                await asyncio.to_thread(self._refresh)
                self._next_s = time.monotonic() + (REFRESH_S if self.is_reachable else RETRY_S)
        return {
            "now": time.time(),
            "is_reachable": self.is_reachable,
            "answered_at": self._answered_at,
            "absent_since": self._absent_since,
            "error": self._error,
            "cluster": self._view,
        }

    def close(self) -> None:
        """Ends the connection."""
        if self._client is not None:
            self._client.close()

    def _refresh(self) -> None:
        try:
            facts = self._ask(Overview)
            events = self._ask(History, last=NUM_SHOWN_EVENTS)["events"]
        except ChannelError as error:
            if self._error is None:
                self._absent_since = time.time()
                logger.warning("no answer from the scheduler reason=%s", error)
            self._error = str(error)
            return
        if self._error is not None:
            logger.info("the scheduler answers again")
        self._view = state_view(facts, events)
        self._answered_at, self._absent_since, self._error = time.time(), None, None

    def _ask(self, kind: type[Call], **fields: Any) -> dict[str, Any]:
        if self._client is None:
            channel = self._channel.join(f"dashboard:{os.uname().nodename}")
            self._client = ControlClient(channel, ANSWER_S)
        reply = self._client.ask(kind(seq=self._client.next_seq(), **fields), ANSWER_S)
        if not isinstance(reply, Reply) or reply.error is not None:
            raise ChannelError(f"the scheduler answered {reply}")
        return reply.body
