"""The FrozenLake conversation: rules, texts, reward."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.demo import frozenlake
from rose.demo.frozenlake import MAX_TURNS, MOVES, STARTS, FrozenLakeGame, parse_move

BEST_WALKS = {
    "r0c0": "down down right right down right",
    "r0c2": "down down down right",
    "r0c3": "left down down down right",
    "r2c0": "right right down right",
}


@pytest.mark.parametrize(
    ("reply", "move"),
    [
        ("left", "left"),
        ("up goal left", "up"),
        ("  down  down ", "down"),
        ("walk left", None),
        ("leftover", None),
        ("", None),
        ("   ", None),
    ],
)
def test_a_reply_is_read_by_its_first_word(reply: str, move: str | None) -> None:
    assert parse_move(reply) == move


@pytest.mark.parametrize("start", STARTS)
def test_best_walk_reaches_the_goal_for_reward_one(start: str) -> None:
    game = FrozenLakeGame(start)
    for move in BEST_WALKS[start].split():
        assert not game.is_done
        game.play(move)
    assert game.is_done and game.is_success
    assert game.reward == 1.0


def test_a_hole_ends_the_game_with_the_progress_made_before() -> None:
    game = FrozenLakeGame(STARTS[0])
    assert game.play("down") != ""
    assert game.play("right") == ""
    assert game.is_done and not game.is_success
    assert game.reward == pytest.approx(frozenlake.PROGRESS_WEIGHT / 6)


def test_replies_without_a_move_use_up_the_turns_and_earn_nothing() -> None:
    game = FrozenLakeGame(STARTS[0])
    opening = game.opening()
    for turn in range(MAX_TURNS):
        feedback = game.play("goal")
        assert (feedback == "") == (turn == MAX_TURNS - 1)
    assert game.is_done and game.reward == 0.0
    assert opening == FrozenLakeGame(STARTS[0]).opening()


def test_a_finished_game_takes_no_more_turns() -> None:
    game = FrozenLakeGame(STARTS[0])
    game.play("down")
    game.play("right")
    with pytest.raises(ValueError, match="over after 2 turns"):
        game.play("up")


replies = st.lists(
    st.sampled_from([*MOVES, "goal", "", "left down", "ice up"]), min_size=1, max_size=MAX_TURNS
)


def _play(start: str, said: list[str]) -> tuple[list[str], float, bool]:
    game = FrozenLakeGame(start)
    texts = [game.opening()]
    for reply in itertools.takewhile(lambda _: not game.is_done, said):
        texts.append(game.play(reply))
    return texts, game.reward, game.is_success


@given(start=st.sampled_from(STARTS), said=replies)
def test_the_same_replies_give_the_same_game(start: str, said: list[str]) -> None:
    assert _play(start, said) == _play(start, said)


@given(start=st.sampled_from(STARTS), said=replies)
def test_reward_lies_in_zero_to_one_and_is_one_only_at_the_goal(start: str, said: list[str]) -> None:
    texts, reward, is_success = _play(start, said)
    assert 0.0 <= reward <= 1.0
    assert (reward == 1.0) == is_success
    assert all(word in frozenlake.WORDS for text in texts for word in text.split())
