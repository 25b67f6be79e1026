"""What a worker reports of itself.

Owns: GET /rose/v1/status as far as routing needs it.
Promises: fields it doesn't know are kept and shown.
Never does: ask for it (registry.py).
"""

from pydantic import BaseModel, ConfigDict

from rose.errors import WorkerError
from rose.types import WeightVersion


class GateStatus(BaseModel):
    model_config = ConfigDict(extra="allow")
    mode: str = ""
    admitted_steps: int = 0
    declined_steps: int = 0


class WorkerStatus(BaseModel):
    """GET /rose/v1/status, as far as routing needs it. Unknown fields are kept and shown."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    weight_version: str | None = None
    num_running: int = 0
    num_waiting: int = 0
    pressure: str | None = None
    gate: GateStatus | None = None
    is_active: bool = True
    """False: its weights are off the GPU until the next rollout phase, and it refuses turns."""
    is_updating: bool = False
    """Its weights are being changed: it makes no token meanwhile, and takes no new turn."""
    serving_busy_s: float | None = None
    """Seconds that serving's steps have taken on this GPU so far; None where no serving engine shares it."""
    serving_kv_usage: float | None = None
    """Serving's part of the GPU's KV memory, 0 to 1."""


def parse_version(text: str | None) -> WeightVersion | None:
    """'run/7' -> WeightVersion; None stays None.

    Raises:
        WorkerError: not of the form run/number.
    """
    if text is None:
        return None
    run_id, _, number = text.rpartition("/")
    if not run_id or not number.isdigit():
        raise WorkerError(f"weight version {text!r}: want RUN/NUMBER")
    return WeightVersion(run_id=run_id, number=int(number))
