"""Bodies of requests and answers, in which long lists of token ids stay JSON text.

Owns: TokenIds, the JSON text of a list of ids; reading and writing bodies that hold one.
Promises: a body of 32k ids costs a search and a copy of its bytes instead of 32k integers. Everything else is
parsed like any JSON.
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
"""Replaces the ids while the rest is parsed. It is random, so that no client can send it."""
_QUOTED_MARK = b'"%b"' % _MARK.encode()


class BadRequest(ValueError):
    """The client's request can't be understood; answered 400. `param`: the parameter that vLLM would name."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TokenIds:
    """A list of token ids as compact JSON."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        """`data`: JSON without spaces, such as `[1,2,3]`."""
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
        """Estimates the number of ids: exactly for short lists, else within some percent and much faster."""
        if len(self.data) <= _SAMPLE_BYTES:
            return self.count()
        middle = len(self.data) // 2 - _SAMPLE_BYTES // 2
        found = self.data.count(b",", middle, middle + _SAMPLE_BYTES)
        return len(self.data) * found // _SAMPLE_BYTES

    def plus(self, ids: Sequence[int]) -> "TokenIds":
        """Returns these ids followed by `ids`."""
        more = msgspec.json.encode(ids)
        if self.is_empty:
            return TokenIds(more)
        return TokenIds(b"%b,%b" % (self.data[:-1], more[1:])) if ids else self

    def count(self) -> int:
        """Counts the ids exactly, 32k of them in about 10 us."""
        if len(self.data) <= _SAMPLE_BYTES:
            return 0 if self.is_empty else self.data.count(b",") + 1
        return int(np.count_nonzero(np.frombuffer(self.data, np.uint8) == ord(","))) + 1

    def listed(self) -> list[int]:
        return msgspec.json.decode(self.data, type=list[int])

    def prefix(self) -> bytes:
        """Returns the bytes that begin the text of every list that begins with these ids."""
        return self.data[:-1] if self.is_empty else self.data[:-1] + b","


def _encode_ids(value: object) -> object:
    if isinstance(value, TokenIds):
        return msgspec.Raw(value.data)
    raise TypeError(f"no JSON for {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_encode_ids)
encode = _encoder.encode
"""Returns the JSON of a body; TokenIds are written as they are."""


def encode_apart(body: Json) -> list[bytes]:
    """Returns the JSON of a body in pieces, so that the prompt's ids are not copied."""
    prompt = body.get("prompt")
    if not isinstance(prompt, TokenIds):
        return [encode(body)]
    before, _, after = encode({**body, "prompt": _MARK}).partition(_QUOTED_MARK)
    return [before, prompt.data, after]


def cut_ids(data: bytes, key: bytes, *, is_trusted: bool = False) -> tuple[bytes, TokenIds] | None:
    """Cuts the first plain list of ids behind `key` (with its quotes) out of a JSON text and leaves a mark.

    `is_trusted`: the list is known to hold only ids, without spaces.

    Returns None if there is no such list, or if it holds other JSON values. Text between the brackets that is
    no JSON at all may pass, because checking each comma takes ten times as long; the worker refuses it. The
    key can't be mistaken for text: inside a JSON string its quotes would be escaped.
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
    """Whether there are only digits and commas between the brackets."""
    if len(data) == len(b"[]"):
        return True
    characters = np.frombuffer(data, np.uint8, len(data) - 2, 1)
    # "-", "." and "/" also lie between "," and "9"; JSON has no "/" outside of strings.
    is_within = characters.min() >= ord(",") and characters.max() <= ord("9")
    return bool(is_within) and data.find(b"-") < 0 and data.find(b".") < 0


def parse(data: bytes, key: str = "prompt") -> Json:
    """Parses a client's JSON object; a plain list of ids under `key` becomes TokenIds.

    Raises:
        BadRequest: the data is not JSON, or not an object.
    """
    if (cut := cut_ids(data, f'"{key}"'.encode())) is not None:
        rest, ids = cut
        body = _object(rest)
        if body.get(key) == _MARK:
            return {**body, key: ids}
    return _object(data)  # there is no such list, or an inner object holds it


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
