"""`rose ...` as a user types it, in the tests' process: another one would first load for a second."""

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

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
