"""Two jobs on one machine, of which one has an engine on each half of the cores: a merged tail frees one."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from real_engine import RealEngine, new_folder
from references import ModelDirs

from rose.jobs.multiplex import main
from rose.jobs.slowdown import hardware
from rose.node.processes import ServerProcess
from rose.ports import free_port
from rose.scheduler.gpu import pairing, plan
from rose.scheduler.gpu.slowdown import SlowdownTable
from rose.scheduler.gpu.substages import SubStageKind
from rose.scheduler.sim.gpu_spec import SlowdownFile
from rose.types import Role

CORES = sorted(os.sched_getaffinity(0))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(len(CORES) < 2 or len(CORES) % 2 > 0, reason="these cores can't be halved"),
]
HALVES = (CORES[: len(CORES) // 2], CORES[len(CORES) // 2 :])
LENGTHS = ("400", "16", "16", "16")
NUM_ITERATIONS = (5, 16)
"""The other job outlasts the one with the tails: a tail is merged for a job that waits."""
NOTED = """
import json, os, runpy, sys, time, rose
log, step = open(sys.argv.pop(1), "a", buffering=1), rose.Progress.step
def noted(progress, *numbers):
    log.write(json.dumps([time.monotonic(), sorted(os.sched_getaffinity(0))]) + "\\n")
    step(progress, *numbers)
rose.Progress.step = noted
runpy.run_module("rose.measure.tiny_pipeline", run_name="__main__", alter_sys=True)
"""
"""A tiny pipeline that notes when each of its steps ended, and on which cores it was."""


class Routed(NamedTuple):
    """Two engines, each on its half of the cores, behind a router."""

    engines: list[RealEngine]
    url: str


@pytest.fixture
def routed(engines_dir: Path, models: ModelDirs, tmp_path: Path) -> Iterator[Routed]:
    folder = new_folder(engines_dir, "halves")
    engines = [
        RealEngine(models.untied[0], Role.ROLLOUT, folder, "--dtype", "float32", cpus=tuple(half))
        for half in HALVES
    ]
    port = free_port()
    settings = tmp_path / "router.yaml"
    settings.write_text("{state: null, policy: turnwise}\n")  # a long turn on each engine
    workers = [flag for engine in engines for flag in ("--worker", engine.url)]
    router = ServerProcess(
        [
            *(sys.executable, "-m", "rose.scheduler.rollout.http.command", str(settings)),
            *("--port", str(port), *workers),
        ],
        "router",
        tmp_path / "router.log",
    )
    try:
        for engine in engines:
            engine.wait_ready()
        url = f"http://127.0.0.1:{port}"
        router.start().wait_ready(f"{url}/workers", 120.0)
        yield Routed(engines, url)
    finally:
        router.stop(0.0)
        for engine in engines:
            engine.stop()


def write_job(folder: Path, name: str, iterations: int, nodes: int, *command: str) -> str:
    spec: dict[str, Any] = {
        "name": name,
        "command": [sys.executable, *command],
        "max_tokens": 512,
        "iterations": iterations,
        "phases": {"rollout": {"nodes": nodes}, "train": {"after": ["rollout"]}},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return str(path)


class Ran(NamedTuple):
    """What came of one run."""

    report: dict[str, Any]
    rollouts: list[dict[str, Any]]
    rewards: list[str]
    steps: list[tuple[float, list[int]]]


def run(routed: Routed, folder: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> Ran:
    folder.mkdir()
    log, steps, rewards = (folder / name for name in ("rollouts.jsonl", "steps.jsonl", "rewards.jsonl"))
    urls = [engine.url for engine in routed.engines]
    tailed = ["-m", "lib.cluster.tailed_job", str(log), routed.url, "tiny", *urls, "--lengths", *LENGTHS]
    tiny = ["-c", NOTED, str(steps), "--rewards", str(rewards), "--width", "64", "--max-tokens", "400"]
    jobs = [
        write_job(folder, "tailed", NUM_ITERATIONS[0], 2, *tailed),
        write_job(folder, "tiny", NUM_ITERATIONS[1], 1, *tiny),
    ]
    assert main([*jobs, *flags, "--folder", str(folder / "jobs"), "--json"]) == 0
    return Ran(
        report=json.loads(capsys.readouterr().out),
        rollouts=[json.loads(line) for line in log.read_text().splitlines()],
        rewards=rewards.read_text().splitlines(),
        steps=[(at_s, cores) for at_s, cores in map(json.loads, steps.read_text().splitlines())],
    )


def test_the_other_job_computes_on_the_cores_that_a_merged_tail_has_freed(
    routed: Routed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the table nothing else may be shared, so that what ran beside the tail ran behind a merge. Sharing
    is planned, and goes on, whatever a busy machine makes of the profile and of what is measured later."""
    monkeypatch.setattr(plan, "MIN_GAIN", 0.0)
    monkeypatch.setattr(pairing, "PLANNED_ITERATIONS", sum(NUM_ITERATIONS))
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    kinds = (SubStageKind.ROLLOUT_SMALL, SubStageKind.ROLLOUT_MEDIUM, SubStageKind.TRAIN)
    table = SlowdownTable(
        hardware=hardware(len(CORES)),
        compute=(0.5,),
        memory=(0.5,),
        entries={(one, two): ((3.0,),) for one in kinds for two in kinds},
    )
    slowdown = tmp_path / "slowdown.json"
    slowdown.write_text(SlowdownFile.of(table).model_dump_json())
    merged = run(routed, tmp_path / "merged", ["--slowdown", str(slowdown)], capsys)
    serial = run(routed, tmp_path / "serial", ["--serial"], capsys)

    assert (serial.report["merges"], merged.report["mode"]) == (0, "shared"), merged.report
    moved = [rollout for rollout in merged.rollouts if rollout["moved_s"] is not None]
    assert len(moved) == merged.report["merges"] > 0
    beside = [
        cores
        for rollout in moved
        for at_s, cores in merged.steps
        if rollout["moved_s"] < at_s < rollout["ended_s"]
    ]
    assert beside, "no step of the other job ended while a merged tail ran"
    assert all(cores in HALVES for cores in beside[1:])
    # The first one may have begun before its process had moved.
    assert any(len(set(workers)) == 2 for rollout in moved for workers in rollout["workers"])
    assert [each["tokens"] for each in merged.rollouts] == [each["tokens"] for each in serial.rollouts]
    assert len(merged.rollouts) == NUM_ITERATIONS[0] and len(merged.rewards) == NUM_ITERATIONS[1]
    assert merged.rewards == serial.rewards
