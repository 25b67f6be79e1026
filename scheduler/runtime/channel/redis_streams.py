"""The control channel over Redis Streams, for clusters of more than one host.

Owns the keys of one channel, and keeps the promises of protocol.py as long as Redis keeps what it has
acknowledged. So start Redis with ``appendonly yes`` and ``appendfsync always`` (with ``everysec`` a crash may
lose a second). Commit, answers and acknowledgement are one script, so they happen together or not at all, and
only while this scheduler owns the channel.

The keys, with P = ``rose:{CHANNEL}`` (one hash slot): P:owner (who schedules; expires), P:calls (stream;
consumer group ``scheduler``), P:rows (hash), P:events (stream), P:to:CLIENT (stream; expires after a day).
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit, urlunsplit

import redis

from rose.errors import ChannelError
from rose.scheduler.runtime.channel.messages import NUM_EVENTS
from rose.scheduler.runtime.channel.protocol import COMMAND, Batch, Incoming

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

OWNER_S = 5.0
"""A scheduler that is silent for this long may be replaced from another host; on its own host, at once."""
RETRY_S = 0.02
FULL_RETRY_S = 0.2
"""The time between two attempts to write to a Redis that has no room."""
GONE_S = 60.0
"""If Redis is gone for longer, the scheduler ends with an error."""
MAX_ANSWERS = 1_000
"""The answers that are kept for one client."""
MAX_CALLS = 100_000
"""The calls that are kept, handled ones included."""
ANSWERS_TTL_S = 24 * 3600
BLOCK_S = 1.0
"""The longest wait of a client in one call, so that it notices a Redis that vanished."""

_COMMIT = """
-- KEYS: owner, rows, events, calls. ARGV: token, owner's ttl in ms, counts of: rows to set, to remove,
-- events, answers, ids; then these. Returns the owner if it is another.
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return owner end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
local at = 7
for _ = 1, ARGV[3] do redis.call('HSET', KEYS[2], ARGV[at + 1], ARGV[at + 2]); at = at + 2 end
for _ = 1, ARGV[4] do redis.call('HDEL', KEYS[2], ARGV[at + 1]); at = at + 1 end
for _ = 1, ARGV[5] do
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[at + 2], '*', 'b', ARGV[at + 1]); at = at + 2
end
for _ = 1, ARGV[6] do
  redis.call('XADD', ARGV[at + 1], 'MAXLEN', '~', ARGV[at + 3], '*', 'b', ARGV[at + 2])
  redis.call('EXPIRE', ARGV[at + 1], ARGV[at + 4]); at = at + 4
end
for _ = 1, ARGV[7] do redis.call('XACK', KEYS[4], 'scheduler', ARGV[at + 1]); at = at + 1 end
return false
"""


class _Keys:
    """The names of one channel's keys, and a connection to their Redis."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        channel = parse_qs(parts.query).get("channel", ["main"])[0]
        self.server = urlunsplit(parts._replace(query=""))
        self.prefix = f"rose:{{{channel}}}"
        self.owner, self.rows = f"{self.prefix}:owner", f"{self.prefix}:rows"
        self.events, self.calls = f"{self.prefix}:events", f"{self.prefix}:calls"

    def connection(self) -> Any:
        """Returns a connection that opens when it is used, and waits for answers longer than BLOCK_S."""
        return redis.Redis.from_url(
            self.server, socket_timeout=5 * BLOCK_S, socket_connect_timeout=BLOCK_S, retry=None
        )

    def answers(self, client: str) -> str:
        """Names the stream of one client's answers."""
        return f"{self.prefix}:to:{client}"


class RedisScheduler:
    """The scheduler's end."""

    def __init__(self, url: str) -> None:
        self._keys = _Keys(url)
        self._redis = self._keys.connection()
        self._token = f"{_host()} {os.getpid()} {_started(os.getpid())}"
        self._script = self._redis.register_script(_COMMIT)
        self._beaten_s = time.monotonic()
        self._retry(self._take)
        self._retry(self._make_group)
        self._is_replaying = True
        """The calls that an earlier scheduler read and did not commit come first."""

    def load(self) -> Mapping[str, bytes]:
        rows: dict[bytes, bytes] = self._retry(lambda: self._redis.hgetall(self._keys.rows))
        return {key.decode(): value for key, value in rows.items()}

    def events(self, last: int) -> Sequence[bytes]:
        found = self._retry(lambda: self._redis.xrevrange(self._keys.events, count=last))
        return [fields[b"b"] for _, fields in reversed(found)]

    def receive(self, timeout_s: float) -> Sequence[Incoming]:
        since = "0" if self._is_replaying else ">"
        found = self._retry(lambda: self._read(since, timeout_s))
        entries = found[0][1] if found else []
        if not entries:
            self._is_replaying = False
        return [
            Incoming(client=fields[b"c"].decode(), body=fields[b"b"], token=number.decode())
            for number, fields in entries
            if fields  # trimmed while it was pending
        ]

    def _read(self, since: str, timeout_s: float) -> Any:
        wait_ms = max(1, int(1e3 * timeout_s))
        return self._redis.xreadgroup(
            "scheduler", "scheduler", {self._keys.calls: since}, count=100, block=wait_ms
        )

    def commit(self, batch: Batch, handled: Sequence[Incoming]) -> None:
        is_due = time.monotonic() - self._beaten_s > OWNER_S / 5
        if not (batch.rows or batch.events or batch.outgoing or handled or is_due):
            return
        keys = self._keys
        kept = {key: value for key, value in batch.rows.items() if value is not None}
        removed = [key for key, value in batch.rows.items() if value is None]
        arguments: list[Any] = [self._token, int(1e3 * OWNER_S), len(kept), len(removed)]
        arguments += [len(batch.events), len(batch.outgoing), len(handled)]
        arguments += [each for row in kept.items() for each in row]
        arguments += removed
        arguments += [each for event in batch.events for each in (event, NUM_EVENTS)]
        for each in batch.outgoing:
            arguments += [keys.answers(each.client), each.body, MAX_ANSWERS, ANSWERS_TTL_S]
        arguments += [each.token for each in handled]
        names = [keys.owner, keys.rows, keys.events, keys.calls]
        other = self._retry(lambda: self._script(keys=names, args=arguments))
        self._beaten_s = time.monotonic()
        if other is not None:
            raise ChannelError(f"{keys.server}: the scheduler {other.decode()} has taken {keys.prefix} over")

    def close(self) -> None:
        with contextlib.suppress(redis.RedisError):  # it expires by itself
            if self._redis.get(self._keys.owner) == self._token.encode():
                self._redis.delete(self._keys.owner)
        self._redis.close()

    def _take(self) -> None:
        """Becomes the owner. Raises: ChannelError, naming it, while another one lives."""
        key, ttl_ms = self._keys.owner, int(1e3 * OWNER_S)
        while not self._redis.set(key, self._token, nx=True, px=ttl_ms):
            owner = self._redis.get(key)
            if owner is None:
                continue
            if owner == self._token.encode():  # our own, before the connection was lost
                return
            if not _is_dead(owner.decode()):
                raise ChannelError(
                    f"{self._keys.server}: a scheduler serves {self._keys.prefix} already (host, pid, start: "
                    f"{owner.decode()}); stop it, choose another channel, or wait {OWNER_S:g} s if it is gone"
                )
            # Killed on this very host. Only if nobody else has taken it meanwhile:
            drop = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"
            self._redis.eval(drop, 1, key, owner)

    def _make_group(self) -> None:
        try:
            self._redis.xgroup_create(self._keys.calls, "scheduler", id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _retry(self, work: Callable[[], Result]) -> Result:
        """Repeats ``work`` through a restart of Redis, and while that has no room. Raises: ChannelError after
        GONE_S or lost data."""
        deadline, is_told = time.monotonic() + GONE_S, False
        while True:
            try:
                return work()
            except (redis.ConnectionError, redis.TimeoutError) as error:  # loading its data is one as well
                if time.monotonic() >= deadline:
                    raise ChannelError(f"{self._keys.server}: gone for {GONE_S:.0f} s ({error})") from error
                time.sleep(RETRY_S)
            except redis.ResponseError as error:
                if _is_full(error):
                    if not is_told:
                        logger.error(
                            "%s: %s; jobs and commands wait until it has room", self._keys.server, error
                        )
                    deadline, is_told = time.monotonic() + GONE_S, True
                    time.sleep(FULL_RETRY_S)
                    continue
                if "NOGROUP" not in str(error):
                    raise
                raise ChannelError(
                    f"{self._keys.server}: Redis has lost {self._keys.prefix}; run it with appendonly yes"
                ) from error


class RedisClient:
    """A client's end. It has two connections, because one waits in Redis."""

    def __init__(self, url: str, client: str) -> None:
        self._keys = _Keys(url)
        self._client = client
        self._sender = self._keys.connection()
        self._receiver = self._keys.connection()
        self._last = b"0"
        self._sent: list[bytes] = []
        """What a command takes back when it is closed. The scheduler has removed what it has answered."""
        self._is_closed = False
        self._is_unsent = False
        """A call could not be sent; the receiver, on the other connection, has not noticed."""

    def connect(self) -> None:
        self._convert(self._receiver.ping)
        self._is_unsent = False

    def send(self, body: bytes) -> None:
        """Waits while Redis has no room, except for a command, because its user waits."""
        while True:
            try:
                number = self._convert(lambda: self._add(body))
                break
            except ConnectionError:
                self._is_unsent = True
                raise
            except redis.ResponseError as error:
                if not _is_full(error):
                    raise
                time.sleep(FULL_RETRY_S)
                if self._is_closed or self._client.startswith(COMMAND):
                    self._is_unsent = True
                    raise ConnectionError(f"{self._keys.server}: {error}") from error
        if self._client.startswith(COMMAND):
            self._sent.append(number)

    def _add(self, body: bytes) -> bytes:
        fields = {"c": self._client, "b": body}
        number: bytes = self._sender.xadd(self._keys.calls, fields, maxlen=MAX_CALLS, approximate=True)
        return number

    def receive(self) -> bytes:
        stream = self._keys.answers(self._client)
        while not self._is_closed:
            if self._is_unsent:
                raise ConnectionError(f"{self._keys.server}: a call could not be sent")
            found = self._convert(
                lambda: self._receiver.xread({stream: self._last}, count=1, block=int(1e3 * BLOCK_S))
            )
            if found and not self._is_closed:
                [[_, [[self._last, fields]]]] = found
                body: bytes = fields[b"b"]
                return body
        self._receiver.close()
        raise ConnectionError("the client was closed")

    def close(self) -> None:
        self._is_closed = True
        stream = self._keys.answers(self._client)
        with contextlib.suppress(redis.RedisError):  # then nobody waits in it
            if self._sent:
                self._sender.xdel(self._keys.calls, *self._sent)
            self._sender.xadd(stream, {"b": b""})  # wakes our thread
            self._sender.expire(stream, 1)
        self._sender.close()

    def _convert(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise ConnectionError(f"{self._keys.server}: {error}") from error


def remove_channel(url: str) -> None:
    """Removes all that a channel holds in its Redis, for a channel that nobody will use again."""
    keys = _Keys(url)
    connection = keys.connection()
    with contextlib.suppress(redis.RedisError), contextlib.closing(connection):
        connection.delete(keys.owner, keys.rows, keys.events, keys.calls)


def _is_full(error: redis.ResponseError) -> bool:
    """Whether Redis refuses writes until there is room again, in its memory or on its disk."""
    return any(sign in str(error) for sign in ("used memory > 'maxmemory'", "MISCONF"))


def _host() -> str:
    return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def _started(pid: int) -> str | None:
    """When the process began, in ticks since boot, as pids are reused. None if there is no process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return stat[19] if stat[0] not in "ZX" else None


def _is_dead(owner: str) -> bool:
    """Whether the owner was a process of this host that has ended. For other hosts that is unknown."""
    host, _, process = owner.partition(" ")
    pid, _, started = process.partition(" ")
    return host == _host() and _started(int(pid)) != started
