"""Announcing a version to the routers whose turns it is for, as soon as the relay has all of it.

Routers hear from engines which weights they have, and engines from the relay what there is, so without the
trainer's own word a turn could begin on older weights for a moment. The key is the job's, which the router
takes for the job's own run alone. Never raises: a router that can't be told gives turns older weights until
an engine has the new ones, which is logged. One thread at a time.
"""

import logging
import time
from collections.abc import Sequence
from typing import Self

import httpx

from rose.config import Settings
from rose.http import PUBLISHED_PATH, http_client, urls_of
from rose.signature import ANNOUNCED, Signer
from rose.types import WeightVersion

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_ASK_AGAIN_S = 0.1


class RunAnnouncer:
    """The routers of one trainer; there may be none."""

    def __init__(self, urls: Sequence[str], settings: Settings, signer: Signer | None) -> None:
        self._urls = urls
        self._key, self._ca = settings.router_api_key, settings.tls_ca
        self._signer = signer
        self._problems: dict[str, str] = {}

    @classmethod
    def of(cls, settings: Settings, signer: Signer | None) -> Self:
        """Returns that of the routers in ROSE_ROUTER_URL, which the job scheduler sets.

        Raises: ValueError if it holds an empty address.
        """
        return cls(urls_of(settings.router_url) if settings.router_url is not None else (), settings, signer)

    def announce(self, version: WeightVersion) -> None:
        """Tells each router: a turn may reach any of them before they have told each other."""
        if not self._urls:
            return
        body = {"version": str(version)}
        if self._signer is not None:
            body["signed"] = self._signer.seal(ANNOUNCED, str(version).encode()).decode()
        with http_client(key=self._key, timeout=_TIMEOUT_S, ca=self._ca) as client:
            for url in self._urls:
                self._note(url, version, _problem(client, url, body))

    def _note(self, url: str, version: WeightVersion, problem: str | None) -> None:
        if problem is None:
            self._problems.pop(url, None)
        elif self._problems.get(url) != problem:  # once, and not with each version
            self._problems[url] = problem
            logger.warning(
                "router %s was not told of %s: %s. Turns may get older weights until an engine has these",
                *(url, version, problem),
            )


def _problem(client: httpx.Client, url: str, body: dict[str, str]) -> str | None:
    """Returns why a router could not be told; None if it was. One that is full makes room within moments."""
    until_s = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            answer = client.post(url + PUBLISHED_PATH, json=body)
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > until_s:
            return None if answer.is_success else f"{answer.status_code} {answer.text[:500]}"
        time.sleep(_ASK_AGAIN_S)
