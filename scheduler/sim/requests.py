"""A serving trace's rows, in the format of the Azure LLM inference traces."""

import csv
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rose.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def load_trace(path: Path) -> list[TraceRow]:
    """Reads an Azure-style CSV (TIMESTAMP, ContextTokens, GeneratedTokens), times from its first row.

    Raises: ConfigError with the file, the line and the column that can't be read.
    """
    rows: list[TraceRow] = []
    first_s: float | None = None
    try:
        with path.open(newline="") as file:
            for line, row in enumerate(csv.DictReader(file), start=2):
                try:
                    at_s = _timestamp_s(row["TIMESTAMP"])
                    prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                except (KeyError, TypeError, ValueError) as error:
                    raise ConfigError(
                        f"{path}:{line}: not a trace row ({error}); "
                        "expected columns TIMESTAMP, ContextTokens, GeneratedTokens"
                    ) from error
                first_s = at_s if first_s is None else first_s
                rows.append(TraceRow(arrival_s=at_s - first_s, prompt_tokens=prompt, output_tokens=output))
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}); check the path") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: not a CSV file ({error})") from error
    if not rows:
        raise ConfigError(f"{path}: the trace has no rows")
    return rows


def _timestamp_s(text: str) -> float:
    """Seconds of "2023-11-16 18:15:46.6805900"; datetime alone reads no seventh decimal."""
    whole, _, fraction = text.partition(".")
    return datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or '0'}")
