"""The files in examples/ are accepted by the commands that they are written for."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from rose.config import load_yaml
from rose.node.node_config import NodeConfig
from rose.ray.ray_config import RayConfig
from rose.scheduler.rollout.router_config import RouterConfig

EXAMPLES = Path(__file__).parents[1] / "examples"


MODELS: dict[str, type[BaseModel]] = {
    "node.yaml": NodeConfig,
    "router.yaml": RouterConfig,
    "ray.yaml": RayConfig,
}


@pytest.mark.parametrize("name", MODELS)
def test_an_example_is_accepted(name: str) -> None:
    load_yaml(EXAMPLES / name, MODELS[name])


SETTING = re.compile(r"^( *)# (\w+:.*)$")


@pytest.mark.parametrize("name", MODELS)
def test_every_setting_that_an_example_comments_out_is_accepted(name: str, tmp_path: Path) -> None:
    lines = (EXAMPLES / name).read_text().splitlines()
    header = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    found = [*lines[:header], *(SETTING.sub(r"\1\2", line) for line in lines[header:])]
    assert found != lines
    path = tmp_path / name
    path.write_text("\n".join(found))
    load_yaml(path, MODELS[name])


def test_no_example_is_open_to_the_network_without_a_key() -> None:
    for path in (each for each in EXAMPLES.rglob("*") if each.is_file()):
        text = path.read_text()
        assert not re.search(r"0\.0\.0\.0|protected-mode no|--insecure|insecure:", text), path
        assert ("redis:7" in text or "redis-server" in text) == ("requirepass" in text), path
