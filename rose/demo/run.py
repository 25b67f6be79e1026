"""`rose demo`: the whole system, end to end, on one machine without a GPU.

Owns the order of things: start everything, measure the baselines and ROSE, train through the whole loop,
compare with stock vLLM, report. Promises that every process it started is stopped, also on Ctrl-C and on an
error, and that the report names what could not be measured.
"""

import json
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from datetime import datetime
from pathlib import Path

from rich.console import Console

from rose.arguments import CommandParser, run_command
from rose.demo import frozenlake
from rose.demo.figures import compute_figures
from rose.demo.live import DemoPart, LiveView
from rose.demo.plan import DemoOptions, DemoPlan
from rose.demo.processes import ALLOWED_HARM, DEDICATED, ROLLOUT, SERVING, Machine, TrainingRun
from rose.demo.records import UNDER_ROSE, DemoResult, PhaseName
from rose.demo.report import print_summary, write_report
from rose.errors import ConfigError
from rose.measure.environment import collect_env
from rose.measure.figures import LATENCIES, latency_s, pooled_requests, to_json
from rose.measure.greedy import GreedyCheck
from rose.measure.records import Window
from rose.measure.rig import Rig
from rose.measure.slabs import SlabWatch
from rose.measure.windows import LEAD_S, RlSteps, WindowRunner, WindowSpec
from rose.node.signals import StopOnSignals
from rose.types import GateMode, Role

ORDER = {
    PhaseName.SERVING_ALONE: "serving alone",
    PhaseName.ROSE: "ROSE: rollouts only while serving is idle, memory moves between both",
    PhaseName.ROLLOUT_ALONE: "rollouts alone",
    PhaseName.ALTERNATE: "strict alternation: a rollout step after each serving step",
    PhaseName.TRAINING: "RL training on FrozenLake under ROSE: trainer, relay, router, two rollout engines",
    PhaseName.NAIVE: "naive co-location: no gate, equal priorities",
    PhaseName.STATIC: "static split: each engine has its own memory and half of the GPU's time",
}
"""The phases as they are measured, and what the console says. Priorities can't be taken back, so naive
co-location comes late; rollouts alone are measured beside ROSE, as a shared host changes its speed."""
GATES = {PhaseName.NAIVE: GateMode.OFF, PhaseName.ALTERNATE: GateMode.ALTERNATE}
"""The gate's mode in a phase; everywhere else it is the default one."""
BESIDE_S = {"models": 10.0, "start": 90.0, "profile": 20.0, "stock": 40.0}
"""About what each part takes in which nothing is measured."""


def run_demo(plan: DemoPlan, console: Console | None = None) -> DemoResult:
    """Run the whole demo; its logs and records stay in the plan's ``out_dir``.

    Raises: RoseError when a part could not run; everything started is stopped by then.
    """
    plan.options.out_dir.mkdir(parents=True, exist_ok=True)
    view = LiveView(console if console is not None else Console(), _parts(plan))
    with view, Rig(plan.options.out_dir, frozenlake.WORDS) as rig, ExitStack() as stack:
        return _Demo(plan, view, rig, stack).run()


def _parts(plan: DemoPlan) -> list[DemoPart]:
    return [
        DemoPart("two tiny models are made", BESIDE_S["models"]),
        DemoPart("a pool, a relay, a router, a trainer and three engines start", BESIDE_S["start"]),
        DemoPart("the rollout engine's step times are profiled", BESIDE_S["profile"]),
        *(DemoPart(title, LEAD_S + plan.durations.of(name)) for name, title in ORDER.items()),
        DemoPart("stock vLLM answers the same prompts", BESIDE_S["stock"]),
    ]


class _Demo:
    """One run. The methods are called in the order in which they stand."""

    def __init__(self, plan: DemoPlan, view: LiveView, rig: Rig, stack: ExitStack) -> None:
        self._plan = plan
        self._view = view
        self._rig = rig
        self._stack = stack
        self._greedy = GreedyCheck(rig, plan.options.seed)
        self._phases: list[Window] = []

    def run(self) -> DemoResult:
        self._start()
        for name in ORDER:
            self._measure(name)
        self._view.begin()
        self._stack.close()
        self._rig.stop()
        requests = pooled_requests(phase for phase in self._phases if phase.name in UNDER_ROSE)
        compared, equal = self._greedy.compare(requests, self._tick)
        return self._result(compared, equal)

    def _start(self) -> None:
        self._view.begin()
        self._rig.model(Role.SERVING)
        self._view.begin()
        self._machine = Machine(self._plan, self._rig)
        self._training = TrainingRun(self._rig, self._machine, self._plan.options.seed)
        self._engines = self._machine.wait()
        self._view.begin()
        self._engines[ROLLOUT].profile()
        self._engines[SERVING].complete([[1] * 128], max_tokens=4)  # pays what only a first step costs
        self._rl_steps = RlSteps(self._engines[ROLLOUT])
        self._watch = self._stack.enter_context(SlabWatch(self._machine.pool.ledger))

    def _measure(self, name: PhaseName) -> None:
        self._view.begin()
        rollout = self._engines[DEDICATED if name is PhaseName.STATIC else ROLLOUT]
        serving = self._engines[SERVING]
        is_training = name is PhaseName.TRAINING
        spec = WindowSpec(
            name=name,
            index=0,
            duration_s=self._plan.durations.of(name),
            has_serving=name is not PhaseName.ROLLOUT_ALONE,
            rollout_url=None if is_training or name is PhaseName.SERVING_ALONE else rollout.url,
            repeats=self._plan.durations.training_windows if is_training else 1,
        )
        runner = WindowRunner(self._plan.traffic, self._plan.options.out_dir, self._rig, serving, rollout)
        if name is PhaseName.NAIVE:
            self._machine.share_equally()
        split = self._machine.split() if name is PhaseName.STATIC else nullcontext()
        probing = self._greedy.probing(rollout) if name is PhaseName.ROSE else nullcontext()
        self._set_gate(GATES.get(name, GateMode.IDLE))
        with split, probing:
            self._phases.append(self._train(runner, spec) if is_training else runner.run(spec, self._tick_rl))
        self._set_gate(GateMode.IDLE)
        self._view.say(_said(self._phases[-1]))

    def _set_gate(self, mode: GateMode) -> None:
        for name in (SERVING, ROLLOUT):
            self._engines[name].set_gate(mode)

    def _train(self, runner: WindowRunner, spec: WindowSpec) -> Window:
        """The whole loop: trainer, router, both rollout engines, weight updates, beside the replay."""
        with self._machine.training(self._training):
            self._training.begin()
            window = runner.run(spec, self._tick, lambda until_s: self._training.wait(until_s, self._tick))
        self._training.stop()
        return window

    def _tick_rl(self) -> None:
        self._rl_steps.tick()
        self._tick()

    def _tick(self) -> None:
        state = []
        if self._watch.samples:
            last = self._watch.samples[-1]
            state.append(f"slabs: serving {last.serving}, rollout {last.rollout}, free {last.free}")
        if steps := self._training.steps:
            state.append(f"reward {steps[-1].reward_mean:.2f} after {len(steps)} steps")
        self._view.update(" | ".join(state))

    def _result(self, compared: int, equal: int) -> DemoResult:
        self._watch.write(self._plan.options.out_dir / "slabs.jsonl")
        trace = self._plan.traffic.trace
        return DemoResult(
            is_quick=self._plan.options.quick,
            phases=tuple(self._phases),
            steps=self._training.steps,
            slab_samples=tuple(self._watch.samples),
            slab_events=tuple(self._watch.events),
            greedy_compared=compared,
            greedy_equal=equal,
            wall_s=self._view.elapsed_s,
            notes=(
                f"gate: rollouts only while serving is idle, --allow-harm {ALLOWED_HARM}",
                f"relay: {self._machine.relay_kind}",
                f"trace: {trace.name if trace is not None else 'generated'}",
            ),
        )


def _said(window: Window) -> str:
    """What a phase came to, in a line."""
    p99s = ((name, latency_s(window.requests, name, 99)) for name in LATENCIES)
    parts = [f"{name.upper()} P99 {1e3 * seconds:.0f} ms" for name, seconds in p99s if seconds is not None]
    if window.rollout_tokens:
        parts.append(f"{window.rollout_tokens / window.duration_s:,.0f} rollout tokens/s")
    return f"  {', '.join(parts)}"


def _parse(argv: Sequence[str]) -> DemoOptions:
    parser = CommandParser(
        "rose demo",
        "Runs the whole system on this machine, in about ten minutes: a serving engine, rollouts in its "
        "slack, and an RL trainer.",
        "rose demo --quick --out demo",
    )
    add = parser.add_argument
    out_help = "folder for report, figures.json, records and logs (default: rose-demo-DATE-TIME)"
    add("--out", type=Path, help=out_help)
    add("--quick", action="store_true", help="measure in shorter windows; takes about six minutes")
    add("--seed", type=int, default=0, help="seed of the random numbers (default: %(default)s)")
    trace_help = "arrivals of the serving traffic, a CSV in Azure's format (default: generated)"
    add("--trace", type=Path, help=trace_help)
    relay_help = "what carries the weights; auto: Mooncake where it is installed (default: %(default)s)"
    add("--relay", choices=("auto", "mooncake", "embedded"), default="auto", help=relay_help)
    args = parser.parse_args(argv)
    if args.trace is not None and not args.trace.is_file():
        raise ConfigError(f"--trace {args.trace}: no such file")
    out = args.out if args.out is not None else Path(f"rose-demo-{datetime.now():%Y%m%d-%H%M%S}")
    if (out / "logs").exists():
        raise ConfigError(f"--out {out}: holds an earlier run; name another folder, or remove this one")
    return DemoOptions(
        out_dir=out.absolute(), quick=args.quick, seed=args.seed, trace=args.trace, relay=args.relay
    )


def main(argv: Sequence[str]) -> int:
    """Status 0 when the demo ran to its end, whatever its figures; 130 when it was stopped."""
    options = _parse(argv)
    try:
        options.out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {options.out_dir}: can't be made ({error.strerror}); name another folder"
        ) from error
    logging.basicConfig(
        filename=options.out_dir / "demo.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    console = Console()
    result: DemoResult | None = None
    with StopOnSignals():
        result = run_demo(DemoPlan.of(options), console)
    if result is None:
        console.print("stopped; everything that was started has ended")
        return 130
    figures, env = compute_figures(result), collect_env(seed=options.seed, quick=options.quick)
    write_report(result, figures, env, report := options.out_dir / "report.html")
    (options.out_dir / "figures.json").write_text(json.dumps(to_json(env, figures.values()), indent=2) + "\n")
    print_summary(result, figures, env, console)
    console.print(
        f"report: {report}\npicture: {report.with_suffix('.png')}\nlogs: {options.out_dir / 'logs'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_command("demo", main, sys.argv[1:]))
