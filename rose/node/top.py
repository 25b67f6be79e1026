"""`rose top`: live tables of running engines, of this host's pools, of who computes on their GPUs, and of a
router's jobs.

A worker or router that does not answer is shown with the reason, and the view goes on. `rose top` changes
nothing on a worker, in a pool or at a router.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from rose.admission.board_snapshot import BoardSnapshot
from rose.arguments import CommandParser, positive_seconds, run_command
from rose.config import Settings
from rose.http import http_client, reason_of, url_argument
from rose.messages import WorkerStatus
from rose.node.control import urls_on_this_host
from rose.node.harm import harm_line
from rose.node.pages.fitted_table import FittedTable
from rose.node.pages.grants import BoardReadings, grants_page
from rose.node.pages.jobs import JobsSample, jobs_page, sample_jobs
from rose.node.pages.pools import PoolSample, pools_page, sample_pools
from rose.node.signals import StopOnSignals
from rose.types import Deployment

REQUEST_TIMEOUT_S = 10.0
COLUMNS = ("worker", "role", "weights", "queue", "slabs", "pressure", "gate", "lost", "tok/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSample:
    """One worker's answer: its status, or the reason why there is none."""

    worker: str
    taken_at_s: float
    status: WorkerStatus | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Readings:
    """What is shown at one moment."""

    workers: Sequence[WorkerSample]
    pools: Sequence[PoolSample]
    jobs: Sequence[JobsSample]

    @property
    def is_empty(self) -> bool:
        return not (self.workers or self.pools or self.jobs)

    @property
    def has_answer(self) -> bool:
        errors = [worker.error for worker in self.workers] + [pool.error for pool in self.pools]
        return None in [*errors, *(each.error for each in self.jobs)]


_NOTHING = _Readings(workers=(), pools=(), jobs=())


def main(argv: Sequence[str]) -> int:
    """Refreshes until a signal comes. With --once it prints the tables, and returns 1 if nothing answered."""
    parser = _parser()
    arguments = parser.parse_args(list(argv))
    settings = Settings.from_environment()
    console = Console()
    with (
        http_client(key=settings.key, timeout=REQUEST_TIMEOUT_S, ca=settings.tls_ca) as engines,
        http_client(key=settings.admin_key, timeout=REQUEST_TIMEOUT_S, ca=settings.tls_ca) as routers,
    ):

        def read() -> _Readings:
            return _Readings(
                workers=_take_samples(engines, arguments.worker, settings),
                pools=sample_pools(settings),
                jobs=[sample_jobs(routers, router) for router in arguments.router],
            )

        readings = read()
        if readings.is_empty:
            parser.error(
                f"no engine and no pool in {settings.runtime_dir}; name engines with --worker URL or routers "
                "with --router URL, or start a pool"
            )
        page = _page(readings, _NOTHING)
        if arguments.once:
            console.print(page)
            return int(not readings.has_answer)
        with StopOnSignals(), Live(page, console=console, screen=console.is_terminal) as live:
            while True:
                time.sleep(arguments.interval_s)
                before, readings = readings, read()
                live.update(_page(readings, before), refresh=True)
    return 0


def _page(now: _Readings, before: _Readings) -> RenderableType:
    pools_before = {pool.name: pool for pool in before.pools}
    boards = {
        pool.name: BoardReadings(now=pool.board, before=_board_before(pool.name, pools_before))
        for pool in now.pools
        if pool.board is not None
    }
    return Group(
        status_page(now.workers, {sample.worker: sample for sample in before.workers}),
        pools_page(now.pools),
        grants_page(boards),
        jobs_page(now.jobs, {sample.router: sample for sample in before.jobs}),
    )


def _board_before(name: str, pools_before: Mapping[str, PoolSample]) -> BoardSnapshot | None:
    return pools_before[name].board if name in pools_before else None


def _take_samples(client: httpx.Client, workers: Sequence[str], settings: Settings) -> list[WorkerSample]:
    """Asks the workers that were named, or else all engines of this host."""
    return [take_sample(client, worker) for worker in workers or urls_on_this_host(settings)]


def take_sample(client: httpx.Client, worker: str) -> WorkerSample:
    """Asks one worker for its status."""
    now = time.monotonic()
    try:
        answer = client.get(f"{worker.rstrip('/')}/rose/v1/status")
        answer.raise_for_status()
        return WorkerSample(
            worker=worker, taken_at_s=now, status=WorkerStatus.model_validate_json(answer.content)
        )
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        hint = {401: "; set ROSE_KEY", 403: "; set ROSE_KEY", 404: ": not a ROSE engine"}.get(code, "")
        return WorkerSample(worker=worker, taken_at_s=now, error=f"status {code}{hint}")
    except ValidationError:
        return WorkerSample(
            worker=worker, taken_at_s=now, error="its answer is not the status of a ROSE engine"
        )
    except httpx.HTTPError as error:
        return WorkerSample(worker=worker, taken_at_s=now, error=reason_of(error))


def status_page(samples: Sequence[WorkerSample], before: Mapping[str, WorkerSample]) -> RenderableType:
    """Returns one row per engine, one per data-parallel rank below it, and one line per worker that didn't
    answer; rates are relative to ``before``.

    role: prefill or decode for a serving engine that computes one of them alone. queue: running and waiting
    requests. slabs: owned, of the budget. gate: its mode and the share of steps that it admitted, or that the
    engine is inactive. lost: requests that ROSE reclaimed or reported as stalled.
    Below the table are slabs of dead engines whose last process has not ended yet, versions of LoRA adapters
    that could not be loaded, drafters that were not updated with their model, and what rollouts cost each
    serving engine and earned on it.
    """
    rows = []
    lines = [Text(f"{each.worker}: {each.error}", style="red") for each in samples if each.status is None]
    for sample in samples:
        if sample.status is not None:
            rate = _rate(sample, before.get(sample.worker))
            rows.append([urlsplit(sample.worker).netloc, *_row(sample.status), rate])
            ranks = enumerate(sample.status.ranks)
            rows += [[f"  rank {rank}", *_row(status), "-"] for rank, status in ranks]
            if quarantined := sample.status.pool_slabs_quarantined:
                lines.append(Text(f"{sample.worker}: {quarantined} slabs of its pool in quarantine"))
            for problem in sample.status.adapter_problems:
                lines.append(Text(f"{sample.worker}: adapter not loaded: {problem}", style="red"))
            if stale := sample.status.stale_drafter:
                lines.append(Text(f"{sample.worker}: drafter not updated: {stale}", style="red"))
            if sample.status.harm is not None:
                lines.append(Text(f"{sample.worker}: {harm_line(sample.status.harm)}"))
    table = [FittedTable(COLUMNS, rows, left=("role",), title="rose top")] if rows else []
    return Group(*table, *lines)


def _row(status: WorkerStatus) -> list[str]:
    steps = status.gate.admitted_steps + status.gate.declined_steps
    share = f" {status.gate.admitted_steps / steps:.0%}" if steps else ""
    is_half = status.deployment in (Deployment.PREFILL, Deployment.DECODE)
    return [
        str(status.deployment) if is_half else status.role,
        status.weight_version if status.weight_version is not None else "-",
        f"{status.num_running}+{status.num_waiting}",
        f"{status.kv_slabs_owned}/{status.kv_slabs_budget}",
        status.pressure,
        f"{status.gate.mode}{share}" if status.is_active else "inactive",
        str(status.reclaimed_requests + status.stalled_requests),
    ]


def _rate(sample: WorkerSample, before: WorkerSample | None) -> str:
    if before is None or before.status is None or sample.status is None:
        return "-"
    tokens = sample.status.generated_tokens - before.status.generated_tokens
    elapsed_s = sample.taken_at_s - before.taken_at_s
    return f"{tokens / elapsed_s:.0f}" if elapsed_s > 0 and tokens >= 0 else "-"


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose top",
        "Shows engines (load, slabs, pressure, gate, weights), this host's pools, who computes on their "
        "GPUs, and the jobs of routers, until Ctrl-C.",
        "rose top --worker http://127.0.0.1:8000 --router http://127.0.0.1:8100",
    )
    parser.add_argument(
        "--worker",
        type=url_argument,
        action="append",
        default=[],
        metavar="URL",
        help="an engine; may be repeated (default: all of this host)",
    )
    parser.add_argument(
        "--router",
        type=url_argument,
        action="append",
        default=[],
        metavar="URL",
        help="a router whose jobs are shown, asked with the admin key; may be repeated",
    )
    parser.add_argument(
        "--interval-s", type=positive_seconds, default=1.0, help="seconds between refreshes (default 1)"
    )
    parser.add_argument("--once", action="store_true", help="print the tables and end")
    return parser


if __name__ == "__main__":
    sys.exit(run_command("top", main, sys.argv[1:]))
