"""What every test shares: marks that skip where their machine is missing, and a private runtime."""

import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from rose import ports

# What this user has set for ROSE, runs and has measured is none of the business of tests.
_OWN = tempfile.TemporaryDirectory(prefix="rose-tests-")
for _name in [each for each in os.environ if each.startswith("ROSE_")]:
    del os.environ[_name]
_FOLDERS = {"RUNTIME": "run", "CACHE": "cache", "STATE": "state"}
os.environ.update({f"ROSE_{name}_DIR": f"{_OWN.name}/{folder}" for name, folder in _FOLDERS.items()})

# Hundreds of processes import the same modules, vLLM's and torch's among them. To compile these each time is
# more than half of the work of an import.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The plugin, where a test registers it in this process, then leaves the log to pytest.
logging.getLogger("rose").addHandler(logging.NullHandler())

# vLLM children inherit these: no hub, no usage report, and no more threads than a small machine has cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Importing TRL sets ERROR where nothing is set, and the engines would inherit that with the tests' order.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# Every engine would compile a few small functions of vLLM's sampler, which takes longer than a test's tokens.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# Two workers of one run never give their servers the same port: each leaves the others' parts of all ports
# out. A worker in the place of one that crashed has a higher number.
_number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
ports._given_ports.update(port for port in range(1 << 16) if port % _count != _number % _count)

# Tests judge no speed, and every run tries the same: a machine that stalls, or a rare draw, must not decide
# whether the code passes. Loaded here, before any test is collected, as @given keeps what is loaded then. New
# examples are looked for with --hypothesis-profile=default.
hypothesis_settings.register_profile(
    "any-machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("any-machine")

SHARING_ENGINES = ("tests/engine/", "tests/scheduler/rollout/", "tests/jobs/on_ray/")
"""Folders whose fixtures start engines or a Ray cluster for the whole session."""


def _missing(mark: str) -> str | None:
    """Why tests with ``mark`` can't run here, or None."""
    if mark == "gpu" and not Path("/proc/driver/nvidia/version").exists():
        return "no CUDA driver on this machine"
    if mark == "vllm" and find_spec("vllm") is None:
        return "vllm is not installed"
    if mark == "mooncake":
        return _mooncake_problem()
    return None


def _mooncake_problem() -> str | None:
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"Mooncake can't be loaded: {error}"
    return None


REASON_LENGTH = 200

REAL = ("vllm", "mooncake", "slow", "clients")
"""Marks of tests that start processes, whose order and speed the machine decides."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips, with the reason, what this machine can't run. What starts processes is run again if it fails:
    the summary then names it and its failure, which is a fault to be mended."""
    reasons: dict[str, str | None] = {}
    for item in items:
        if any(item.get_closest_marker(mark) is not None for mark in REAL):
            item.add_marker(pytest.mark.flaky(reruns=1))
        for mark in ("gpu", "vllm", "mooncake"):
            if item.get_closest_marker(mark) is None:
                continue
            if mark not in reasons:
                reasons[mark] = _missing(mark)
            if reasons[mark] is not None:
                item.add_marker(pytest.mark.skip(reason=str(reasons[mark])))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Starts again, for a second run, what the tests of its file share: the first one may have left it in any
    state. pytest-rerunfailures keeps it, and sets the count."""
    if getattr(item, "execution_count", 1) == 1 or not isinstance(item, pytest.Function):
        return
    request: Any = item._request
    for fixtures in item._fixtureinfo.name2fixturedefs.values():
        for fixture in fixtures:
            if fixture.scope == "module":
                fixture.finish(request)  # after all that use it


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Shows why tests were run again. A line for each such failure, and for each that was the last one of its
    test, comes behind pytest's own list: a CI may show no more than the end of its log."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"RERUN {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
    yield
    for outcome in ("rerun", "error", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            terminalreporter.write_line(f"{outcome.upper()} {report.nodeid}: {_reason(report)}")


def _reason(report: pytest.TestReport) -> str:
    """Where a test failed, and why, as far as it fits into a line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    where = f"{Path(crash.path).name}:{crash.lineno}: " if crash is not None else ""
    why = crash.message if crash is not None else report.longreprtext
    return where + " ".join(why.split())[:REASON_LENGTH]


def pytest_collection_finish() -> None:
    """Garbage collectors do not look at the tests themselves, nor at the modules that they import."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under ``-n 2``, one process runs a whole file, and all files of a folder that shares engines."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return next((folder for folder in SHARING_ENGINES if file.startswith(folder)), file)

    config.option.loadscopereorder = False  # else files of few tests, which take longest, come last
    return Scheduling(config, log)


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private runtime directory, also for the processes that the test starts. Short, as a socket's path may
    have 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="rose-test-"))
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(path))
    yield path
    shutil.rmtree(path, ignore_errors=True)  # whoever ends late may be removing its own files
