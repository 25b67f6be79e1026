"""Two jobs on one device, of which one has its rollouts on a real engine: its share of memory bounds it."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import paired_job
import pytest
import yaml
from shared_gpu import SharedGpu

from rose.jobs.multiplex import main
from rose.jobs.slowdown import hardware
from rose.scheduler.gpu.slowdown import SlowdownTable
from rose.scheduler.gpu.substages import SubStageKind
from rose.scheduler.sim.gpu_spec import SlowdownFile
from rose.types import Role

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core can't be split"),
]
SHARE = 0.25
NUM_ITERATIONS = 6


def write_job(folder: Path, name: str, *command: str) -> str:
    spec: dict[str, Any] = {
        "name": name,
        "command": [sys.executable, *command],
        "max_tokens": 512,
        "iterations": NUM_ITERATIONS,
        "phases": {"rollout": {}, "train": {"after": ["rollout"]}},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return str(path)


def test_an_engine_keeps_within_its_job_s_share_of_memory_and_answers_the_same(
    gpu: SharedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    log, rewards = tmp_path / "turns.jsonl", str(tmp_path / "rewards.jsonl")
    kinds = (SubStageKind.ROLLOUT_SMALL, SubStageKind.TRAIN)
    table = SlowdownTable(
        hardware=hardware(len(os.sched_getaffinity(0))),
        compute=(0.5,),
        memory=(SHARE,),
        entries={(one, two): ((1.05,),) for one in kinds for two in kinds},
    )
    slowdown = tmp_path / "slowdown.json"
    slowdown.write_text(SlowdownFile.of(table).model_dump_json())
    tiny = ("-m", "rose.measure.tiny_pipeline", "--width", "32", "--samples", "4", "--max-tokens", "400")
    jobs = [
        write_job(tmp_path, "engine", paired_job.__file__, gpu.engine(Role.ROLLOUT).url, str(log), rewards),
        write_job(tmp_path, "tiny", *tiny, "--rewards", rewards, "--elastic"),
    ]
    assert main([*jobs, "--slowdown", str(slowdown), "--folder", str(tmp_path / "jobs"), "--json"]) == 0
    turns = [json.loads(line) for line in log.read_text().splitlines()]
    answers = {turn["number"]: turn["tokens"] for turn in turns[: paired_job.NUM_TURNS]}
    assert [turn["tokens"] for turn in turns] == [answers[turn["number"]] for turn in turns]
    alone = [turn for turn in turns if turn["share"] == 1]
    beside = [turn for turn in turns if turn["share"] == SHARE]
    assert len(turns) == NUM_ITERATIONS * paired_job.NUM_TURNS and alone and beside
    assert all(turn["owned"] <= max(1, int(SHARE * turn["budget"])) for turn in beside)
    assert max(turn["owned"] for turn in alone) > max(turn["owned"] for turn in beside)
