"""What a run of the tests says of a test that failed, and of its second run."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import pytest
attempts = []

@pytest.fixture(scope="module")
def shared():
    with open(__file__ + ".log", "a") as log:
        log.write("begun ")
    yield []
    with open(__file__ + ".log", "a") as log:
        log.write("ended ")

@pytest.fixture
def late(shared):
    attempts.append("late")
    if len(attempts) == 1:
        raise OSError("the engine was late")

@pytest.mark.slow
def test_that_passes_at_its_second_run(late): pass

@pytest.mark.slow
def test_that_spoils_what_is_shared(shared):
    assert shared == []
    shared.append("spoilt")
    attempts.append("spoils")
    assert attempts.count("spoils") == 2, "spoilt"

def test_that_comes_later(shared):
    assert shared == ["spoilt"]

@pytest.mark.slow
def test_that_fails_twice():
    attempts.append("fails")
    raise ValueError(f"attempt\\n{attempts.count('fails')} " + 1000 * "x")
"""


@pytest.mark.slow
def test_a_second_run_starts_its_files_fixtures_again_and_the_last_lines_say_why(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(PROGRAM)
    folder = Path(__file__).parents[1]
    argv = [*("-c", str(folder / "pyproject.toml"), "--rootdir", str(tmp_path)), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", *argv, str(tmp_path)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    *lines, last = done.stdout.splitlines()[-5:]
    assert "1 failed, 3 passed, 3 rerun" in last, done.stdout + done.stderr
    assert (tmp_path / "test_it.py.log").read_text() == 3 * "begun ended "
    reasons = (
        "RERUN test_it.py::test_that_passes_at_its_second_run: test_it.py:17: OSError: the engine was late",
        "RERUN test_it.py::test_that_spoils_what_is_shared: test_it.py:27: AssertionError: spoilt",
        "RERUN test_it.py::test_that_fails_twice: test_it.py:35: ValueError: attempt 1 xxx",
        "FAILED test_it.py::test_that_fails_twice: test_it.py:35: ValueError: attempt 2 xxx",
    )
    for line, reason in zip(lines, reasons, strict=True):
        assert line.startswith(reason) and len(line) < 300, line
