"""The page of `rose top`, from statuses as engines send them."""

import io
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from rose._shm import Words
from rose.admission import board, board_snapshot
from rose.admission.board import NUM_WORDS
from rose.admission.board_snapshot import snapshot
from rose.admission.gate import GateReason, ServingView
from rose.admission.rollout_side import RolloutSide
from rose.admission.serving_side import ServingSide
from rose.config import Settings
from rose.memory.daemon.daemon import start_daemon
from rose.memory.pool.pool import PoolClient
from rose.memory.pool.wire import Kind
from rose.messages import HarmEstimate, HarmStatus, HarmWindow, Harvest, WorkerStatus
from rose.node.pages.grants import BoardReadings, grants_page
from rose.node.pages.pools import PoolSample, pools_page, sample_pools
from rose.node.top import WorkerSample, main, status_page
from rose.types import Deployment, GateMode, Role

STATUS = WorkerStatus.model_validate(
    {name: 0 for name, field in WorkerStatus.model_fields.items() if field.is_required()}
    | {
        "role": "rollout",
        "model": "/models/policy",
        "engine_id": "e",
        "weight_version": "lake/7",
        "num_running": 3,
        "num_waiting": 2,
        "kv_slabs_owned": 40,
        "kv_slabs_budget": 64,
        "pressure": "pressure",
        "gate": {"mode": "dual", "admitted_steps": 1, "declined_steps": 3},
        "reclaimed_requests": 4,
        "stalled_requests": 1,
        "generated_tokens": 1000,
        "is_active": True,
    }
)


def render(samples: list[WorkerSample], before: dict[str, WorkerSample]) -> str:
    return printed(status_page(samples, before))


def printed(page: RenderableType, width: int = 80) -> str:
    terminal = io.StringIO()
    Console(width=width, file=terminal).print(page)
    return terminal.getvalue()


def sample(taken_at_s: float, tokens: int) -> WorkerSample:
    status = STATUS.model_copy(update={"generated_tokens": tokens})
    return WorkerSample(worker="http://127.0.0.1:8001", taken_at_s=taken_at_s, status=status)


def test_data_parallel_ranks_have_a_row_each() -> None:
    ranks = [STATUS.model_copy(update={"num_running": number}) for number in (7, 8)]
    whole = sample(1.0, 0)
    assert whole.status is not None
    text = render([replace(whole, status=whole.status.model_copy(update={"ranks": ranks}))], {})
    assert text.index("3+2") < text.index("rank 0") < text.index("7+2") < text.index("rank 1")
    assert "7+2" in text and "8+2" in text


@pytest.mark.parametrize(
    "cell",
    ["127.0.0.1:8001", "rollout", "lake/7", "3+2", "40/64", "pressure", "dual 25%", " 5 ", " 300"],
)
def test_a_row_shows_what_the_engine_says(cell: str) -> None:
    earlier = sample(taken_at_s=10.0, tokens=1000)
    assert cell in render([sample(taken_at_s=12.0, tokens=1600)], {earlier.worker: earlier})


def test_half_of_a_disaggregated_deployment_shows_as_such() -> None:
    for deployment, cell in ((Deployment.COLLOCATED, "serving"), (Deployment.DECODE, "decode")):
        status = STATUS.model_copy(update={"role": Role.SERVING, "deployment": deployment})
        assert f" {cell} " in render([WorkerSample(worker="http://x:1", taken_at_s=0.0, status=status)], {})


def test_slabs_in_quarantine_are_shown() -> None:
    status = STATUS.model_copy(update={"pool_slabs_quarantined": 7})
    page = render([WorkerSample(worker="http://127.0.0.1:8001", taken_at_s=0.0, status=status)], {})
    assert "http://127.0.0.1:8001: 7 slabs of its pool in quarantine" in page
    assert "quarantine" not in render([sample(0.0, 0)], {})


def test_an_adapter_that_could_not_be_loaded_is_shown_with_the_reason() -> None:
    status = STATUS.model_copy(update={"adapter_problems": ["math/4: no room for math/4"]})
    page = render([WorkerSample(worker="http://127.0.0.1:8001", taken_at_s=0.0, status=status)], {})
    assert "http://127.0.0.1:8001: adapter not loaded: math/4: no room for math/4" in page
    assert "adapter" not in render([sample(0.0, 0)], {})


def test_a_drafter_that_was_not_updated_is_shown_with_the_reason() -> None:
    status = STATUS.model_copy(update={"stale_drafter": "the run has no tensors for it"})
    page = render([WorkerSample(worker="http://127.0.0.1:8001", taken_at_s=0.0, status=status)], {})
    assert "http://127.0.0.1:8001: drafter not updated: the run has no tensors for it" in page
    assert "drafter" not in render([sample(0.0, 0)], {})


def test_a_serving_engine_has_the_short_form_of_its_harm() -> None:
    window = HarmWindow(
        gate=GateMode.IDLE,
        ended_at_s=0,
        seconds=60,
        num_requests=100,
        requests_s=60,
        num_closed_slices=15,
        latencies={"ttft_p99": HarmEstimate(value=0.01, low=0.0, high=0.015)},
        with_rollouts_ms={"ttft_p99": 214},
        without_rollouts_ms={"ttft_p99": 212},
        harvest=Harvest(seconds=60, tokens=6000, rollout_s=30, serving_s=10),
    )
    harm = HarmStatus(
        gate=GateMode.IDLE,
        allow_harm=0.02,
        is_bounded=True,
        closed_share=0.05,
        is_retreating=False,
        hour=window,
    )
    status = STATUS.model_copy(update={"role": Role.SERVING, "harm": harm})
    page = " ".join(render([WorkerSample(worker="http://x:1", taken_at_s=0.0, status=status)], {}).split())
    assert "http://x:1: TTFT P99 was 212 ms, is 214 ms; rollouts earned 100 tok/s. Within the bound" in page


def test_a_restarted_engine_has_no_rate() -> None:
    earlier = sample(taken_at_s=10.0, tokens=1000)
    assert render([sample(taken_at_s=12.0, tokens=5)], {earlier.worker: earlier}).rstrip().endswith(" -")


def test_a_worker_without_answer_leaves_the_others_visible() -> None:
    page = render([WorkerSample(worker="http://x:1", taken_at_s=0.0, error="refused"), sample(0.0, 0)], {})
    assert "http://x:1: refused" in page and "lake/7" in page


def test_a_deactivated_engine_shows_as_such() -> None:
    status = STATUS.model_copy(update={"is_active": False})
    page = render([WorkerSample(worker="http://x:1", taken_at_s=0.0, status=status)], {})
    assert "inactive" in page and "dual" not in page


def test_the_pools_of_this_host_are_shown_beside_the_engines(runtime_dir: Path) -> None:
    settings = Settings.from_environment()
    daemon = start_daemon("topped", num_slabs=12, slab_bytes=2 << 20, headroom_slabs=2)
    try:
        attached = PoolClient.attach("topped", role=Role.ROLLOUT, engine_id="e", kind=Kind.SCHEDULER)
        with attached as engine:
            engine.ledger.begin_rl_step(1, 7)
            engine.ledger.acquire(engine.slot, 3)
            (sample,) = sample_pools(settings)
            # slabs, free, serving, rollout, draining, budget, pressure
            assert sample.cells[:7] == ("12", "9", "0", "3", "0", "7", "normal")
            assert "topped" in printed(pools_page([sample]), width=100)
            assert sample.board is not None and sample.board.serving.pid == 0
            assert main(["--once"]) == 0
    finally:
        daemon.stop()


def test_the_page_shows_who_computes_and_why_rollouts_wait() -> None:
    words = Words(bytearray(8 * NUM_WORDS))
    serving, rollout = ServingSide(words), RolloutSide(words)
    before = replace(snapshot(words), taken_s=100.0)
    assert rollout.try_begin(time.monotonic() + 1.0, rollout.view())
    rollout.end_step(90)
    for reason, count in ((GateReason.NO_SLACK, 6), (GateReason.SAVING, 3), (GateReason.NOTHING_TO_RUN, 50)):
        for _ in range(count):
            rollout.decline(rollout.view(), reason)
    serving.publish(ServingView(has_work=True, has_pending_prefill=False, latest_start_s=101.542))
    rollout.count_stalls(4)
    now = replace(
        snapshot(words),
        taken_s=101.5,
        servings=(replace(before.servings[0], busy_s=before.servings[0].busy_s + 0.45),),
    )
    (row,) = rows({"gpu0": BoardReadings(now=now, before=before)})
    for cell in ("gpu0 ", " 30% ", " 42 ms ", " 60 ", " 10% ", " no_slack 60%, saving 30% ", " 4"):
        assert cell in row
    first = rows(
        {"gpu0": BoardReadings(now=before, before=None), "gpu1": BoardReadings(now=now, before=None)}
    )
    assert " 10% " in first[1] and "30%  " not in first[0] and " 60  " not in first[1]
    (row,) = rows(
        {"gpu0": BoardReadings(now=replace(now, serving=replace(now.serving, alive=False)), before=before)}
    )
    assert " dead " in row and " ms" not in row
    pending = replace(now, has_pending_prefill=True, rollout=replace(now.rollout, alive=False))
    (row,) = rows({"gpu0": BoardReadings(now=pending, before=before)})
    assert " dead " in row and " prefill " in row
    nobody = replace(before.serving, alive=False, pid=0)
    (row,) = rows({"gpu0": BoardReadings(now=replace(pending, serving=nobody), before=before)})
    assert " none " in row and " dead " in row
    assert printed(grants_page({})).strip() == ""


def test_every_engine_and_guest_has_a_row_where_more_than_two_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    identities = iter(range(1, 9))
    monkeypatch.setattr(board, "own_identity", lambda: next(identities))
    for module in ("board", "board_snapshot", "rollout_side"):
        monkeypatch.setattr(f"rose.admission.{module}.is_alive", bool)
    words = Words(bytearray(8 * NUM_WORDS))
    ServingSide(words)
    guests = [RolloutSide(words) for _ in range(2)]
    monkeypatch.setattr(board_snapshot, "is_alive", lambda identity: identity != 2)
    before = replace(snapshot(words), taken_s=100.0)
    for _ in range(4):
        assert guests[1].try_begin(time.monotonic() + 1.0, guests[1].view())
        guests[1].end_step(1)
    now = replace(snapshot(words), taken_s=102.0)
    parties = rows({"gpu0": BoardReadings(now=now, before=before)})[2:]
    assert [row.split()[:5] for row in parties] == [
        ["gpu0", "serving", "0", "1", "0%"],
        ["gpu0", "guest", "0", "2", "dead"],
        ["gpu0", "guest", "1", "3", "0%"],
    ]
    assert parties[2].split()[-1] == "2"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_of_any_width_shows_every_heading_and_value(width: int) -> None:
    cells = ("4096", "392", "2048", "1200", "16", "3000", "pressure", "9", "987654", "9")
    words = Words(bytearray(8 * NUM_WORDS))
    status = STATUS.model_copy(update={"weight_version": "frozenlake-4x4-slippery/1234"})
    engine = WorkerSample(worker="http://rollouts.example.com:8001", taken_at_s=0.0, status=status)
    pages = (
        status_page([engine], {}),
        pools_page([PoolSample(name="gpu0-of-host-7", cells=cells)]),
        grants_page({"gpu0-of-host-7": BoardReadings(now=snapshot(words), before=None)}),
    )
    text = "".join(printed(page, width) for page in pages).replace("\N{NO-BREAK SPACE}", " ")
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    for shown in (
        *("rollouts.example.com:8001", "frozenlake-4x4-slippery/1234", "gate", "dual 25%", "tok/s"),
        *("gpu0-of-host-7", "reclaimed", "987654", "leases", "pressure", "stalls"),
    ):
        assert shown in text


def rows(boards: dict[str, BoardReadings]) -> list[str]:
    return printed(grants_page(boards), width=100).splitlines()[1:]


def test_a_pool_whose_daemon_is_gone_shows_as_such(runtime_dir: Path) -> None:
    (runtime_dir / "pool-gone.sock").touch()
    (sample,) = sample_pools(Settings.from_environment())
    assert sample.error is not None
    assert "gone: pool gone has no daemon" in printed(pools_page([sample]), width=300)
    assert main(["--once"]) == 1
