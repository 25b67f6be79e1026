"""A serving engine's idle time trains its model: serving loses nothing, and what it serves becomes better.

One real engine has a trainer as the guest of its compute (rose serve --fine-tune). Windows of the same
traffic alternate between a stopped and a running trainer. Then the trainer goes to the end of its data.
  colocated_p99_ratio[ttft|tpot]  serving's P99 with the trainer over its P99 without
  finetune_share                  steps/s in the windows, over steps/s of the same trainer without guest or
                                  traffic, over the share of time that serving leaves; beside it a step's
                                  times over a step of that trainer: pieces, waits, the rest on the host
  served_loss_drop                by how much the loss of what is served fell, over offline training's fall
  restarts                        of the serving engine

    python benchmarks/bench_finetune.py --quick --json finetune.json
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from lib.harness import median_figure, run_benchmark
from lib.load.traffic import add_trace, latency_ms, note_foreign_share, plan_traffic, window_runner

from rose.admission.board_snapshot import EngineState, snapshot
from rose.config import Settings
from rose.errors import WorkerError
from rose.http import http_client
from rose.measure.figures import Figure, ratio
from rose.measure.models import ModelSpec, make_rollout_model, numbered_words
from rose.measure.records import Window
from rose.measure.rig import CLIENT_ENV, Rig
from rose.measure.windows import WindowRunner, WindowSpec
from rose.memory.pool.pool import PoolClient
from rose.node.control import EngineControl
from rose.node.fine_tune.processes import TRAINER_NICE
from rose.node.processes import ServerProcess
from rose.types import Role

SPEC = ModelSpec(
    hidden_size=256,
    intermediate_size=1024,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=1024,
    max_positions=1024,
)
"""A layer's backward pass of one sequence takes a few milliseconds on one core."""
POOL = {"num_slabs": 48, "slab_bytes": 1 << 20, "headroom_slabs": 8}
SEQUENCE_TOKENS = 32
NUM_WORDS = 256
REGULARITY = 0.9
"""How often a word is followed by the one that always follows it."""
BATCH = 4
LEARNING_RATE = 1e-3
PUBLISH_S = 15.0
GIVE_WAY_MS = 5.0
NUM_EVALUATED = 32
WINDOW_S = 20.0
"""Not PUBLISH_S, or a new version would often come at the edge of a window."""
TRAINING_S = 1800.0


def measure(args: argparse.Namespace) -> list[Figure]:
    num_steps, rounds = (300, 1) if args.quick else (1500, 5)
    with Rig() as rig:
        bench = _Bench(rig, args, num_steps)
        alone = bench.train_alone()
        bench.start()
        before = bench.served_loss()
        windows: dict[bool, list[Window]] = {True: [], False: []}
        steps: list[list[dict[str, float]]] = []
        for index in range(rounds):
            for is_training in random.Random(args.seed + index).sample((True, False), 2):
                window = bench.window(index, WINDOW_S, is_training=is_training)
                windows[is_training].append(window)
                if is_training:
                    steps.append(bench.steps_in(window))
        bench.finish()
        after = bench.served_loss()
        note_foreign_share([*windows[True], *windows[False]])
        return _figures(windows, steps, alone, before - after, bench)


class _Bench:
    """The engine, its trainer and the data."""

    def __init__(self, rig: Rig, args: argparse.Namespace, num_steps: int) -> None:
        self._rig = rig
        self.plan = plan_traffic(args, rig, concurrency=1)
        load = replace(self.plan.serving, vocab_size=SPEC.vocab_size)
        self.plan = replace(self.plan, serving=load)
        self._seed = args.seed
        self._compute = self.plan.cpus.compute
        self._model = make_rollout_model(rig.folder / "tuned", SPEC, words=numbered_words(NUM_WORDS))
        texts = _texts(num_steps * BATCH + NUM_EVALUATED, args.seed)
        self._data = _written(rig.folder / "data.jsonl", texts[NUM_EVALUATED:])
        self._evaluated = _written(rig.folder / "evaluated.jsonl", texts[:NUM_EVALUATED])
        self._texts = texts[:NUM_EVALUATED]
        self._lines = rig.folder / "steps.jsonl"
        self._pool = f"finetune-{os.getpid()}"
        self._trainer: ServerProcess | None = None

    def train_alone(self) -> dict[str, float]:
        """Trains on all data without an engine. Returns the JSON that the trainer prints."""
        script = str(Path(__file__).parent / "lib" / "load" / "lone_training.py")
        flags = ["--evaluate", str(self._evaluated), *self._trainer_flags()]
        cpus = [int(self._compute)] if self._compute is not None else None
        argv = [sys.executable, script, *flags]
        process = self._rig.start(
            ServerProcess(argv, "alone", self._rig.log("alone"), env=CLIENT_ENV, cpus=cpus)
        )
        if process.wait(TRAINING_S) != 0:
            raise WorkerError(f"training alone failed:\n{process.log_tail()}")
        lines = [line for line in self._rig.log("alone").read_text().splitlines() if '"steps_per_s"' in line]
        found: dict[str, float] = json.loads(lines[-1])
        return found

    def start(self) -> None:
        """Starts relay, engine, subscriber and trainer; returns once the trainer has taken a step."""
        rig = self._rig
        _, url = rig.start_relay("relay", capacity_bytes=1 << 30)
        self.observer: PoolClient = rig.pool(self._pool, **POOL)
        rig.start_engine(
            "serving",
            Role.SERVING,
            model=self._model,
            pool=self._pool,
            compute_cpus=self._compute,
            relay=url,
            run="finetune",
            takes_weights=True,
        )
        self.serving: EngineControl = rig.wait_engine("serving")
        self.serving.profile()
        rig.start_subscriber("serving")
        self._runner: WindowRunner = window_runner(self.plan, rig, self.serving, self.serving)
        flags = ["--pool", self._pool, "--relay", url, "--run", "finetune"]
        flags += ["--fine-tune-log", str(self._lines)]
        flags += ["--cpus", self._compute] if self._compute is not None else []
        argv = [sys.executable, "-m", "rose.trainers.fine_tune.command", *self._trainer_flags(), *flags]
        self._trainer = rig.start(
            ServerProcess(
                argv, "trainer", rig.log("trainer"), env=CLIENT_ENV, cpus=rig.others, nice=TRAINER_NICE
            )
        )
        self._trainer.wait_until(self._lines.exists, "first step", TRAINING_S)
        self._stop()

    def _trainer_flags(self) -> list[str]:
        flags: dict[str, Any] = {
            "--model": self._model,
            "--fine-tune": self._data,
            "--fine-tune-learning-rate": LEARNING_RATE,
            "--fine-tune-micro-batch": BATCH,
            "--fine-tune-tokens": SEQUENCE_TOKENS,
            "--fine-tune-publish-s": PUBLISH_S,
            "--fine-tune-give-way-ms": GIVE_WAY_MS,
            "--fine-tune-seed": self._seed,
        }
        return [str(part) for pair in flags.items() for part in pair]

    def window(self, index: int, duration_s: float, *, is_training: bool) -> Window:
        """Replays one sample of the traffic, with the trainer running or stopped."""
        if is_training:
            self._go_on()
        spec = WindowSpec(
            name="finetune",
            variant="training" if is_training else "alone",
            index=index,
            duration_s=duration_s,
            has_serving=True,
        )
        window = self._runner.run(spec, lambda: None)
        self._stop()
        return window

    def _stop(self) -> None:
        """Stops the trainer between two grants, because within one the board would see it hold the GPU."""
        assert self._trainer is not None
        while self._trainer.is_alive():
            self._trainer.send_signal(signal.SIGSTOP)
            time.sleep(0.05)
            if snapshot(self.observer.board_words).rollout.state is not EngineState.RUNNING:
                return
            self._go_on()
            time.sleep(0.003)

    def _go_on(self) -> None:
        assert self._trainer is not None
        self._trainer.send_signal(signal.SIGCONT)

    def steps_in(self, window: Window) -> list[dict[str, float]]:
        """Returns the lines of the optimizer steps that ended in a window.

        Raises: WorkerError if the data ended before it.
        """
        assert self._trainer is not None
        if not self._trainer.is_alive():
            raise WorkerError(f"the trainer ended in a window:\n{self._trainer.log_tail()}")
        found = [json.loads(line) for line in self._lines.read_text().splitlines()]
        end_s = window.start_s + window.duration_s
        return [line for line in found if window.start_s <= line["t_s"] < end_s]

    def finish(self) -> None:
        """Waits until the trainer has ended and the engine has taken the last version."""
        assert self._trainer is not None
        self._go_on()
        if self._trainer.wait(TRAINING_S) != 0:
            raise WorkerError(f"the trainer failed:\n{self._trainer.log_tail()}")
        version, deadline_s = self.version(), time.monotonic() + 30.0
        while time.monotonic() < deadline_s:
            time.sleep(5.0)
            if self.version() == version:
                return
            version = self.version()

    def version(self) -> int:
        """Returns the number of the version that is served; -1 before the first."""
        version = self.serving.status().weight_version
        return int(version.rpartition("/")[2]) if version is not None else -1

    def served_loss(self) -> float:
        """Returns the mean loss of the evaluated texts, from the logprobs in the engine's answers."""
        body = {
            "model": self.serving.model,
            "prompt": self._texts,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        with http_client(self.serving.url, key=Settings.from_environment().key, timeout=600.0) as http:
            answer = http.post("/v1/completions", json=body).raise_for_status().json()
        positions = [each for choice in answer["choices"] for each in choice["prompt_logprobs"] if each]
        return -fmean(next(iter(position.values()))["logprob"] for position in positions)


def _texts(count: int, seed: int) -> list[str]:
    """Sequences in which most words determine the next one."""
    chance = random.Random(seed)
    follower = chance.sample(range(NUM_WORDS), NUM_WORDS)
    texts = []
    for _ in range(count):
        word, words = chance.randrange(NUM_WORDS), []
        for _ in range(SEQUENCE_TOKENS - 1):  # the end token comes behind them
            words.append(f"w{word}")
            word = follower[word] if chance.random() < REGULARITY else chance.randrange(NUM_WORDS)
        texts.append(" ".join(words))
    return texts


def _written(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def _figures(
    windows: dict[bool, list[Window]],
    steps: Sequence[Sequence[dict[str, float]]],
    alone: dict[str, float],
    fall: float,
    bench: _Bench,
) -> list[Figure]:
    figures = [
        Figure(
            name=f"colocated_p99_ratio[{kind}]",
            value=ratio(latency_ms(windows[True], kind, 99), latency_ms(windows[False], kind, 99)),
            unit="x without the trainer",
            target="<= 1.10",
            peers={
                "P50": ratio(latency_ms(windows[True], kind, 50), latency_ms(windows[False], kind, 50)),
                "P99 without, ms": latency_ms(windows[False], kind, 99),
            },
        )
        for kind in ("ttft", "tpot")
    ]
    idle = [1 - window.serving_busy_s / window.duration_s for window in windows[True]]
    rates = [len(lines) / window.duration_s for lines, window in zip(steps, windows[True], strict=True)]
    shares = [rate / (alone["steps_per_s"] * free) for rate, free in zip(rates, idle, strict=True)]
    board = snapshot(bench.observer.board_words)
    offline = alone["before"] - alone["after"]
    return [
        *figures,
        median_figure(
            "finetune_share",
            shares,
            "of training alone, of what serving leaves",
            target=">= 0.85",
            peers={
                "idle share": fmean(idle),
                "steps/s alone": alone["steps_per_s"],
                **_times_of_a_step(steps, alone["steps_per_s"]),
            },
        ),
        Figure(
            name="served_loss_drop",
            value=fall / offline,
            unit="x offline training's",
            target=">= 0.95",
            peers={"served, nats": fall, "offline, nats": offline},
        ),
        Figure(
            name="restarts",
            value=0.0,  # else the last question would not have been answered
            unit="of the serving engine",
            target="<= 0",
            peers={"versions": float(bench.version()), "overruns": float(board.num_overruns)},
        ),
    ]


def _times_of_a_step(
    windows: Sequence[Sequence[dict[str, float]]], alone_per_s: float
) -> dict[str, float | None]:
    """Returns where a step's time went, over that of a step alone: in pieces, waiting for grants, or outside
    of both, on the host."""
    spans = [(lines[0], lines[-1], len(lines) - 1) for lines in windows if len(lines) > 1]
    num = sum(count for _, _, count in spans)

    def each(key: str) -> float:
        return sum(last[key] - first[key] for first, last, _ in spans) * alone_per_s / num

    if not num:
        return {}
    pieces, waits = each("computed_s"), each("waited_s")
    return {
        "a step's pieces": pieces,
        "its waits": waits,
        "the rest": each("t_s") - pieces - waits,
        "grants": sum(last["grants"] - first["grants"] for first, last, _ in spans) / num,
    }


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, add_trace))
