"""The sharing policies that bench_slo compares, and how it prints them.

Owns their names. Runs nothing.
"""

from rich.table import Table

from lib.slo.figures import PolicyRun, mean
from rose.types import GateMode

IDLE = "idle only"
MODES = {
    "naive": GateMode.OFF,
    "alternate": GateMode.ALTERNATE,
    IDLE: GateMode.IDLE,
    "ttft-only": GateMode.TTFT_ONLY,
    "tpot-only": GateMode.TPOT_ONLY,
    "equations": GateMode.EQUATIONS,
    "dual": GateMode.DUAL,
}
FEW = ("naive", "alternate", "dual")
"""Where the others would only repeat what they showed."""


def policy_table(title: str, runs: dict[str, PolicyRun], notes: dict[str, str] | None = None) -> Table:
    """One line per policy; ``notes``: what to say beside it."""
    table = Table(title=title)
    columns = (
        "policy",
        "TTFT P50/P95/P99 ms",
        "TPOT P50/P95/P99 ms",
        "attained ttft/tpot/itl",
        "harvest",
        "of free",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    if notes is not None:
        table.add_column("")
    for name, run in runs.items():
        table.add_row(
            name,
            *(
                " / ".join(f"{1e3 * run.pooled(kind, percent):.1f}" for percent in (50, 95, 99))
                for kind in ("ttft", "tpot")
            ),
            " / ".join(f"{run.attainment(kind):.3f}" for kind in ("ttft", "tpot", "itl")),
            f"{mean(run.harvest):.3f}",
            f"{mean(run.harvest) / mean(run.free):.3f}",
            *([] if notes is None else [notes.get(name, "")]),
        )
    return table
