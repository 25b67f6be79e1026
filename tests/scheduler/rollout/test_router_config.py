"""The router's settings: worker flags, files and keys are read, and bad ones are named."""

from pathlib import Path
from typing import Any

import pytest

from rose.config import Settings
from rose.errors import ConfigError
from rose.scheduler.rollout.http.command import main
from rose.scheduler.rollout.placing.views import WorkerKind
from rose.scheduler.rollout.router_config import build_config, parse_worker


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gpu1:8000", "url"),
        ("http://a:1,gpu", "kind"),
        ("http://a:1,gpus=0", "gpus"),
        ("http://a:99999", "url"),
        ("http://a:b", "url"),
        ("http://a:1,x=1", "x"),
    ],
)
def test_a_bad_worker_flag_is_named(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"--worker {text}: {problem}"):
        parse_worker(text)


def test_worker_flags_are_read() -> None:
    spec = parse_worker("http://gpu2:8001/,serving,gpus=4")
    assert (spec.id, spec.url, spec.kind, spec.gpus) == (
        "gpu2:8001",
        "http://gpu2:8001",
        WorkerKind.SERVING,
        4,
    )


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"jobs": {"a": {"wait": 1}}}, "jobs.a.wait: unknown key; known: key, run_id, model, weight"),
        ({"jobs": {"a": {"weight": 0}}}, "jobs.a.weight"),
        ({"jobs": {"a": {"weight": 1e307}}}, "jobs.a.weight"),
        *(({name: ""}, name) for name in ("api_key", "admin_key", "worker_api_key", "rose_key")),
        ({"prot": 1}, "prot: unknown key"),
        ({"port": 99999}, "port"),
        ({"policy": "random"}, "policy"),
        ({"fronts": {"count": 1}}, "fronts: flags lack --model DIR"),
        ({"fronts": {"flag": []}}, "fronts.flag: unknown key; known: count, flags"),
    ],
)
def test_a_bad_setting_is_named(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"f.yaml: {problem}"):
        build_config(fields, "f.yaml", Settings.from_environment({}))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"port: {", "not valid YAML: "),
        (b"\xff\xfe", "not a text file in UTF-8"),
        (b"- 1", "expected keys host, port, workers, policy"),
        (b"1: 2", "1: Keys should be strings"),
    ],
)
def test_a_settings_file_that_can_not_be_read_is_one_clear_error(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    path = tmp_path / "router.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"router\.yaml: {problem}"):
        main([str(path)])


def test_keys_come_from_the_environment_unless_given() -> None:
    settings = Settings.from_environment(
        {
            "ROSE_ROUTER_ADMIN_KEY": "a",
            "ROSE_ROUTER_API_KEY": "b",
            "ROSE_WORKER_API_KEY": "c",
            "ROSE_KEY": "d",
        }
    )
    config = build_config({"api_key": "mine"}, "x", settings)
    assert (config.admin_key, config.api_key, config.worker_api_key, config.rose_key) == (
        "a",
        "mine",
        "c",
        "d",
    )
