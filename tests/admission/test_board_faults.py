"""A process of a board is killed or stopped at each of its accesses to the page, and the others go on."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("board_faults.py")


@pytest.mark.parametrize("fatal", ["KILL", "STOP"])
@pytest.mark.parametrize("part", ["guest", "serving"])
@pytest.mark.slow
def test_the_others_go_on_when_a_party_fails_at_any_access(page: Path, part: str, fatal: str) -> None:
    command = [sys.executable, str(PROGRAM), str(page), part, fatal]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
