"""The files that the pages show are accepted by the models that read them."""

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from rose.node.node_config import NodeConfig
from rose.scheduler.rollout.router_config import RouterConfig
from rose.scheduler.runtime.job.spec import RunSpec, ServeSpec
from rose.scheduler.sim.gpu_spec import GpuSpec

ROOT = Path(__file__).resolve().parents[2]
MODELS: dict[str, type[BaseModel]] = {
    "engines": NodeConfig,
    "pools": ServeSpec,
    "teams": ServeSpec,
    "command": RunSpec,
    "jobs": RouterConfig,
    "pipelines": GpuSpec,
}
"""The kinds of files, each with a key that only such a file has."""
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""A file of ROSE's; another program's is marked as yml."""


def shown_files() -> list[tuple[str, dict[str, object]]]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [(page.name, yaml.safe_load(block)) for page in pages for block in BLOCK.findall(page.read_text())]


@pytest.mark.parametrize(("page", "content"), shown_files(), ids=[page for page, _ in shown_files()])
def test_a_file_on_a_page_is_accepted(page: str, content: dict[str, object]) -> None:
    model = next((model for key, model in MODELS.items() if key in content), None)
    if model is None:
        assert set(content) <= set(RunSpec.model_fields), f"{page}: a part of no file"
    else:
        model.model_validate(content)


def test_every_kind_of_file_is_shown() -> None:
    keys = {key for _, content in shown_files() for key in content}
    assert set(MODELS) <= keys
