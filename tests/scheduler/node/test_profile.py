"""Fits of measured passes, and the file of a profile."""

import json
from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.scheduler.node.model import PassCost, paper_profile
from rose.scheduler.node.profile import fit_cost, read_profile, write_profile

LENGTHS = [32, 64, 128, 512, 1024]


@pytest.mark.parametrize("coefficients", [(1e-3, 2e-5, 3e-9), (0.0, 2e-5, 3e-9), (1e-3, 2e-5, 0.0)])
def test_a_fit_finds_the_coefficients(coefficients: tuple[float, float, float]) -> None:
    constant_s, per_token_s, per_pair_s = coefficients
    cost = PassCost(constant_s=constant_s, per_token_s=per_token_s, per_pair_s=per_pair_s)
    found = fit_cost(LENGTHS, [cost.seconds(length, length**2) for length in LENGTHS])
    assert (found.constant_s, found.per_token_s, found.per_pair_s) == pytest.approx(coefficients, abs=1e-9)


def test_a_fit_has_no_negative_coefficient() -> None:
    found = fit_cost(LENGTHS, [length**0.5 for length in LENGTHS])  # concave: the best parabola bends down
    assert min(found.constant_s, found.per_token_s, found.per_pair_s) >= 0


def test_two_lengths_are_too_few() -> None:
    with pytest.raises(ValueError, match=r"at least 3 different lengths, got \[8, 16\]"):
        fit_cost([8, 16, 16], [1.0, 2.0, 2.0])


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path, profile = tmp_path / "stages.json", paper_profile("llama-8b", 250)
    write_profile(profile, path)
    assert read_profile(path) == profile
    assert read_profile(path, hardware=profile.hardware) == profile


def test_a_profile_of_other_hardware_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "stages.json"
    write_profile(paper_profile("llama-8b", 250), path)
    with pytest.raises(ConfigError, match="is of A100, from LeMix Table II and these nodes are H200"):
        read_profile(path, hardware="H200")


@pytest.mark.parametrize("content", ["", "{}", '{"model": "m", "hardware": "h", "stages": []}'])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "stages.json"
    path.write_text(content)
    with pytest.raises(
        ConfigError, match=r"stages.json: not a profile of stages .*rose sched profile-stages"
    ):
        read_profile(path)


@pytest.mark.parametrize("name", ["kv_token_bytes", "activation_token_bytes", "free_bytes"])
def test_a_profile_with_negative_bytes_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "stages.json"
    write_profile(paper_profile("llama-8b", 250), path)
    content = json.loads(path.read_text())
    content["stages"][1][name] = -1
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"stages\.1: .*at least 0 bytes of each kind"):
        read_profile(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.json: can't be read \(No such file"):
        read_profile(tmp_path / "none.json")
