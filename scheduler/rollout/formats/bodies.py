"""Request and answer bodies with long lists of token ids, which are never turned into Python objects.

Owns: TokenIds, the JSON text of a list of ids; reading and writing bodies that hold one.
Promises: a body of 32k ids costs a search and a copy of its bytes, not 32k integers; what is not a plain list
of ids is parsed like any JSON.
Never does: know which fields a request has.
"""

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

Json = dict[str, Any]

_WHITESPACE = b" \t\r\n"
_SAMPLE_BYTES = 2048
_MARK = f"ids-{os.urandom(8).hex()}"
"""Stands for the ids while the rest is parsed; random, so that no client can write it."""
_QUOTED_MARK = b'"%b"' % _MARK.encode()


class BadRequest(ValueError):
    """The client's body can't be understood; answered 400."""


class TokenIds:
    """A list of token ids as compact JSON."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        """`data`: as `[1,2,3]`, without spaces."""
        self.data = data

    @classmethod
    def of(cls, ids: Sequence[int]) -> "TokenIds":
        return cls(msgspec.json.encode(ids))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenIds) and self.data == other.data

    def __hash__(self) -> int:
        return hash(self.data)

    def __repr__(self) -> str:
        return f"TokenIds({self.data[:40]!r})"

    @property
    def is_empty(self) -> bool:
        return len(self.data) == 2

    def about(self) -> int:
        """How many there are: exact for short lists, else within some percent. Counting costs too much."""
        if len(self.data) <= _SAMPLE_BYTES:
            return self.count()
        middle = len(self.data) // 2 - _SAMPLE_BYTES // 2
        found = self.data.count(b",", middle, middle + _SAMPLE_BYTES)
        return len(self.data) * found // _SAMPLE_BYTES

    def plus(self, ids: Sequence[int]) -> "TokenIds":
        """These and then those."""
        more = msgspec.json.encode(ids)
        if self.is_empty:
            return TokenIds(more)
        return TokenIds(b"%b,%b" % (self.data[:-1], more[1:])) if ids else self

    def count(self) -> int:
        """How many there are, exactly."""
        return 0 if self.is_empty else self.data.count(b",") + 1

    def listed(self) -> list[int]:
        return msgspec.json.decode(self.data, type=list[int])

    def prefix(self) -> bytes:
        """Bytes with which the text of every list begins that begins with these ids."""
        return self.data[:-1] if self.is_empty else self.data[:-1] + b","


def _encode_ids(value: object) -> object:
    if isinstance(value, TokenIds):
        return msgspec.Raw(value.data)
    raise TypeError(f"no JSON for {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_encode_ids)
encode = _encoder.encode
"""JSON of a body; TokenIds are written as they are."""


def encode_apart(body: Json) -> list[bytes]:
    """The same in pieces, so that the ids of the prompt aren't copied."""
    prompt = body.get("prompt")
    if not isinstance(prompt, TokenIds):
        return [encode(body)]
    before, _, after = encode({**body, "prompt": _MARK}).partition(_QUOTED_MARK)
    return [before, prompt.data, after]


def cut_ids(data: bytes, key: bytes, *, is_trusted: bool = False) -> tuple[bytes, TokenIds] | None:
    """Cut the first plain list of ids behind `key` (with its quotes) out of a JSON text, a mark in its place.

    `is_trusted`: the list is known to hold ids alone, without spaces.

    None where there is no such list, or it holds any other JSON values. What isn't JSON at all between the
    brackets may pass: its reader, the worker, refuses it. (Checking each comma takes ten times as long.) A
    key can't be mistaken for text: inside of a JSON string its quotes would be escaped.
    """
    at = data.find(key)
    if at < 0:
        return None
    start = data.find(b"[", at)
    if start < 0 or data[at + len(key) : start].strip(_WHITESPACE) != b":":
        return None
    end = data.find(b"]", start)
    if end < 0:
        return None
    ids = data[start : end + 1]
    if not is_trusted and not _are_ids(ids):
        ids = ids.replace(b", ", b",")
        if not _are_ids(ids):
            return None
    return b"%b%b%b" % (data[:start], _QUOTED_MARK, data[end + 1 :]), TokenIds(ids)


def _are_ids(data: bytes) -> bool:
    """Whether digits and commas alone are between the brackets."""
    if len(data) == len(b"[]"):
        return True
    characters = np.frombuffer(data, np.uint8, len(data) - 2, 1)
    # Between "," and "9" are also "-", "." and "/", of which no JSON has the last outside of strings.
    is_within = characters.min() >= ord(",") and characters.max() <= ord("9")
    return bool(is_within) and data.find(b"-") < 0 and data.find(b".") < 0


def parse(data: bytes, key: str = "prompt") -> Json:
    """A client's JSON object; a plain list of ids under `key` comes as TokenIds, all else as usual.

    Raises:
        BadRequest: not JSON, or not an object.
    """
    if (cut := cut_ids(data, f'"{key}"'.encode())) is not None:
        rest, ids = cut
        body = _object(rest)
        if body.get(key) == _MARK:
            return {**body, key: ids}
    return _object(data)  # the list was in some inner object, or there is none


def _object(data: bytes) -> Json:
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    return body
