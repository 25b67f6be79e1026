"""Opens the control channel that a URL names: a Unix socket with SQLite, or Redis.

Owns: the reading of channel URLs. Never: sends anything.
"""

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rose.errors import ConfigError
from rose.scheduler.runtime.channel.protocol import ClientSide, SchedulerSide


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelUrl:
    """``unix:FOLDER`` or ``redis://HOST:PORT/DB?channel=NAME``."""

    url: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises: ConfigError."""
        if not url.startswith(("unix:", "redis://", "rediss://")) or url == "unix:":
            raise ConfigError(f"channel {url!r}: expected unix:FOLDER or redis://HOST:PORT/DB")
        if url.startswith("unix:"):  # jobs join it from folders of their own
            url = f"unix:{Path(url.removeprefix('unix:')).absolute()}"
        return cls(url=url)

    def serve(self) -> SchedulerSide:
        """The scheduler's end. Raises: ChannelError, naming the owner, if there is a scheduler already."""
        if self.url.startswith("unix:"):
            from rose.scheduler.runtime.channel.embedded import EmbeddedScheduler

            return EmbeddedScheduler(self._folder)
        from rose.scheduler.runtime.channel.redis_streams import RedisScheduler

        return RedisScheduler(self.url)

    def join(self, client: str) -> ClientSide:
        """A client's end, not connected yet. ``client`` says in logs who it is; its name is made unique."""
        client = f"{client}:{uuid.uuid4().hex[:12]}"
        if self.url.startswith("unix:"):
            from rose.scheduler.runtime.channel.embedded import EmbeddedClient

            return EmbeddedClient(self._folder, client)
        from rose.scheduler.runtime.channel.redis_streams import RedisClient

        return RedisClient(self.url, client)

    @property
    def _folder(self) -> str:
        return self.url.removeprefix("unix:")
