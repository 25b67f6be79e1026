"""What a run of the tests says of a test that failed, and of its second run."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import pytest
attempts = []

@pytest.fixture
def late():
    attempts.append("late")
    if len(attempts) == 1:
        raise OSError("the engine was late")

@pytest.mark.slow
def test_that_passes_at_its_second_run(late): pass

@pytest.mark.slow
def test_that_fails_twice():
    attempts.append("fails")
    raise ValueError(f"attempt\\n{attempts.count('fails')} " + 1000 * "x")
"""


@pytest.mark.slow
def test_the_last_lines_say_why_tests_were_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(PROGRAM)
    folder = Path(__file__).parents[1]
    argv = [*("-c", str(folder / "pyproject.toml"), "--rootdir", str(tmp_path)), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", *argv, str(tmp_path)],
        **{"cwd": folder, "capture_output": True, "text": True, "check": False},
    )
    *lines, last = done.stdout.splitlines()[-4:]
    assert "1 failed, 1 passed, 2 rerun" in last, done.stdout + done.stderr
    reasons = (
        "RERUN test_it.py::test_that_passes_at_its_second_run: test_it.py:9: OSError: the engine was late",
        "RERUN test_it.py::test_that_fails_twice: test_it.py:17: ValueError: attempt 1 xxx",
        "FAILED test_it.py::test_that_fails_twice: test_it.py:17: ValueError: attempt 2 xxx",
    )
    for line, reason in zip(lines, reasons, strict=True):
        assert line.startswith(reason) and len(line) < 300, line
