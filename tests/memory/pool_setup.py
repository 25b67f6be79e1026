"""What the pool tests share: the size of their pool, and engines in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import rose

POOL = "p"
NUM_SLABS = 16
SLAB_BYTES = 64 * 1024
HEADROOM_SLABS = 4


class EngineProcess:
    """An engine in its own process (engine_process.py), driven by one line per command."""

    def __init__(self, runtime_dir: Path, arguments: list[str]) -> None:
        script = Path(__file__).with_name("engine_process.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(runtime_dir), POOL, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A script's sys.path starts at its own folder: rose may not be installed.
            env={**os.environ, "PYTHONPATH": str(Path(rose.__file__).parents[1])},
        )
        self.slot = self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"engine process ended with {self.process.wait()}"
        return json.loads(line)

    def ask(self, *command: object) -> Any:
        """The answer to one command: see engine_process.py."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
