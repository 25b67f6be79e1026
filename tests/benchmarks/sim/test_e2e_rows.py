"""The rows of bench_e2e: how they are made from jobs and serving engines."""

from dataclasses import replace

import pytest
from e2e_worlds import even_tape, even_world
from lib.e2e.dollars import saving
from lib.e2e.rows import Row, attainment, markdown, p99_ms
from lib.e2e.worlds import Scale, WorldPool, wire_bytes
from sim.e2e.fleet import ServedLatencies

FEW = Scale(num_tapes=1, tape_s=10, num_steps=2, num_seeds=1)


def test_a_row_keeps_the_papers_number_apart_from_ours() -> None:
    row = Row(name="x[a]", source="Fig. 7a", values=[1.0, 3.0, 2.0], unit="x", paper=1.5, why="because")
    figure = row.figure()
    assert (figure.value, figure.spread, figure.peers, figure.kind) == (
        2.0,
        (1.0, 3.0),
        {"ROSE Fig. 7a": 1.5},
        "simulated",
    )
    text = markdown({"One": [row], "Two": [row, replace(row, name="x[b]")]})
    assert text.count("| Fig. 7a | `x[a]`, x | 1.5 | 2 | 1 to 3 | - | - | 1 |") == 2
    assert text.count("\n1. because\n") == 2 and "2. because" not in text


def test_unanswered_requests_count_in_every_percentile_and_share() -> None:
    world, unanswered = (
        even_world(),
        ServedLatencies(ttfts_s=(float("inf"),) * 2, tpots_s=(float("inf"),) * 2),
    )
    tapes = [even_tape(0.7), replace(even_tape(0.7), latencies=unanswered)]
    assert attainment(world, tapes) == 0.5
    assert p99_ms(tapes, "ttfts_s") == float("inf")
    assert p99_ms(tapes[:1], "ttfts_s") == pytest.approx(200.0)


def test_owned_gpus_that_make_the_job_as_fast_cost_more() -> None:
    with WorldPool() as runner:
        (row,) = saving(runner, even_world(), FEW, seed=1)
    assert row.value > 1.0
    assert row.beside["own rollout GPUs"] == 1.0
    as_fast = row.beside["as fast with"]
    assert as_fast is not None and 1.0 < as_fast <= 5.0


def test_the_chosen_codec_sends_about_a_byte_for_a_changed_element() -> None:
    assert 0.8 < wire_bytes(seed=0) < 1.6
