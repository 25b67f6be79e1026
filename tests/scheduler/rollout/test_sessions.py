"""Session keys, the affinity table, fingerprints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.scheduler.rollout.sessions import Fingerprints, SessionKeys, SessionTable, explicit_key
from rose.types import WeightVersion

SYSTEM = list(range(50))


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
    siblings = [keys.key(None, SYSTEM, 0, 1) for _ in range(4)]
    assert len(set(siblings)) == 4
    for generated, key in enumerate(siblings):
        keys.fingerprints.record([*SYSTEM, generated], key)
    assert keys.key(None, SYSTEM, 0, 1) not in siblings
    for generated, key in enumerate(siblings):
        assert keys.key(None, [*SYSTEM, generated, 77, 78], 0, 1) == key


def test_the_longest_prefix_wins_and_text_works_too() -> None:
    prints = Fingerprints(100)
    prints.record("turn one", "a")
    prints.record("turn one turn two", "b")
    assert prints.find("turn one turn two, three") == "b"
    assert prints.find("turn one, other") == "a"
    assert prints.find("turn") is None


def test_a_fanned_out_session_gets_one_key_per_request() -> None:
    keys = SessionKeys(Fingerprints(10))
    assert keys.key("s", SYSTEM, 0, 1) == "s"
    assert [keys.key("s", SYSTEM, i, 2) for i in range(2)] == ["s#0", "s#1"]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=40), st.integers(1, 8))
def test_fingerprints_stay_bounded_and_consistent(records: list[list[int]], bound: int) -> None:
    prints = Fingerprints(bound)
    for index, tokens in enumerate(records):
        prints.record(tokens, str(index))
        prints.check_integrity()
        assert len(prints) <= bound
        assert prints.find([*tokens, 9]) == str(index)
