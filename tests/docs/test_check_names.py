"""The check of names in prose."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_names", ROOT / ".ci" / "check_names.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "text",
    [
        "see rose/config.py, config.py and `rose.config`",
        "`rose.config.Settings` reads it; so does rose.transfer.model_sync",
        "benchmarks/bench_*.py, docs/images/{slabs,grants}.svg, tests/engine/",
        "vllm/v1/core/block_pool.py is vLLM's; train.py is the user's",
        "GET /rose/v1/status, rose/HEAD_RUN, import rose.phase",
    ],
)
def test_names_that_exist_pass(check: ModuleType, text: str) -> None:
    assert list(check.missing(check.Known(), text)) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("its twin is rose/memory/nowhere.py", "rose/memory/nowhere.py"),
        ("decided in nowhere.py", "nowhere.py"),
        ("owned by rose.memory.nowhere", "rose.memory.nowhere"),
        ("`rose.config.Nothing` reads it", "rose.config.Nothing"),
        ("everything in scheduler/nowhere/", "scheduler/nowhere"),
    ],
)
def test_names_that_do_not_exist_are_found(check: ModuleType, text: str, name: str) -> None:
    assert list(check.missing(check.Known(), text)) == [name]


def test_docstrings_and_comments_are_read_and_code_is_not(check: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text('"""First."""\n\nx = "a string"  # second\n')
    assert list(check.prose(source)) == [(1, "First."), (3, "# second")]
