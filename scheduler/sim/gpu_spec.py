"""The files of the GPU level: a slowdown table, and two pipelines by their engines' logs."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from rose.config import Section, load_yaml
from rose.errors import ConfigError
from rose.scheduler.gpu.slowdown import SlowdownTable
from rose.scheduler.gpu.substages import Iteration, SubStageKind, iteration, read_steps

MEASURE = "measure one there with: rose sched slowdown"


class SlowdownEntry(Section):
    """What `kind` takes beside another, over its time alone: a row by compute, a column by memory."""

    kind: SubStageKind
    beside: SubStageKind
    slowdown: tuple[tuple[float, ...], ...]


class SlowdownFile(Section):
    """What `rose sched slowdown` writes, as JSON."""

    hardware: str
    compute: tuple[float, ...]
    memory: tuple[float, ...]
    entries: tuple[SlowdownEntry, ...]

    @classmethod
    def of(cls, table: SlowdownTable) -> Self:
        entries = tuple(
            SlowdownEntry(kind=kind, beside=beside, slowdown=grid)
            for (kind, beside), grid in table.entries.items()
        )
        return cls(
            hardware=table.hardware,
            compute=tuple(table.compute),
            memory=tuple(table.memory),
            entries=entries,
        )

    def to_table(self) -> SlowdownTable:
        """Raises: ValueError for levels or slowdowns that can't be."""
        return SlowdownTable(
            hardware=self.hardware,
            compute=self.compute,
            memory=self.memory,
            entries={(each.kind, each.beside): each.slowdown for each in self.entries},
        )


class PipelineSpec(Section):
    """One pipeline. `logs`: the last rollout's, of each worker's engine. Seconds: alone on all workers."""

    name: str
    logs: Annotated[tuple[Path, ...], Field(min_length=1)]
    reference_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    train_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    least_memory: dict[SubStageKind, Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=dict)
    """Shares of the GPU's memory, by kind of sub-stage."""


class GpuSpec(Section):
    """Two pipelines on the same GPUs. `hardware`: as the slowdown table has it."""

    hardware: str
    slowdown: Path | None = None
    pipelines: tuple[PipelineSpec, PipelineSpec]

    @model_validator(mode="after")
    def _on_the_same_workers(self) -> Self:
        one, two = (len(each.logs) for each in self.pipelines)
        if one != two:
            raise ValueError(f"pipelines on the same GPUs need as many logs each, got {one} and {two}")
        return self


def load_table(path: Path, hardware: str, *, otherwise: str = MEASURE) -> SlowdownTable:
    """Returns a file's slowdown table, which must be of this hardware.

    otherwise: what to do without it. Raises: ConfigError.
    """
    try:
        table = load_yaml(path, SlowdownFile).to_table()
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; {MEASURE}") from error
    if table.hardware != hardware:
        raise ConfigError(f"{path}: measured on {table.hardware!r}, not on {hardware!r}; {otherwise}")
    return table


def load_iteration(spec: PipelineSpec, path: Path) -> Iteration:
    """Returns the graph of a pipeline's last iteration. Raises: ConfigError for a log without steps."""
    logs = []
    for name in spec.logs:
        log_path = path.parent / name
        try:
            with log_path.open(errors="replace") as lines:
                logs.append(read_steps(lines))
        except OSError as error:
            raise ConfigError(f"{log_path}: can't be read ({error.strerror}); check the path") from error
        if not any(steps.seconds for steps in logs[-1]):
            raise ConfigError(
                f"{log_path}: no steps of a rollout; start the engine with --enable-logging-iteration-details"
            )
    return iteration(logs, reference_s=spec.reference_s, train_s=spec.train_s)
