"""The processes of `rose serve --fine-tune` that end: what is logged, and what is ended with them."""

import logging
import sys
import time
from pathlib import Path

import pytest

from rose.node.fine_tune import processes
from rose.node.fine_tune.options import FineTuneOptions
from rose.node.fine_tune.processes import FineTuning
from rose.node.node_config import EngineConfig
from rose.node.processes import ProcessGroup, ServerProcess
from rose.types import Role

SLEEPS = "import time; time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); {SLEEPS}"


def test_a_trainer_that_has_lost_a_process_is_ended_even_if_the_others_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "_END_S", 0.1)
    engine = EngineConfig(model="./model", port=1, role=Role.SERVING)
    tuning = FineTuning(FineTuneOptions(data=tmp_path / "data", processes=3), engine)
    programs = {
        "trainer-0": DEAF,
        "trainer-1": "raise SystemExit(3)",
        "trainer-2": "import time; time.sleep(600)",
    }
    with ProcessGroup() as group:
        for name, program in programs.items():
            argv = [sys.executable, "-c", program]
            tuning._trainers.append(group.start(ServerProcess(argv, name, tmp_path / f"{name}.log")))
        deaf, failed, other = tuning._trainers
        until_s = time.monotonic() + 60
        while "up" not in deaf.log_tail() or failed.is_alive():
            assert time.monotonic() < until_s
            time.sleep(0.02)
        with caplog.at_level(logging.INFO):
            while deaf.is_alive() or other.is_alive():
                tuning.watch()
                assert time.monotonic() < until_s
                time.sleep(0.02)
    died = [record.getMessage() for record in caplog.records if "fine-tuning" in record.getMessage()]
    assert "died name=trainer-1 status=3: fine-tuning has stopped, serving goes on" in died
    assert not any("is done" in line for line in died)
