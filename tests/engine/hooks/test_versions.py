"""The processes of one engine run one version of vLLM and of ROSE, or the engine does not start."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import version_runs
from forked_engines import forks
from references import ModelDirs

import rose
from rose.engine.vllm_version import VERSIONS_KEY, check_versions, versions
from rose.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(engines_dir: Path) -> Iterator[Callable[..., Any]]:
    with forks(engines_dir / "versions") as start:
        yield start


@pytest.mark.parametrize(
    ("start", "process"),
    [(version_runs.start_with_another_rank, "rank 1"), (version_runs.start_with_another_core, "rank 0")],
)
def test_an_engine_with_a_rank_of_another_vllm_does_not_start_and_says_which(
    run: Callable[..., Any], models: ModelDirs, start: Callable[..., Any], process: str
) -> None:
    with pytest.raises(AssertionError) as failed:
        run(start, model=models.untied[0]).result()
    told = f"ConfigError: {process} runs vllm {version_runs.OTHER} and rose {rose.__version__}, and the "
    assert told in str(failed.value)


def test_a_process_of_another_rose_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    configured = {VERSIONS_KEY: versions()}
    check_versions(configured, "rank 0")
    monkeypatch.setattr(rose, "__version__", "0.0.9")
    with pytest.raises(ConfigError, match=r"rank 0 runs vllm .* and rose 0\.0\.9, and the engine was"):
        check_versions(configured, "rank 0")
    with pytest.raises(ConfigError, match="configured by a process with another version of rose"):
        check_versions({}, "rank 0")
