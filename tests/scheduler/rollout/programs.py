"""Programs of the tests that are processes of their own: what a trainer imports stays in there."""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


async def told_by(module: str, *arguments: str, env: Mapping[str, str], cwd: Path | None = None) -> Any:
    """The JSON on the last line that it prints; it has to end well."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
        cwd=cwd,
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, errors.decode()[-3000:]
    return json.loads(output.decode().splitlines()[-1])
