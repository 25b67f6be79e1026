"""A prefiller keeps its TTFT and a decoder its TPOT, each beside rollouts of its own."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import phase_runs
import pytest
from live_rollouts import live_rollouts
from phase_runs import SLO_MS, Phase
from prefill_decode_runs import Line
from preloaded import FORKS
from probes import wave_prompts
from references import ModelDirs, StockAnswers

from rose.types import Deployment, GateMode, Role

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SIZE = {"num_slabs": 24, "headroom_slabs": 6}
IDLE, SPENDING = wave_prompts(Role.SERVING, 0), wave_prompts(Role.SERVING, 1)
"""The first with the default gate, the second with one that spends slack."""


def test_each_phase_admits_rollouts_by_its_own_slo_and_answers_as_stock(
    engines_dir: Path, models: ModelDirs, stock: StockAnswers
) -> None:
    """Either engine has an SLO of the other phase that it could not keep, and that would admit no rollout."""
    expected = stock.of("serving")  # before the engines compute on the same cores
    line, spends = Line(asked=FORKS.Queue(), told=FORKS.Queue()), FORKS.Event()
    lets = [FORKS.Event(), FORKS.Event()]
    given: dict[str, Any] = {"model": models.serving, "line": line, "spends": spends}
    with ExitStack() as stack:
        # Only the two modes that spend no TTFT slack need no setting in the rollout engine.
        prefilled, decoded = (
            stack.enter_context(live_rollouts(engines_dir / pool, pool, models, stock, gate, **SIZE))
            for pool, gate in (("prefilled", GateMode.TTFT_ONLY), ("decoded", None))
        )
        prefiller = prefilled.fork(
            phase_runs.prefill, **given, pool="prefilled", lets=lets[0], stop=prefilled.stop
        )
        decoder: Phase = decoded.fork(
            phase_runs.decode, **given, pool="decoded", lets=lets, idle=IDLE, spending=[SPENDING]
        ).result()
        num_moves = [prefilled.end(), decoded.end()]
        phases: dict[Deployment, Phase] = {
            Deployment.PREFILL: prefiller.result(),
            Deployment.DECODE: decoder,
        }
    for prompts, replies in zip([IDLE, *[SPENDING] * len(decoder.replies)], decoder.replies, strict=False):
        assert [reply.tokens for reply in replies] == [expected[tuple(one)]["tokens"] for one in prompts]
    assert min(num_moves) > 0
    check_gates(phases)


def check_gates(phases: dict[Deployment, Phase]) -> None:
    kept_ms = {Deployment.PREFILL: (SLO_MS, None), Deployment.DECODE: (None, SLO_MS)}
    longest_s = {Deployment.PREFILL: SLO_MS / 4000, Deployment.DECODE: SLO_MS / 2000}
    modes = {Deployment.PREFILL: GateMode.TTFT_ONLY, Deployment.DECODE: GateMode.DUAL}
    for deployment, phase in phases.items():
        assert (phase.deployment, phase.mode) == (deployment, modes[deployment])
        assert (phase.harm.slo_ttft_ms, phase.harm.slo_tpot_ms) == kept_ms[deployment]
        assert phase.harm.slo_problem is None
        assert phase.longest_idle_step_s == pytest.approx(longest_s[deployment])
        assert phase.num_let_go_first > 0
        kept = [delay.ttft_s <= SLO_MS / 1000 and delay.tpot_s <= SLO_MS / 1000 for delay in phase.delays]
        print(f"{deployment}: {phase.num_let_go_first} rollout steps first, SLO kept {sum(kept)}/{len(kept)}")
        assert sum(kept) > len(kept) / 2
