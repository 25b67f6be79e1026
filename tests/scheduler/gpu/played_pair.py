"""Two scripted pipelines that run under a Pairing with a clock of the test's own."""

import math
from dataclasses import dataclass, field

from rose.scheduler.gpu.live import ROLLOUT, TRAIN
from rose.scheduler.gpu.pairing import Pairing, RolloutReport
from rose.scheduler.gpu.substages import Steps

SMALL, LARGE = 8, 2048
"""Tokens of a decode step, and of a training step."""
Truth = dict[tuple[int, int], float]
"""How many times longer a phase's steps take beside the other pipeline's phase, on half of the device."""


@dataclass(slots=True)
class Script:
    """One pipeline: so many equal steps a phase. `obeys`: whether it pauses when it is told to. `engines`:
    the lengths of the responses on each engine, if its rollouts run there: a step is one of all engines.
    `growth`: how many times longer they are in each next iteration."""

    rollout: tuple[int, float] = (40, 0.02)
    train: tuple[int, float] = (8, 0.1)
    num_iterations: int = 20
    engines: tuple[tuple[int, ...], ...] = ()
    growth: float = 1.0
    reports: bool = True
    obeys: bool = True
    phase: int = ROLLOUT
    at: int = 0
    left_s: float = 0.0
    began_s: float = 0.0
    epoch: int = 0
    holds: bool = False
    is_paused: bool = False
    num_done: int = 0
    is_over: bool = False
    ends_s: list[float] = field(default_factory=list)
    kept: int | None = None
    """The engine on which the rollout goes on alone."""

    @property
    def on_engines(self) -> bool:
        return bool(self.engines) and self.phase == ROLLOUT

    @property
    def steps(self) -> tuple[int, float]:
        if self.on_engines:
            return max(max(lengths) for lengths in self.engines), self.rollout[1]
        return self.rollout if self.phase == ROLLOUT else self.train

    @property
    def runs(self) -> bool:
        return self.holds and not self.is_paused


class PlayedPair:
    """Runs both until they are over."""

    def __init__(self, pairing: Pairing, scripts: tuple[Script, Script], truth: Truth) -> None:
        self.now = 100.0
        self.pairing, self.scripts, self._truth = pairing, scripts, truth
        self.modes, self.reasons = [pairing.mode], [pairing.why]
        for index in (0, 1):
            pairing.asks(index, ROLLOUT, self.now)

    def run(self) -> float:
        """Returns the seconds until both are over."""
        began_s = self.now
        while not all(script.is_over for script in self.scripts):
            self._grant()
            self._check_engines()
            rates = [self._rate(index) for index in (0, 1)]
            ends = [
                script.left_s / rate if rate else math.inf
                for script, rate in zip(self.scripts, rates, strict=True)
            ]
            passed_s = min(*ends, 1.0)
            assert passed_s < 1.0 or any(rates), "nobody goes on"
            self.now += passed_s
            for index, (script, rate) in enumerate(zip(self.scripts, rates, strict=True)):
                script.left_s -= passed_s * rate
                if rate and ends[index] <= passed_s:
                    self._step(index)
            self.pairing.tick(self.now)
            if self.pairing.mode is not self.modes[-1]:
                self.modes.append(self.pairing.mode)
                self.reasons.append(self.pairing.why)
        return self.now - began_s

    def _check_engines(self) -> None:
        """A rollout on engines is never paused, and shares the device behind a merge alone."""
        for index, script in enumerate(self.scripts):
            if script.holds and script.on_engines:
                assert self.pairing.shares[index] is not None
                assert self.pairing.shares[1 - index] is None or script.kept is not None

    def end(self, index: int) -> None:
        """The pipeline's process ends."""
        self.scripts[index].is_over = True
        self.pairing.ended(index, self.now)

    def _grant(self) -> None:
        for index, script in enumerate(self.scripts):
            if script.runs or script.is_over or self.pairing.shares[index] is None:
                continue
            if not script.holds:
                script.holds = True
                self.pairing.granted(index, self.now)
            script.is_paused = False
            self._begin(script)

    def _begin(self, script: Script) -> None:
        script.left_s, script.began_s, script.epoch = script.steps[1], self.now, self.pairing.epoch

    def _rate(self, index: int) -> float:
        script, other = self.scripts[index], self.scripts[1 - index]
        if not script.runs:
            return 0.0
        return 1 / self._truth[script.phase, other.phase] if other.runs else 1.0

    def _step(self, index: int) -> None:
        script, pairing = self.scripts[index], self.pairing
        if script.on_engines:
            self._report(index)
        elif script.reports:
            tokens, running = (SMALL, SMALL) if script.phase == ROLLOUT else (LARGE, 0)
            pairing.stepped(index, tokens, running, self.now - script.began_s, script.epoch)
        if script.obeys:
            script.is_paused = pairing.shares[index] is None
            pairing.obeys(index, pairing.epoch, self.now)
        script.at += 1
        if script.at == script.steps[0]:
            self._end_stage(index)
        else:
            self._begin(script)

    def _report(self, index: int) -> None:
        script, done = self.scripts[index], self.scripts[index].at + 1
        stepped, running = (
            [sum(length > at for length in lengths) for lengths in script.engines] for at in (script.at, done)
        )
        seconds = self.now - script.began_s
        report = RolloutReport(
            logs=[[Steps(tokens=n, num_running=n, seconds=seconds)] if n else [] for n in stepped],
            num_running=running,
            num_samples=sum(map(len, script.engines)),
            num_done=sum(map(len, script.engines)) - sum(running),
            num_tokens=done if any(running) else None,
            lengths=[] if any(running) else [length for lengths in script.engines for length in lengths],
        )
        worker = self.pairing.reported(index, report)
        if worker is not None:
            assert self.pairing.moved(index, [worker], self.now) is None
            script.kept = worker

    def _end_stage(self, index: int) -> None:
        script, pairing = self.scripts[index], self.pairing
        script.at, script.holds, script.is_paused, script.kept = 0, False, False, None
        pairing.released(index, self.now)
        if script.phase == TRAIN:
            pairing.completed(index, self.now)
            script.num_done += 1
            grown = (tuple(round(each * script.growth) for each in lengths) for lengths in script.engines)
            script.engines = tuple(grown)
            script.ends_s.append(self.now)
        script.phase = TRAIN if script.phase == ROLLOUT else ROLLOUT
        if script.num_done == script.num_iterations:
            self.end(index)
        else:
            pairing.asks(index, script.phase, self.now)
