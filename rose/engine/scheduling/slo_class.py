"""A request's own latency objectives, as its client asks for them.

Owns the names of the two keys in the OpenAI API's ``vllm_xargs``. Never fails a request: a value that makes
no sense is logged and the deployment's SLO counts, for serving a request comes before its class.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from rose.types import SLO

TTFT_KEY = "rose_ttft_ms"
TPOT_KEY = "rose_tpot_ms"

logger = logging.getLogger(__name__)


def requested_slo(extra_args: Mapping[str, Any] | None, deployment: SLO) -> SLO | None:
    """The request's own SLO, the deployment's where it names only one; None where it names none."""
    if not extra_args or not {TTFT_KEY, TPOT_KEY} & extra_args.keys():
        return None
    ttft_s = _seconds(extra_args, TTFT_KEY, deployment.ttft_s)
    tpot_s = _seconds(extra_args, TPOT_KEY, deployment.tpot_s)
    return SLO(ttft_s=ttft_s, tpot_s=tpot_s)


def _seconds(extra_args: Mapping[str, Any], key: str, default_s: float) -> float:
    if key not in extra_args:
        return default_s
    try:
        value_s = float(extra_args[key]) / 1000
    except (TypeError, ValueError):
        value_s = math.nan
    if math.isfinite(value_s) and value_s > 0:
        return value_s
    logger.warning("request SLO ignored %s=%r: need milliseconds above 0", key, extra_args[key])
    return default_s
