"""An engine's copies of adapters go with it, however it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from rose.engine.adapter_copies import AdapterCopies, remove_left
from rose.errors import ConfigError

ENGINE = """
import sys
from pathlib import Path
from rose.engine.adapter_copies import AdapterCopies
(AdapterCopies(Path(sys.argv[1]), sys.argv[2]).folder / "math@0-1").mkdir()
print("made", flush=True)
sys.stdin.read()
"""


def start(root: Path, engine_id: str) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-c", ENGINE, str(root), engine_id]
    engine = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None and engine.stdout.readline() == "made\n"
    return engine


def test_the_copies_of_a_killed_engine_go_when_the_next_starts_and_those_of_a_running_one_stay(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    killed, running = start(root, "killed"), start(root, "running")
    try:
        killed.kill()
        killed.wait()
        assert (root / "adapters-killed" / "math@0-1").is_dir()
        own = AdapterCopies(root, "next")
        assert {path.name for path in root.iterdir()} == {"adapters-running", "adapters-next"}
        assert (root / "adapters-running" / "math@0-1").is_dir()
        running.communicate("")
        assert running.returncode == 0 and not (root / "adapters-running").exists(), "it removes its own"
        own.close()
        remove_left(root)
        assert not list(root.iterdir())
    finally:
        for engine in (killed, running):
            engine.kill()
            engine.wait()


def test_two_engines_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.engine.adapter_copies._REMOVED_WITHIN_S", 0.1)
    own = AdapterCopies(tmp_path / "root", "e")
    with pytest.raises(ConfigError, match="another engine has the same engine_id"):
        AdapterCopies(tmp_path / "root", "e")
    own.close()
