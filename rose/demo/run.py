"""`rose demo`: the main job, end to end, on one machine without a GPU.

Owns the order of things: start everything, take references, profile, measure the baselines and ROSE side by
side, train through the whole loop, report. Promises that every process it started is stopped, also on Ctrl-C
and on an error, and that what could not be measured says so.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path

from rich.console import Console

from rose.arguments import CommandParser, run_command
from rose.demo.figures import compute_figures
from rose.demo.greedy import GreedyCheck
from rose.demo.live import LiveState, LiveView
from rose.demo.plan import DemoOptions, DemoPlan, Durations, load_for_machine
from rose.demo.processes import Cluster, ModelDirs, write_models
from rose.demo.records import DemoResult, PhaseName
from rose.demo.report import print_summary, write_report
from rose.demo.slab_watch import SlabWatch
from rose.demo.training_run import TrainingRun
from rose.errors import ConfigError, WorkerError
from rose.measure.environment import collect_env
from rose.measure.figures import percentile, tpots_s, ttfts_s
from rose.measure.records import Window
from rose.measure.windows import LEAD_S, BusyMeter, RlSteps, ServingLoad, WindowRunner, WindowSpec
from rose.node.control import EngineControl
from rose.node.processes import ProcessGroup
from rose.node.signals import StopOnSignals
from rose.types import GateMode

__all__ = ["DemoOptions", "main", "run_demo"]

logger = logging.getLogger(__name__)

MODELS_TIMEOUT_S = 600.0
SETUP_ESTIMATE_S = 150.0
ROUND = (PhaseName.ROLLOUT_ALONE, PhaseName.SERVING_ALONE, PhaseName.ALTERNATE, PhaseName.ROSE)
"""Measured in turn in every round: a slow minute of the machine touches all of them."""
GATES = {PhaseName.NAIVE: GateMode.OFF, PhaseName.ALTERNATE: GateMode.ALTERNATE}
"""The gate's mode in a window; everywhere else it is the default one."""
TRAINING_INDEX = 100
"""Sample of the trace that the training phase replays."""


def run_demo(
    options: DemoOptions,
    console: Console | None = None,
    durations: Durations | None = None,
    serving: ServingLoad | None = None,
) -> DemoResult:
    """Run the whole demo; its logs and records stay in ``options.out_dir``.

    ``durations`` None: those of the options; ``serving`` None: a load that fits this machine's speed.
    Raises: RoseError when a part could not run; everything started is stopped by then.
    """
    plan = DemoPlan.of(options)
    if durations is not None:
        plan = replace(plan, durations=durations)
    if serving is not None:
        plan = replace(plan, serving=serving)
    options.out_dir.mkdir(parents=True, exist_ok=True)
    with LiveView(console) as view, ExitStack() as stack:
        return _Demo(plan, view, stack, fits_load=serving is None).run()


@dataclass(slots=True)
class _Progress:
    """What the live view shows, and when things began."""

    view: LiveView
    total_s: float
    started_s: float = field(default_factory=time.monotonic)
    state: LiveState = field(default_factory=LiveState)

    def phase(self, text: str, takes_s: float | None = None) -> None:
        """Names what begins now, and about how long it takes."""
        self.state.phase = text if takes_s is None else f"{text} (about {takes_s:.0f} s)"
        logger.info("phase=%s", text)
        self.tick()

    def tick(self) -> None:
        self.state.elapsed_s = time.monotonic() - self.started_s
        self.state.left_s = max(0.0, self.total_s - self.state.elapsed_s)
        self.view.update(self.state)


class _Demo:
    """One run. The methods are called in the order in which they stand."""

    def __init__(self, plan: DemoPlan, view: LiveView, stack: ExitStack, *, fits_load: bool) -> None:
        self._plan = plan
        self._fits_load = fits_load
        self._stack = stack
        self._progress = _Progress(view, SETUP_ESTIMATE_S + plan.measured_s)
        self._models = ModelDirs(plan.options.out_dir / "models")
        self._group = stack.enter_context(ProcessGroup())
        self._cluster = Cluster(plan, self._group, stack, self._models)
        self._phases: list[Window] = []
        self._notes: list[str] = []

    def run(self) -> DemoResult:
        self._make_models()
        engines = self._start()
        serving, rollout = engines["serving"], engines["rollout"]
        self._profile(serving, rollout)
        with SlabWatch(self._plan.pool.name) as self._watch:
            runner = WindowRunner(
                self._plan.traffic, self._plan.options.out_dir, self._cluster, serving, rollout
            )
            self._measure_baselines(runner, serving, rollout)
            training = self._train(runner, serving, rollout)
            self._measure_naive(runner, serving, rollout)
        self._progress.phase("stopping")
        self._group.stop()
        self._keep_slab_record()
        self._greedy.compare(self._phases)
        return self._result(training)

    # Setting up ---------------------------------------------------------------------------------------

    def _make_models(self) -> None:
        self._progress.phase("making two tiny models")
        process = self._cluster.run(write_models(self._plan.options.out_dir / "models"), "models")
        if process.wait(MODELS_TIMEOUT_S) != 0:
            raise WorkerError(f"the models could not be made:\n{process.log_tail()}")
        if self._fits_load:
            load = load_for_machine(float(self._models.speed.read_text()))
            self._plan = replace(self._plan, serving=load)
            self._notes.append(f"prompts: up to {load.max_prompt_tokens} tokens, as fits this machine")
        self._greedy = GreedyCheck(self._plan, self._cluster, self._models)

    def _start(self) -> dict[str, EngineControl]:
        """All engines at once, and stock vLLM beside them for the greedy references."""
        self._progress.phase("starting three engines, and stock vLLM for reference")
        self._cluster.start_engines()
        reference = self._greedy.start_reference(self._guarded_samples())
        self._cluster.start_relay()
        self._training = TrainingRun(
            self._cluster,
            self._models.rollout,
            self._plan.options.out_dir,
            seconds=self._plan.durations.training_s + LEAD_S,
            seed=self._plan.options.seed,
        )
        self._greedy.finish_reference(reference, self._progress.tick)
        engines = self._cluster.wait_engines()
        self._cluster.start_router()
        self._notes.append(f"relay: {self._cluster.relay_kind}")
        self._notes.append(f"trace: {self._plan.trace.name if self._plan.trace else 'generated'}")
        return engines

    def _guarded_samples(self) -> list[tuple[int, float]]:
        """(index, seconds) of the trace samples that run under ROSE."""
        durations = self._plan.durations
        rounds = [(index, durations.window_s) for index in range(durations.num_rounds)]
        return [*rounds, (TRAINING_INDEX, durations.training_s)]

    def _profile(self, serving: EngineControl, rollout: EngineControl) -> None:
        # Rollout first: profiling serving takes the whole pool, which cuts rollout's budget to nothing.
        for engine in (rollout, serving):
            self._progress.phase(f"profiling step times: {engine.model}")
            profile = engine.profile()
            self._progress.state.events.append(
                f"{engine.model}: base {profile.model['base_s'] * 1e3:.1f} ms, "
                f"{profile.model['per_prefill_token_s'] * 1e3:.3f} ms per prefill token, "
                f"{profile.model['per_decode_s'] * 1e3:.2f} ms per decode"
            )

    # Measuring ----------------------------------------------------------------------------------------

    def _measure_baselines(
        self, runner: WindowRunner, serving: EngineControl, rollout: EngineControl
    ) -> None:
        self._rl_steps = RlSteps(rollout)
        for index in range(self._plan.durations.num_rounds):
            for name in ROUND if index == 0 else [each for each in ROUND if each not in GATES]:
                spec = self._window_spec(name, index, rollout)
                with _gate(GATES.get(name, GateMode.IDLE), serving, rollout):
                    is_probed = name is PhaseName.ROSE and index == 0
                    probe = self._greedy.probe(rollout) if is_probed else None
                    self._window(runner, spec)
                    if probe is not None:
                        probe.join()

    def _measure_naive(self, runner: WindowRunner, serving: EngineControl, rollout: EngineControl) -> None:
        """Measures without gate and priorities. It comes last, as the priorities can't be taken back."""
        self._cluster.share_compute_equally()
        for index in range(self._plan.durations.num_rounds):
            with _gate(GATES[PhaseName.NAIVE], serving, rollout):
                self._window(runner, self._window_spec(PhaseName.NAIVE, index, rollout))

    def _window_spec(self, name: PhaseName, index: int, rollout: EngineControl) -> WindowSpec:
        durations = self._plan.durations
        has_serving = name is not PhaseName.ROLLOUT_ALONE
        return WindowSpec(
            name=name,
            index=index,
            duration_s=durations.window_s if has_serving else durations.rollout_alone_s,
            has_serving=has_serving,
            rollout_url=None if name is PhaseName.SERVING_ALONE else rollout.url,
        )

    def _window(self, runner: WindowRunner, spec: WindowSpec) -> None:
        takes_s = spec.duration_s + LEAD_S + (self._plan.serving.drain_s if spec.has_serving else 0.0)
        of = self._plan.durations.num_rounds
        self._progress.phase(f"measuring {spec.name.replace('_', ' ')}, {spec.index + 1} of {of}", takes_s)
        result = runner.run(spec, self._tick_window)
        self._phases.append(result)
        self._show(result)

    def _train(self, runner: WindowRunner, serving: EngineControl, rollout: EngineControl) -> TrainingRun:
        """The whole loop: trainer, router, both rollout engines, weight updates, beside the replay."""
        seconds = self._plan.durations.training_s
        self._progress.phase("RL training on FrozenLake through the router", seconds)
        self._cluster.start_subscribers()
        training = self._training
        training.begin()
        tokens_before = rollout.status().generated_tokens
        start_s = time.monotonic() + LEAD_S
        spec = WindowSpec(name=PhaseName.TRAINING, index=TRAINING_INDEX, duration_s=seconds, has_serving=True)
        replay = runner.start_replay(spec, start_s)
        meter = BusyMeter(serving, rollout)
        meter.start()
        training.wait(start_s + seconds, lambda: self._tick_training(training))
        duration_s = max(seconds, time.monotonic() - start_s)
        serving_busy_s, rollout_busy_s, foreign = meter.stop()
        rollout_tokens = rollout.status().generated_tokens - tokens_before
        requests = runner.finish_replay(replay, spec, lambda: self._tick_training(training))
        training.stop()
        self._phases.append(
            Window(
                name=PhaseName.TRAINING,
                start_s=start_s,
                duration_s=duration_s,
                requests=requests,
                rollout_tokens=rollout_tokens,
                serving_busy_s=serving_busy_s,
                rollout_busy_s=rollout_busy_s,
                foreign_cpu_share=foreign,
            )
        )
        return training

    # Showing and concluding -----------------------------------------------------------------------------

    def _tick_window(self) -> None:
        self._rl_steps.tick()
        self._tick()

    def _tick(self) -> None:
        state = self._progress.state
        if self._watch.samples:
            last = self._watch.samples[-1]
            state.slabs_serving, state.slabs_rollout = last.serving, last.rollout
            state.slabs_free = last.free
        self._progress.tick()

    def _tick_training(self, training: TrainingRun) -> None:
        events = training.events()
        self._progress.state.rewards = [event["reward_mean"] for event in events]
        if events and events[-1]["publish"] is not None:
            self._progress.state.weight_version = str(events[-1]["publish"]["version"])
        self._tick()

    def _show(self, result: Window) -> None:
        state = self._progress.state
        state.ttft_p99_s = percentile(ttfts_s(result.requests), 99) or state.ttft_p99_s
        state.tpot_p99_s = percentile(tpots_s(result.requests), 99) or state.tpot_p99_s
        if result.rollout_tokens:
            state.rollout_tok_s = result.rollout_tokens / result.duration_s

    def _keep_slab_record(self) -> None:
        rows = [asdict(sample) for sample in self._watch.samples]
        rows += [asdict(event) for event in self._watch.events]
        rows.sort(key=lambda row: row["t_s"])
        path = self._plan.options.out_dir / "slabs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def _result(self, training: TrainingRun) -> DemoResult:
        compared, mismatches = training.checksums()
        return DemoResult(
            slo=self._plan.slo,
            seed=self._plan.options.seed,
            is_quick=self._plan.options.quick,
            phases=tuple(self._phases),
            rewards=training.rewards(),
            syncs=training.syncs(),
            slab_samples=self._watch.samples,
            slab_events=self._watch.events,
            greedy_compared=self._greedy.compared,
            greedy_equal=self._greedy.equal,
            checksums_compared=compared,
            checksum_mismatches=mismatches,
            wall_s=time.monotonic() - self._progress.started_s,
            notes=tuple(self._notes),
        )


@contextmanager
def _gate(mode: GateMode, *engines: EngineControl) -> Iterator[None]:
    """Both engines in a gate mode, and back to the default one afterwards."""
    for engine in engines:
        engine.set_gate(mode)
    try:
        yield
    finally:
        for engine in engines:
            engine.set_gate(GateMode.IDLE)


def _parse(argv: Sequence[str]) -> tuple[DemoOptions, argparse.Namespace]:
    parser = CommandParser(
        "rose demo",
        "Runs the main job on this machine: a serving engine, rollouts in its slack, an RL trainer.",
        "rose demo --quick --json figures.json",
    )
    parser.add_argument("--out", type=Path, help="folder for report, records and logs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here too")
    parser.add_argument("--quick", action="store_true", help="short windows, about five minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path, help="Azure-style CSV of serving arrivals")
    parser.add_argument("--relay", choices=("auto", "mooncake", "embedded"), default="auto")
    args = parser.parse_args(argv)
    if args.trace is not None and not args.trace.is_file():
        raise ConfigError(f"--trace {args.trace}: no such file")
    out = args.out if args.out is not None else Path(f"rose-demo-{datetime.now():%Y%m%d-%H%M%S}")
    if (out / "logs").exists():
        raise ConfigError(f"--out {out}: holds an earlier run; name another folder, or remove this one")
    options = DemoOptions(
        out_dir=out.absolute(), quick=args.quick, seed=args.seed, trace=args.trace, relay=args.relay
    )
    return options, args


def main(argv: Sequence[str]) -> int:
    """Status 0 when the demo ran to its end, whatever its figures; 130 when it was stopped."""
    options, args = _parse(argv)
    options.out_dir.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=options.out_dir / "demo.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    console = Console()
    result: DemoResult | None = None
    with StopOnSignals():
        result = run_demo(options, console)
    if result is None:
        console.print("stopped; everything that was started has ended")
        return 130
    env = collect_env(seed=options.seed, quick=options.quick)
    report = options.out_dir / "report.html"
    figures = compute_figures(result, env)
    write_report(result, figures, report)
    text = json.dumps(figures.to_json(), indent=2) + "\n"
    (options.out_dir / "figures.json").write_text(text)
    if args.json is not None:
        args.json.write_text(text)
    print_summary(result, figures, console)
    console.print(f"report: {report}\nlogs:   {options.out_dir / 'logs'}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command("demo", main, sys.argv[1:]))
