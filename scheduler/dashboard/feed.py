"""The scheduler's answers for all viewers: it is asked seldom, its answers are kept, and no viewer waits
long.

Owns the connection to the scheduler, the last answer, and since when there is none. An absent scheduler is a
state and not an error. Only questions are sent.
"""

import asyncio
import logging
import os
import re
import time
from typing import Any

from rose.errors import ChannelError
from rose.scheduler.dashboard.question import Question
from rose.scheduler.dashboard.view import state_view
from rose.scheduler.runtime.channel.client import ControlClient
from rose.scheduler.runtime.channel.messages import Answer, Call, History, Overview
from rose.scheduler.runtime.channel.opening import ChannelUrl

logger = logging.getLogger(__name__)

REFRESH_S = 0.5
RETRY_S = 2.0
"""After a connection that failed."""
CONNECT_S = 0.5
ANSWER_S = 2.0
"""A scheduler that takes longer is shown as absent; the question stays on its way."""
ASK_AGAIN_S = 60.0
"""Questions wait in a Redis channel, and a scheduler that comes back has to answer them all."""
NUM_ANSWERS = 40
"""The answers per connection: Redis keeps a client's answers as long as the client is connected."""
NUM_SHOWN_EVENTS = 100


class Feed:
    """One scheduler. One event loop, and a thread while a question is on its way."""

    def __init__(self, channel: str) -> None:
        """Raises: ConfigError for a URL that no channel has."""
        self._channel = ChannelUrl.parse(channel)
        self._client: ControlClient | None = None
        self._num_answers = 0
        self._question = Question(self._ask_all, ANSWER_S)
        self._view: dict[str, Any] | None = None
        self._answered_at: float | None = None
        self._absent_since: float | None = None
        self._error: str | None = None

    @property
    def is_reachable(self) -> bool:
        """Whether the last question was answered."""
        return self._error is None and self._view is not None

    async def state(self) -> dict[str, Any]:
        """Returns the last answer and its age, after asking again if it is time. Wall-clock times, for
        people."""
        try:
            if (asked := await self._question.settled()) is not None:
                self._settle(asked)
        except TimeoutError as error:
            self._lost(str(error))
        return {
            "now": time.time(),
            "is_reachable": self.is_reachable,
            "answered_at": self._answered_at,
            "absent_since": self._absent_since,
            "error": self._error,
            "cluster": self._view,
        }

    def close(self) -> None:
        """Ends the connection, and with it a question that is on its way."""
        if self._client is not None:
            self._client.close()

    def _settle(self, asked: asyncio.Task[dict[str, Any]]) -> None:
        """Takes what has become of the question."""
        self._question.wait(RETRY_S)
        try:
            self._view = asked.result()
        except ChannelError as error:
            self._lost(without_password(str(error)))
            return
        if self._error is not None:
            logger.info("the scheduler answers again")
        self._question.wait(REFRESH_S)
        self._answered_at, self._absent_since, self._error = time.time(), None, None

    def _lost(self, reason: str) -> None:
        if self._error is None:
            self._absent_since = time.time()
            logger.warning("no answer from the scheduler reason=%s", reason)
        self._error = reason

    def _ask_all(self) -> dict[str, Any]:
        facts = self._ask(Overview)
        return state_view(facts, self._ask(History, last=NUM_SHOWN_EVENTS)["events"])

    def _ask(self, kind: type[Call], **fields: Any) -> dict[str, Any]:
        if self._client is not None and self._num_answers >= NUM_ANSWERS:
            self._client.close()
            self._client = None
        if self._client is None:
            channel = self._channel.join(f"dashboard:{os.uname().nodename}")
            self._client, self._num_answers = ControlClient(channel, CONNECT_S), 0
        reply = self._client.ask(kind(seq=self._client.next_seq(), **fields), ASK_AGAIN_S)
        self._num_answers += 1
        if not isinstance(reply, Answer) or reply.error is not None:
            raise ChannelError(f"the scheduler answered {reply}")
        return reply.body


def without_password(text: str) -> str:
    """Returns an error's text without what a Redis URL in it says of users and passwords: the page shows
    it."""
    return re.sub(r"//[^/\s]*@", "//", text)
