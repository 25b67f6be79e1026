"""A router for these tests as well; and ROLL, which opens a log file when it is imported, is told where."""

import os
import tempfile

from tests.scheduler.rollout.conftest import start_router

__all__ = ["start_router"]

_LOGS = tempfile.TemporaryDirectory(prefix="rose-test-roll-")
os.environ.setdefault("ROLL_LOG_DIR", _LOGS.name)
