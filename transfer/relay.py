"""The relay: a small object store between the trainer and the engines.

Owns the Relay protocol and the reading of relay URLs.
Promises of every relay: an object is seen whole or not at all; put() never replaces; a failure raises
RelayError with the key. Never knows what the objects mean (manifest does).
Source: ROSE §4.2 (relay layer that decouples trainer and engines).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

from rose.transfer.manifest import run_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What Relay.wait() tells."""

    seen: str
    """For the next wait()."""
    keys: list[str] | None
    """Of what was written; None: of anything, the relay does not know."""


class Relay(Protocol):
    """Blocking calls, safe to use from several threads."""

    def put(self, key: str, data: bytes) -> None:
        """Stores a new object. Raises: RelayError when the key exists or the relay is full."""

    def upsert(self, key: str, data: bytes) -> None:
        """Stores or replaces a small object."""

    def get(self, key: str) -> bytes | None:
        """The object, or None if there is none."""

    def remove(self, keys: Iterable[str]) -> None:
        """Removes objects; those that are gone already are no error."""

    def keys(self, prefix: str) -> list[str]:
        """All keys that start with `prefix`, in order."""

    def wait(self, prefixes: Sequence[str], seen: str | None, timeout_s: float) -> Changes:
        """Returns when objects under one of the prefixes may have been written since `seen`.

        seen: of the last wait(), None to begin with: then it returns at once. Whoever looks after each wait()
        misses nothing. May return early; after timeout_s at the latest.
        """

    def close(self) -> None:
        """Lets go of connections and buffers; the objects stay."""


def parse_relay_url(url: str) -> tuple[str, str, int, dict[str, str]]:
    """(kind, host, port, options) of "embedded://host:port" or "mooncake://host:port?admin=PORT".

    Raises: ValueError on anything else.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"relay URL {url!r}: {error}") from error
    if parts.scheme not in ("embedded", "mooncake") or not parts.hostname or port is None or parts.path:
        raise ValueError(f"relay URL {url!r} must be embedded://HOST:PORT or mooncake://HOST:PORT")
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    return parts.scheme, parts.hostname, port, options


def require_mooncake(url: str) -> None:
    """Raises: ValueError unless it is the URL of one Mooncake store."""
    if parse_relay_url(url)[0] != "mooncake":
        raise ValueError(f"relay URL {url!r} is not of the form mooncake://HOST:PORT")


def address_of(url: str) -> str:
    """host:port of a relay."""
    _, host, port, _ = parse_relay_url(url)
    return f"{host}:{port}"


def add_beside(url: str, other: str) -> str:
    """The URL of a Mooncake store that says of which other one it copies the frames."""
    return f"{url}{'&' if '?' in url else '?'}beside={address_of(other)}"


def beside_of(url: str) -> str | None:
    """host:port of the store whose frames this one copies, if it does."""
    kind, _, _, options = parse_relay_url(url)
    return options.get("beside") if kind == "mooncake" else None


def open_relay(url: str, key: str | None = None) -> Relay:
    """Connects to a running relay, or to several that hold the same objects: their URLs with commas between.

    key: sent to embedded relays. Raises: RelayError when nothing answers there, ValueError on a bad URL.
    """
    urls = url.split(",")
    if len(urls) == 1:
        return _open_one(url, key)
    if len(set(urls)) != len(urls):
        raise ValueError(f"relay URL {url!r} names a relay twice: copies must be independent")
    for each in urls:
        parse_relay_url(each)
    from rose.transfer.replicated_relay import ReplicatedRelay

    return ReplicatedRelay((each, partial(_open_one, each, key)) for each in urls)


def _open_one(url: str, key: str | None) -> Relay:
    kind, host, port, options = parse_relay_url(url)
    if kind == "embedded":
        from rose.transfer.embedded_relay import EmbeddedRelay

        return EmbeddedRelay(host, port, key)
    from rose.transfer.mooncake_relay import MooncakeRelay

    admin = options.get("admin")
    if admin is not None and not admin.isdigit():
        raise ValueError(f"relay URL {url!r}: admin must be a port number")
    return MooncakeRelay(host, port, int(admin) if admin is not None else port + 1)


def remove_run(relay: Relay, run_id: str) -> int:
    """Removes every object of a run that ended; returns how many."""
    keys = relay.keys(run_prefix(run_id))
    relay.remove(keys)
    return len(keys)
