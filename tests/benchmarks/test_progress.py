"""What a long benchmark says while it runs."""

import re
import time

import pytest
from lib.progress import shown_progress


def test_a_benchmark_says_how_long_it_has_run_until_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress("bench_x", every_s=0.01):
        deadline_s = time.monotonic() + 60.0
        while re.search(r"bench_x: \d+ s, in ", said := capsys.readouterr().err) is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    assert "its own set-up" in said  # this file is no benchmark
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""
