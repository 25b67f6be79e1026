"""`rose ...` as a user types it, in the tests' process: another one would first load for a second.

And what is left of commands that ran in processes of their own.
"""

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

import psutil

from rose import cli


def rose(
    *arguments: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Runs the command to its end. ``environment`` is added to this process's meanwhile."""
    output, errors = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, environment if environment is not None else {}),
        contextlib.chdir(cwd if cwd is not None else Path.cwd()),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            status = cli.main(arguments)
        except SystemExit as ended:  # argparse refuses an argument, or has shown the help
            assert isinstance(ended.code, int)
            status = ended.code
    return CompletedProcess(arguments, status, output.getvalue(), errors.getvalue())


def in_sessions(sessions: set[int]) -> list[int]:
    """Returns the processes of these sessions that have not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # it ended while we looked
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
