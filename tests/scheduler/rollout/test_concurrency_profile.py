"""The router's cap from what `rose profile --concurrency` measured."""

from pathlib import Path

import pytest

from rose.config import Settings
from rose.errors import ConfigError
from rose.messages import ConcurrencyPoint, ConcurrencyProfile
from rose.scheduler.rollout.http.command import main
from rose.scheduler.rollout.router_config import RouterConfig, build_config


def build(**fields: object) -> RouterConfig:
    return build_config(fields, "router.yaml", Settings.from_environment({}))


def test_the_cap_comes_from_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile = ConcurrencyProfile(
        model="m",
        context_tokens=8,
        new_tokens=4,
        gpus=2,
        points=(ConcurrencyPoint(concurrency=22, tokens_per_s=1.0),),
        cap=22,
        turns_per_gpu=11,
    )
    path.write_text(profile.model_dump_json())
    assert build(concurrency_profile=str(path)).turns_per_gpu == 11
    with pytest.raises(ConfigError, match="not both"):
        build(concurrency_profile=str(path), turns_per_gpu=16)


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "can't be read"), ("{}", "not made by rose profile")]
)
def test_a_file_that_is_not_a_profile_is_one_clear_error(
    tmp_path: Path, content: str | None, problem: str
) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"router.yaml: concurrency_profile {path}: {problem}"):
        build(concurrency_profile=path)
    with pytest.raises(ConfigError, match=problem):
        main(["--concurrency-profile", str(path)])
