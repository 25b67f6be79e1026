"""`rose doctor` on the machine that runs the tests."""

import json
import subprocess
import sys

from rose.doctor import Finding, examine


def findings() -> dict[str, Finding]:
    return {finding.name: finding for finding in examine()}


def test_what_the_tests_run_on_is_found() -> None:
    found = findings()
    assert found["Python"].is_ok and found["platform"].is_ok and found["C++ extensions"].is_ok


def test_every_finding_says_what_it_enables_and_how_to_get_it() -> None:
    assert all(finding.enables and finding.fix and finding.detail for finding in examine())


def test_json_and_exit_status_agree() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "rose.cli", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    report = json.loads(result.stdout)
    assert result.returncode == (0 if report["can_run_main_job"] else 1)
    required = [row for row in report["findings"] if row["is_required"]]
    assert report["can_run_main_job"] == all(row["is_ok"] for row in required)


def test_the_table_shows_extras_with_their_brackets() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "rose.cli", "doctor"], capture_output=True, text=True, check=False
    )
    missing = [finding for finding in examine() if not finding.is_ok]
    assert all(f"{finding.name}: {finding.fix}" in result.stdout for finding in missing)
