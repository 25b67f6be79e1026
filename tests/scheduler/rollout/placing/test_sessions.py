"""Session keys, the affinity table, fingerprints."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.scheduler.rollout.formats.bodies import TokenIds
from rose.scheduler.rollout.placing.sessions import (
    Fingerprints,
    Held,
    SessionKeys,
    SessionTable,
    explicit_key,
    prefix_of,
)
from rose.types import WeightVersion

SYSTEM = list(range(50))


def ids(*tokens: int) -> TokenIds:
    return TokenIds.of(tokens)


@pytest.mark.parametrize(
    ("headers", "body", "key"),
    [
        ({"X-Session-ID": "a", "X-SMG-Routing-Key": "b"}, {"session_id": "c"}, "a"),
        ({"X-SMG-Routing-Key": "b"}, {"session_id": "c"}, "b"),
        ({}, {"session_id": "c"}, "c"),
        ({"X-Session-ID": ""}, {"session_id": 7}, None),
    ],
)
def test_explicit_key_prefers_headers(
    headers: dict[str, str], body: dict[str, object], key: str | None
) -> None:
    assert explicit_key(headers, body) == key


def test_the_least_recently_used_session_leaves_first() -> None:
    table = SessionTable(2)
    for key in ("a", "b", "a", "c"):
        table.record(key, "w", None)
    assert (table.get("a") is not None, table.get("b"), len(table)) == (True, None, 2)


def test_a_session_keeps_the_version_of_its_first_turn_and_the_worker_of_its_last() -> None:
    table = SessionTable(2)
    for number, worker in ((1, "a"), (2, "b")):
        table.record("s", worker, WeightVersion(run_id="r", number=number))
    session = table.get("s")
    assert session is not None
    assert (session.worker, session.first_version) == ("b", WeightVersion(run_id="r", number=1))


def test_the_next_turn_finds_its_trajectory_among_grpo_siblings() -> None:
    keys = SessionKeys(Fingerprints(100))
    siblings = [keys.key(None, ids(*SYSTEM), 0, 1) for _ in range(4)]
    assert len(set(siblings)) == 4
    for generated, key in enumerate(siblings):
        keys.fingerprints.record(ids(*SYSTEM, generated).prefix(), key)
    assert keys.key(None, ids(*SYSTEM), 0, 1) not in siblings
    for generated, key in enumerate(siblings):
        assert keys.key(None, ids(*SYSTEM, generated, 77, 78), 0, 1) == key


def test_the_longest_prefix_wins_and_text_works_too() -> None:
    prints = Fingerprints(100)
    prints.record(prefix_of("turn one"), "a")
    prints.record(prefix_of("turn one turn two"), "b")
    assert prints.find(prefix_of("turn one turn two, three")) == "b"
    assert prints.find(prefix_of("turn one, other")) == "a"
    assert prints.find(prefix_of("turn")) is None


def test_equal_prompts_and_names_in_different_scopes_are_different_trajectories() -> None:
    keys = SessionKeys(Fingerprints(10))
    first = keys.key(None, ids(*SYSTEM), 0, 1, "a")
    keys.fingerprints.record(ids(*SYSTEM, 1).prefix(), first, "a")
    found = [keys.key(None, ids(*SYSTEM, 1, 2), 0, 1, model) for model in ("a", "b", None)]
    assert found[0] == first and first not in found[1:]
    keys.fingerprints.check_integrity()
    table = SessionTable(10)
    for model, worker in (("a", "w1"), ("b", "w2")):
        table.record("s", worker, WeightVersion(run_id=model, number=1), scope=model)
    sessions = [table.get("s", model) for model in ("a", "b", "c")]
    assert [session.worker if session is not None else None for session in sessions] == ["w1", "w2", None]


def test_a_fanned_out_session_gets_one_key_per_request() -> None:
    keys = SessionKeys(Fingerprints(10))
    assert keys.key("s", ids(*SYSTEM), 0, 1) == "s"
    assert [keys.key("s", ids(*SYSTEM), i, 2) for i in range(2)] == ["s#0", "s#1"]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=40), st.integers(1, 8))
def test_fingerprints_stay_bounded_and_consistent(records: list[list[int]], bound: int) -> None:
    prints = Fingerprints(bound)
    for index, tokens in enumerate(records):
        prints.record(ids(*tokens).prefix(), str(index))
        prints.check_integrity()
        assert len(prints) <= bound
        assert prints.find(ids(*tokens, 9).prefix()) == str(index)


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=300, max_size=1500), min_size=1, max_size=6),
    st.integers(0, 1500),
)
@pytest.mark.slow
def test_the_longest_filed_prefix_is_found_at_any_length(records: list[list[int]], cut: int) -> None:
    prints = Fingerprints(100)
    for index, tokens in enumerate(records):
        prints.record(ids(*tokens[: max(1, len(tokens) - cut)]).prefix(), str(index))
    prints.check_integrity()
    for tokens in records:
        begins = [r[: max(1, len(r) - cut)] for r in records]
        longest = max((b for b in begins if tokens[: len(b)] == b), key=len)
        found = prints.find(ids(*tokens, 3).prefix())
        assert found is not None and begins[int(found)] == longest


def test_a_token_is_not_taken_for_the_beginning_of_a_longer_one() -> None:
    prints = Fingerprints(10)
    prints.record(ids(1, 2).prefix(), "a")
    assert prints.find(ids(1, 23).prefix()) is None
    assert prints.find(ids(1, 2, 3).prefix()) == "a"


def test_cached_tokens_end_with_the_lease_and_with_the_weights() -> None:
    version, newer = (WeightVersion(run_id="r", number=n) for n in (1, 2))
    table = SessionTable(2)
    table.record("s", "w", version, Held(num_tokens=70, version=version, until=10.0))
    session = table.get("s")
    assert session is not None
    assert [session.cached_tokens("w", version, now) for now in (9.9, 10.0)] == [70, 0]
    assert session.cached_tokens("w", newer, 1.0) == 0
    assert session.cached_tokens("other", version, 1.0) == 0
