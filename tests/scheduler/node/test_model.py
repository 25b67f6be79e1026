"""Costs of passes, and how well lengths fit together."""

import math

import pytest

from rose.errors import ConfigError
from rose.scheduler.node.model import TABLE_II, Lengths, PassCost, Task, paper_profile


@pytest.mark.parametrize("model", list(TABLE_II))
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_sequence_of_mean_length_takes_what_table_ii_says(model: str, num_stages: int) -> None:
    profile = paper_profile(model, 250, num_stages)
    forward_s, backward_s, *_ = TABLE_II[model]
    assert profile.forward_s(250) == pytest.approx(forward_s)
    assert profile.backward_s(250) == pytest.approx(backward_s)
    assert sum(profile.forwards(250)) == pytest.approx(forward_s)
    assert profile.scaled(2).forward_s(250) == pytest.approx(2 * forward_s)


def test_a_model_without_a_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no profile of gpt-9: give --profile FILE, or one of llama-8b"):
        paper_profile("gpt-9", 250)


def test_more_stages_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 4 stages and a node has 2 GPUs"):
        paper_profile("llama-8b", 250, 4).on(2)
    assert len(paper_profile("llama-8b", 250, 2).on(2).stages) == 2


def test_lengths_without_variance_have_a_finite_consistency() -> None:
    same = Lengths([100, 100, 100])
    assert same.consistency(100) == 1.0
    assert same.consistency(101) == pytest.approx(math.exp(-0.5))
    assert same.consistency(500) == 0.0


def test_consistency_is_a_gaussian_of_the_distance_from_the_mean() -> None:
    lengths = Lengths([100, 300])
    assert (lengths.mean, lengths.consistency(200)) == (200, 1.0)
    assert lengths.consistency(300) == pytest.approx(math.exp(-0.5))
    assert Lengths([100]).consistency(100) == 0.0


@pytest.mark.parametrize("wrong", [(0, 0, 0), (-1, 1, 1), (math.inf, 0, 0), (math.nan, 1, 1)])
def test_a_cost_is_finite_and_above_zero(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="coefficients of at least 0"):
        PassCost(constant_s=wrong[0], per_token_s=wrong[1], per_pair_s=wrong[2])


def test_a_task_has_tokens() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        Task(number=0, arrival_s=0, prompt_tokens=0)
