"""Checks what a front and the workers behind its router must agree on, before the front serves.

Owns the questions to the router. A front whose model, context or tokenizer differs from the workers' ends and
names the difference, because its tokens would be wrong. It waits for the first worker of its model and
through temporary faults, but not for a router.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from rose.errors import ConfigError

logger = logging.getLogger(__name__)

ROUTER_S = 15.0
"""How long a router may take to listen: `rose router` starts its fronts right after that."""
_ASK_AGAIN_S = 0.5
_SAY_AGAIN_S = 30.0
_PASSING = (408, 429)
"""Errors below 500 that pass."""
_SHOWN_CHARACTERS = 200
_NUM_IDS = 64
_TEXT = 'Don\'t panic: 3.14 + 2 = 5.14!\n\t{"a": [1, null]} <think>naïve 東京</think> w3 w17 <|im_end|>'


class RouterQuestions:
    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._url = str(client.base_url).rstrip("/")
        self._said_at = -math.inf

    def card(self, names: Sequence[str], model_dir: str) -> Mapping[str, Any]:
        """Returns the card of the model that a front is for. It waits until a worker serves it.

        Raises: ConfigError if no router is there, it wants another key, or served_card() can't choose.
        """
        while True:
            answer = self._answered("GET", "/v1/models")
            cards = answer.json()["data"] if answer.status_code == 200 else []
            if not cards:
                self._wait(self._url, "the router has no model yet")
            elif missing := sorted(set(names) - {card["id"] for card in cards}):
                known = ", ".join(sorted(card["id"] for card in cards))
                reason = f"--served-model-name {missing[0]}: the router serves {known} so far"
                self._wait(self._url, reason)
            else:
                return served_card(cards, names, model_dir)

    def is_open(self, url: str) -> bool:
        """Returns whether the router at ``url`` takes requests without a key. If a router other than the
        client's own has gone, the answer is False, as for a router that did not listen when the front
        started.

        Raises: ConfigError if the client's own router has gone.
        """
        request = httpx.Request("GET", f"{url}/v1/models")  # without the client's own headers
        began = time.monotonic()
        while True:
            try:
                return self._client.send(request).status_code != httpx.codes.UNAUTHORIZED
            except httpx.TransportError as error:
                if time.monotonic() - began <= ROUTER_S:
                    self._wait(url, f"it does not answer ({type(error).__name__})")
                elif httpx.URL(url) == self._url:
                    raise _gone(url, error) from error
                else:
                    logger.warning("not known whether a key is wanted router=%s error=%r", url, error)
                    return False

    def _answered(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Returns an answer of the router that asking again would not change.

        Raises: ConfigError if no router is there, or it wants another key.
        """
        began = time.monotonic()
        while True:
            try:
                response = self._client.request(method, path, json=body)
            except httpx.TransportError as error:
                if time.monotonic() - began > ROUTER_S:
                    raise _gone(self._url, error) from error
                self._wait(self._url, f"it does not answer ({type(error).__name__})")
                continue
            if response.status_code == 401:
                raise ConfigError(
                    f"--router {self._url}: the router asks for a key; set ROSE_ROUTER_API_KEY to the "
                    "router's api_key"
                )
            if response.status_code < 500 and response.status_code not in _PASSING:
                return response
            self._wait(self._url, f"it answers {response.status_code} {response.text[:_SHOWN_CHARACTERS]}")
            began = time.monotonic()

    def _wait(self, url: str, reason: str) -> None:
        if time.monotonic() - self._said_at >= _SAY_AGAIN_S:
            logger.info("waiting for the router router=%s reason=%s", url, reason)
            self._said_at = time.monotonic()
        time.sleep(_ASK_AGAIN_S)

    def check_tokenizer(self, model: str, tokenizer: Any) -> None:
        """Compares the tokenizer with that of a worker, in both directions.

        Raises: ConfigError, which says where they differ.
        """
        count = len(tokenizer)
        ids = sorted({index * (count - 1) // (_NUM_IDS - 1) for index in range(_NUM_IDS)})
        self._compare("ids", model, _TEXT, tokenizer.encode(_TEXT), "/tokenize", {"prompt": _TEXT}, "tokens")
        self._compare("text", model, ids, tokenizer.decode(ids), "/detokenize", {"tokens": ids}, "prompt")

    def _compare(
        self, what: str, model: str, given: str | Sequence[int], own: Any, path: str, body: Any, key: str
    ) -> None:
        response = self._answered("POST", path, {"model": model, **body})
        theirs = response.json().get(key) if response.status_code == 200 else None
        if theirs != own:
            answer = theirs if theirs is not None else f"{response.status_code} {response.text}"
            raise ConfigError(
                f"--model: its tokenizer differs from that of the workers behind {self._url}: for"
                f" {given!r:.60} theirs gives {what} {answer!r:.120}, this one {own!r:.120}; give the"
                f" workers' own model, or its --tokenizer"
            )


def _gone(url: str, error: httpx.TransportError) -> ConfigError:
    return ConfigError(
        f"--router {url}: does not answer ({type(error).__name__}); start rose router first, or give its"
        " address"
    )


def served_card(
    cards: Sequence[Mapping[str, Any]], names: Sequence[str], model_dir: str
) -> Mapping[str, Any]:
    """Returns the card of the model that a front is for: the one it is told to serve, else the only one.

    `names` are among the cards. LoRA adapters are no choice: a front serves those of its model, too.
    Raises: ConfigError if the router has several models and none is named.
    """
    all_cards = {card["id"]: card for card in cards}
    if names:
        return all_cards[names[0]]
    if model_dir in all_cards:
        return all_cards[model_dir]
    bases = {name: card for name, card in all_cards.items() if card.get("parent") is None}
    served = bases or all_cards
    if len(served) > 1:
        known = ", ".join(sorted(served))
        raise ConfigError(f"the router serves {known}; say which one with --served-model-name")
    return next(iter(served.values()))
