"""Bodies with token ids are read without making integers of the ids, and are never misread."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.scheduler.rollout.formats.bodies import BadRequest, TokenIds, cut_ids, encode, encode_apart, parse

IDS = st.lists(st.integers(0, 200_000), max_size=50)
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=8) | IDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["prompt", "a"]), inner),
    max_leaves=6,
)
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :"), (",\n ", ":")])


def plain(body: dict[str, Any]) -> dict[str, Any]:
    return {key: v.listed() if isinstance(v, TokenIds) else v for key, v in body.items()}


@given(st.dictionaries(st.sampled_from(["prompt", "model", "x", '"prompt":']), VALUES), SEPARATORS)
@pytest.mark.slow
def test_a_body_is_read_as_any_json_reader_would(body: dict[str, Any], separators: tuple[str, str]) -> None:
    text = json.dumps(body, separators=separators).encode()
    assert plain(parse(text)) == body
    assert json.loads(encode(parse(text))) == body
    assert b"".join(encode_apart(parse(text))) == encode(parse(text))


@given(IDS)
def test_plain_ids_are_kept_as_text(ids: list[int]) -> None:
    for separators in ((",", ":"), (", ", ": ")):
        found = parse(json.dumps({"n": 2, "prompt": ids}, separators=separators).encode())["prompt"]
        assert isinstance(found, TokenIds)
        assert (found, found.listed(), found.count()) == (TokenIds.of(ids), ids, len(ids))


@pytest.mark.parametrize("inner", ["[1,2", "[1 2]", "[1,2]]", "1,2]", "[1, 2 ,]", "[\n;]"])
def test_what_is_not_json_is_refused(inner: str) -> None:
    with pytest.raises(BadRequest, match="not JSON"):
        parse(f'{{"prompt": {inner}}}'.encode())


@pytest.mark.parametrize("text", ["[]", "1", "null", '"x"'])
def test_a_body_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="not a JSON object"):
        parse(text.encode())


@pytest.mark.parametrize("text", [b"", b"{", b'{"prompt":[1],}', b"\xff", b"[" * 100_000])
def test_broken_bytes_are_refused(text: bytes) -> None:
    with pytest.raises(BadRequest):
        parse(text)


def test_the_last_of_two_equal_keys_wins_as_in_any_json_reader() -> None:
    assert plain(parse(b'{"prompt":[1,2],"prompt":"x"}')) == {"prompt": "x"}
    assert plain(parse(b'{"a":{"prompt":[1]},"prompt":[2,3]}')) == {"a": {"prompt": [1]}, "prompt": [2, 3]}


@pytest.mark.parametrize(
    "values",
    [
        "[1.0]",
        "[-1]",
        "[1e3]",
        "[1E3]",
        "[true]",
        "[false]",
        "[null]",
        "[NaN]",
        '["a"]',
        "[[1]]",
        "[{}]",
        '[1,"]"]',
    ],
)
def test_lists_of_other_values_than_ids_stay_in_the_body(values: str) -> None:
    assert cut_ids(f'{{"prompt":{values}}}'.encode(), b'"prompt"') is None


@given(IDS, IDS)
def test_lists_are_joined_and_prefixes_compared_as_text(first: list[int], second: list[int]) -> None:
    joined = TokenIds.of(first).plus(second)
    assert joined == TokenIds.of([*first, *second])
    begins = TokenIds.of([*first, *second]).prefix().startswith(TokenIds.of(second).prefix())
    assert begins == ([*first, *second][: len(second)] == second)


def test_long_lists_are_counted_exactly_and_estimated_within_some_percent() -> None:
    ids = TokenIds.of([i * 7 % 151_000 for i in range(32_768)])
    assert ids.count() == 32_768
    assert ids.about() == pytest.approx(32_768, rel=0.15)
