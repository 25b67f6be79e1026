"""What bench_overhead makes of slices: rare costs count in full."""

import numpy as np
import pytest
from bench_overhead import ROSE, STOCK, Block, _figures, _Slice


def blocks(*, rare_factor: float, rare_share: float) -> list[Block]:
    """Pairs that differ by noise, and on ROSE's side by a factor in a share of the slices and tokens."""
    rng = np.random.default_rng(0)

    def one(factor: float) -> _Slice:
        tpots_s = 0.01 * np.exp(rng.normal(0, 0.05, 16))
        tpots_s *= np.where(rng.random(16) < rare_share, factor, 1)
        seconds = float(np.exp(rng.normal(0, 0.05))) * (factor if rng.random() < rare_share else 1)
        return _Slice(elapsed_s=seconds, cpu_s=seconds, ttfts_s=[0.1], tpots_s=tpots_s.tolist())

    return [[{STOCK: one(1.0), ROSE: one(rare_factor)} for _ in range(2)] for _ in range(100)]


@pytest.mark.slow
def test_rare_costs_are_in_the_figures_that_have_targets() -> None:
    found = {
        figure.name: figure
        for figure in _figures(blocks(rare_factor=1.5, rare_share=0.05), np.random.default_rng(0))
    }
    assert (found["idle_overhead_throughput"].value or 0) > 0.015
    assert (found["idle_overhead_tpot_p99"].value or 0) > 0.2


@pytest.mark.slow
def test_an_engine_that_costs_nothing_is_within_the_interval() -> None:
    for figure in _figures(blocks(rare_factor=1.0, rare_share=0.0), np.random.default_rng(0)):
        assert figure.spread is not None and figure.spread[0] <= 0.0 <= figure.spread[1]


@pytest.mark.slow
def test_the_typical_pair_has_the_interval_that_theory_gives_it_and_ignores_stalls() -> None:
    """For logarithms from a normal distribution, the standard error of the Hodges-Lehmann estimate is that of
    their mean, times the square root of pi / 3 (Hodges and Lehmann, 1963)."""
    num_blocks, sd = 80, 0.05
    rng = np.random.default_rng(0)

    def one(seconds: float) -> _Slice:
        return _Slice(elapsed_s=seconds, cpu_s=seconds, ttfts_s=[seconds], tpots_s=[seconds])

    def pair(number: int) -> dict[str, _Slice]:
        stall = 40.0 if number == 0 else 1.0
        return {STOCK: one(1.0), ROSE: one(stall * float(np.exp(rng.normal(np.log(1.1), sd))))}

    given = [[pair(2 * number), pair(2 * number + 1)] for number in range(num_blocks)]
    peers = _figures(given, rng)[0].peers
    half_width = peers["half_width of typical pair"]
    theory = 1.1 * 1.96 * sd * np.sqrt(np.pi / 3) / np.sqrt(2 * num_blocks)
    assert half_width == pytest.approx(theory, rel=0.2)
    assert peers["typical pair"] == pytest.approx(0.1, abs=2 * theory)
    assert (peers["half_width"] or 0) > 5 * theory
