"""The processes of `rose serve --fine-tune` that end: what is logged, and what is ended with them."""

import logging
import signal
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


SAVES = f"""
import atexit, signal, sys
atexit.register(lambda: print("saved", flush=True))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
{SLEEPS}
"""


def start(tuning: FineTuning, group: ProcessGroup, folder: Path, *programs: str) -> list[ServerProcess]:
    for rank, program in enumerate(programs):
        argv = [sys.executable, "-c", program]
        process = ServerProcess(argv, f"trainer-{rank}", folder / f"trainer-{rank}.log")
        tuning._trainers.append(group.start(process))
    return tuning._trainers


def wait_up(*started: ServerProcess) -> None:
    until_s = time.monotonic() + 60
    while not all("up" in process.log_tail() for process in started):
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_the_trainer_reads_the_settings_that_it_is_started_with(tmp_path: Path) -> None:
    command = pytest.importorskip("rose.trainers.fine_tune.command", reason="transformers is not installed")
    engine = EngineConfig(model="./model", port=1, role=Role.SERVING)
    for more in ({"epochs": 2, "give_way_ms": 5.0}, {"reward": "judges:exact", "samples": 4, "processes": 2}):
        options = FineTuneOptions.model_validate({"data": tmp_path / "data", **more})
        place, read = command.parse(FineTuning(options, engine)._trainer_flags())
        assert read == options
        assert (place.model, place.engine is not None) == ("./model", "reward" in more)


@pytest.mark.slow
def test_processes_that_a_stop_finds_healthy_end_by_themselves_and_the_first_one_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_END_S", 5.0)
    engine = EngineConfig(model="./model", port=1, role=Role.SERVING)
    options = FineTuneOptions(data=tmp_path / "data", processes=3, output=tmp_path / "model")
    tuning = FineTuning(options, engine)
    with ProcessGroup() as group:
        leader, healthy, deaf = start(tuning, group, tmp_path, SAVES, SAVES, DEAF)
        wait_up(leader, healthy, deaf)
        tuning.let_save()
        assert (leader.exit_status, healthy.exit_status, deaf.exit_status) == (0, 0, -9)
        assert "saved" in leader.log_tail() and "saved" in healthy.log_tail()


def test_a_trainer_that_someone_has_paused_saves_its_model_when_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_SAVE_S", 30.0)
    engine = EngineConfig(model="./model", port=1, role=Role.SERVING)
    tuning = FineTuning(FineTuneOptions(data=tmp_path / "data", output=tmp_path / "model"), engine)
    with ProcessGroup() as group:
        (paused,) = start(tuning, group, tmp_path, SAVES)
        wait_up(paused)
        paused.send_signal(signal.SIGSTOP)
        tuning.let_save()
        assert paused.exit_status == 0 and "saved" in paused.log_tail()


def test_a_process_that_outlives_the_first_one_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "_END_S", 0.1)
    engine = EngineConfig(model="./model", port=1, role=Role.SERVING)
    tuning = FineTuning(FineTuneOptions(data=tmp_path / "data", processes=2), engine)
    with ProcessGroup() as group, caplog.at_level(logging.INFO):
        _, lingers = start(tuning, group, tmp_path, "pass", DEAF)
        wait_up(lingers)
        until_s = time.monotonic() + 60
        while lingers.is_alive():
            tuning.watch()
            assert time.monotonic() < until_s
            time.sleep(0.02)
        tuning.watch()
    lines = [record.getMessage() for record in caplog.records if "fine-tuning" in record.getMessage()]
    assert lines == ["fine-tuning is done; serving goes on with the last weights that went live"]


def test_a_trainer_of_one_process_is_alone_whatever_launched_this_command() -> None:
    (alone,) = processes._rank_environments(1)
    assert (alone["WORLD_SIZE"], alone["RANK"], alone["LOCAL_RANK"]) == ("1", "0", "-1")
    assert alone["OMPI_COMM_WORLD_SIZE"] == "1"


def test_a_trainer_that_has_lost_a_process_is_ended_even_if_the_others_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "_END_S", 0.1)
    engine = EngineConfig(model="./model", port=1, role=Role.SERVING)
    tuning = FineTuning(FineTuneOptions(data=tmp_path / "data", processes=3), engine)
    with ProcessGroup() as group:
        deaf, failed, other = start(tuning, group, tmp_path, DEAF, "raise SystemExit(3)", SLEEPS)
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
