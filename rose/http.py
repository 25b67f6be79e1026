"""HTTP clients of workers and services, and the names of headers. rose.transfer.relay.calls has the
relays'."""

import argparse
import random
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from rose.tls import client_context

KEEPALIVE_S = 2.0
"""When an idle connection is closed: sooner than vLLM's server does (5 s), which could otherwise close it
just as a request is sent."""
WATCHED = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
"""Socket options by which the kernel ends a connection within 30 s of the other host's death, also while an
answer without a timeout is waited for."""
JOB_HEADER = "X-Rose-Job"
"""Tells the router which RL job a turn belongs to."""
RUN_HEADER = "X-Rose-Run"
"""Tells the router which training run's weights a trainer wants."""
TIMEOUT_HEADER = "X-Rose-Timeout-S"
"""Tells the router how long a turn may take, queueing included."""
SESSION_HEADERS = ("X-Session-ID", "X-SMG-Routing-Key")
"""Name a turn's trajectory."""
API_KEY_HEADER = "X-Api-Key"
"""Where clients of /v1/messages send their key."""
FRONT_HEADERS = (
    *("Authorization", API_KEY_HEADER, JOB_HEADER, RUN_HEADER),
    *(*SESSION_HEADERS, TIMEOUT_HEADER, "traceparent"),
)
"""What a front takes along from a chat to its turns."""
FRONT_SECRET_HEADER = "X-Rose-Front"
"""Tells a router that a turn comes from one of its own fronts, by the secret that it started them with."""
NO_PROMPT_IDS_HEADER = "X-Rose-No-Prompt-Ids"
"""Tells a worker to leave the prompt's token ids, which the router knows, out of the stream."""

SO_FAR = "rose_so_far"
"""The field by which a client that lost its router tells another one which tokens of the answer it has."""
PUBLISHED_PATH = "/published"
"""The router's route for a trainer's word of the weights that it has published."""
LEASE_HEADER = "X-Rose-Lease"
"""Tells a worker by which router's lease a turn comes: ROUTER FENCE."""
NO_LEASE = "NoLease"
"""The type of the error (503) with which a worker refuses a turn that no lease covers."""

RETRY_S = 60.0
"""How long a turn is tried again while no router answers: a router that starts again takes less."""
_PAUSE_S = 0.2
_MOST_DOUBLINGS = 4
_MOST_PAUSE_S = 5.0


def urls_of(text: str) -> tuple[str, ...]:
    """Returns the addresses in a list that is separated by commas. Raises: ValueError for an empty one, or
    for what is no http://HOST:PORT."""
    found = [url.strip() for url in text.split(",")]
    if not all(found):
        raise ValueError(f"{text!r}: expected URL, or URL,URL,... of several routers before the same workers")
    return tuple(map(checked_url, found))


def checked_url(url: str) -> str:
    """Returns a server's URL without a last slash. Raises: ValueError for what is no http://HOST:PORT."""
    try:
        parts = urlsplit(url)
        host, port = httpx.URL(url).host, parts.port  # without a port the scheme's own is used
    except (ValueError, httpx.InvalidURL):
        host, port = "", None
    if not host or " " in url or port == 0 or parts.scheme not in ("http", "https"):
        raise ValueError(f"expected http://HOST:PORT, got {url!r}")
    return url.rstrip("/")


def url_argument(text: str) -> str:
    """Returns a server's URL for argparse. Raises: ArgumentTypeError for what is no http://HOST:PORT."""
    try:
        return checked_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def http_client(
    url: str = "", *, key: str | None, timeout: httpx.Timeout | float, ca: Path | None = None
) -> httpx.Client:
    """Makes a client for ``url`` with ``key`` as its bearer key; timeouts are in seconds.

    ca: the file of certificates that an https address must show one of; None: the system's.

    It uses no proxy of the environment: workers and services are reached directly.
    """
    return httpx.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {key}"} if key is not None else {},
        timeout=timeout,
        verify=client_context(ca),
        limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
        trust_env=False,
    )


def reason_of(error: httpx.HTTPError) -> str:
    """Returns why a server did not answer, with the fix if nobody who is trusted signed its certificate."""
    reason = str(error) or type(error).__name__
    is_stranger = "self-signed certificate" in reason or "issuer certificate" in reason  # OpenSSL's words
    return f"{reason}; set ROSE_TLS_CA to the file of the certificates to trust" if is_stranger else reason


class Failures:
    """The failures of a turn at several routers since it last made progress."""

    def __init__(self, retry_s: float, num_urls: int) -> None:
        self._retry_s = retry_s
        self._num_urls = num_urls
        self._num = self._num_tokens = 0
        self._until = 0.0

    def are_too_many(self, num_tokens: int) -> bool:
        """Notes one more after this many tokens. Each router is asked, however late it is."""
        now = time.monotonic()
        if not self._num or num_tokens > self._num_tokens:
            self._num, self._until = 0, now + self._retry_s
        self._num, self._num_tokens = self._num + 1, num_tokens
        return self._num >= self._num_urls and now >= self._until

    @property
    def have_all_failed(self) -> bool:
        """Whether each router has failed since the turn made progress."""
        return self._num >= self._num_urls

    def pause_s(self, wanted_s: float) -> float:
        """Returns the seconds until the next try, once all routers have failed: at least what the last one
        wants, and more each time."""
        num_rounds, num_more = divmod(self._num, self._num_urls)
        if num_more:
            return 0.0
        longest_s = _PAUSE_S * 2 ** min(num_rounds - 1, _MOST_DOUBLINGS)
        return min(wanted_s, _MOST_PAUSE_S) + random.uniform(longest_s / 2, longest_s)
