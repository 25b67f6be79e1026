"""Announces a version to the run's routers, as soon as the relay has all of it.

Routers learn from engines which weights they have, and engines learn from the relay which versions there are.
So without an announcement a turn could begin on older weights for a moment. The router accepts the job's key
only for the job's own run. Never raises: a router that can't be told is named in the log. Such a router gives
turns older weights until it is told of the next version, or until 10 minutes after the last version of which
it was told; a router that was never told follows its engines. A router that does not answer is tried for
about 5 s, and with the next version once, for about 1 s. One thread at a time.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import httpx

from rose.config import Settings
from rose.errors import ConfigError
from rose.http import PUBLISHED_PATH, http_client, urls_of
from rose.signature import ANNOUNCED, Signer
from rose.types import WeightVersion

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_ONCE_TIMEOUT_S = 1.0
"""For a router that could not be told of the version before."""
_ASK_AGAIN_S = 0.1


class RunAnnouncer:
    """The routers of one trainer; there may be none."""

    def __init__(self, urls: Sequence[str], settings: Settings, signer: Signer | None) -> None:
        self._urls = urls
        self._signer = signer
        self._problems: dict[str, str] = {}
        """Why routers were not told of the last version, by their addresses."""
        self._client: httpx.Client | None = None
        if urls:
            self._client = http_client(key=settings.router_api_key, timeout=_TIMEOUT_S, ca=settings.tls_ca)
            self._threads = ThreadPoolExecutor(len(urls), thread_name_prefix="rose-announce")

    @classmethod
    def of(cls, settings: Settings, signer: Signer | None) -> Self:
        """Returns that of the routers in ROSE_ROUTER_URL, which the job scheduler sets. Opens no connection.

        Raises: ConfigError if it holds an empty or malformed address.
        """
        return cls(_checked(settings.router_url) if settings.router_url is not None else (), settings, signer)

    def announce(self, version: WeightVersion) -> None:
        """Tells each router: a turn may reach any of them before they have told each other."""
        if self._client is None:
            return
        client, body = self._client, {"version": str(version)}
        if self._signer is not None:
            body["signed"] = self._signer.seal(ANNOUNCED, str(version).encode()).decode()

        def problem(url: str) -> str | None:
            return _problem(client, url, body, is_asked_once=url in self._problems)

        for url, found in zip(self._urls, list(self._threads.map(problem, self._urls)), strict=True):
            self._note(url, version, found)

    def close(self) -> None:
        """Closes what telling routers has opened."""
        if self._client is not None:
            self._threads.shutdown()
            self._client.close()

    def _note(self, url: str, version: WeightVersion, problem: str | None) -> None:
        if problem is None:
            self._problems.pop(url, None)
            return
        is_new = self._problems.get(url) != problem
        self._problems[url] = problem
        if is_new:  # once, and not with each version
            logger.warning(
                "router %s was not told of %s: %s. Turns there may get older weights until the next version"
                " is announced, or for 10 minutes",
                *(url, version, problem),
            )


def _checked(text: str) -> tuple[str, ...]:
    try:
        urls = urls_of(text)
        for url in map(httpx.URL, urls):
            if url.scheme not in ("http", "https") or not url.host:
                raise ValueError(f"{str(url)!r}: expected http://HOST:PORT or https://HOST:PORT")
    except (ValueError, httpx.InvalidURL) as error:
        raise ConfigError(f"ROSE_ROUTER_URL={text}: {error}") from error
    return urls


def _problem(client: httpx.Client, url: str, body: dict[str, str], *, is_asked_once: bool) -> str | None:
    """Returns why a router could not be told; None if it was. One that is full makes room within moments, and
    one that starts again listens soon."""
    until_s = time.monotonic() + (_ONCE_TIMEOUT_S if is_asked_once else _TIMEOUT_S)
    while True:
        timeout_s = max(until_s - time.monotonic(), _ONCE_TIMEOUT_S)
        try:
            # An idle connection would take one of the router's until the next version.
            headers = {"Connection": "close"}
            answer = client.post(url + PUBLISHED_PATH, json=body, headers=headers, timeout=timeout_s)
        except httpx.HTTPError as error:
            problem, may_pass = str(error) or type(error).__name__, isinstance(error, httpx.TransportError)
        else:
            if answer.is_success:
                return None
            problem = f"{answer.status_code} {answer.text[:500]}"
            may_pass = answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
        if is_asked_once or not may_pass or time.monotonic() > until_s:
            return problem
        time.sleep(_ASK_AGAIN_S)
