"""What a front and the workers behind its router must agree on, found out before the front serves.

Owns the questions to the router. Promises that a front whose model, context or tokenizer is not that of the
workers ends with what differs, as every token of its chats would be wrong. It waits for the first worker, and
not for a router.
"""

from __future__ import annotations

import logging
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
_NUM_IDS = 64
_TEXT = 'Don\'t panic: 3.14 + 2 = 5.14!\n\t{"a": [1, null]} <think>naïve 東京</think> w3 w17 <|im_end|>'


class RouterQuestions:
    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._url = str(client.base_url).rstrip("/")

    def cards(self) -> list[Mapping[str, Any]]:
        """Returns what the router's workers serve. It waits until one of them answers.

        Raises: ConfigError if no router is there, or it wants another key.
        """
        began, said_at = time.monotonic(), -_SAY_AGAIN_S
        while True:
            try:
                response = self._client.get("/v1/models")
            except httpx.TransportError as error:
                if time.monotonic() - began > ROUTER_S:
                    raise ConfigError(
                        f"--router {self._url}: does not answer ({type(error).__name__}); start rose router"
                        f" first, or give its address"
                    ) from error
            else:
                if response.status_code == 401:
                    raise ConfigError(
                        f"--router {self._url}: wants a key; set ROSE_ROUTER_API_KEY to the router's api_key"
                    )
                if response.status_code == 200 and (cards := response.json()["data"]):
                    return list(cards)
                if time.monotonic() - said_at >= _SAY_AGAIN_S:
                    logger.info("waiting for the router's first worker router=%s", self._url)
                    said_at = time.monotonic()
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
        response = self._client.post(path, json={"model": model, **body})
        theirs = response.json().get(key) if response.status_code == 200 else None
        if theirs != own:
            answer = theirs if theirs is not None else f"{response.status_code} {response.text}"
            raise ConfigError(
                f"--model: its tokenizer is not that of the workers behind {self._url}: for {given!r:.60}"
                f" they give {what} {answer!r:.120}, this one {own!r:.120}; give the workers' own model, or"
                f" its --tokenizer"
            )


def served_card(
    cards: Sequence[Mapping[str, Any]], names: Sequence[str], model_dir: str
) -> Mapping[str, Any]:
    """Returns the card of the model that a front is for: the one it is told to serve, else the only one.

    Raises: ConfigError if the router has no such model, or several and none is named.
    """
    served = {card["id"]: card for card in cards}
    known = ", ".join(sorted(served))
    for name in names:
        if name not in served:
            raise ConfigError(f"--served-model-name {name}: the router serves {known}; give one of them")
    if names:
        return served[names[0]]
    if model_dir in served:
        return served[model_dir]
    if len(served) > 1:
        raise ConfigError(f"the router serves {known}; say which one with --served-model-name")
    return next(iter(served.values()))
