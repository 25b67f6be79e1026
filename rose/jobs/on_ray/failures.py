"""Why an attempt on Ray could not start: a wrong job, which fails for good, or a fault that may pass.

Ray reports an environment (`runtime_env`) that it can't prepare with the output of the program that prepared
it. pip says "no matching distribution" also when it reaches no package index, so signs of a bad network are
looked for before signs of a wrong package. A failure with neither sign is tried again, up to the job's limit.
"""

import math
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.runtime_env import RuntimeEnv

from rose.errors import ConfigError
from rose.jobs.ranks import START_FAILED_STATUS, Ended

ENV_LIMIT_S = 600.0
"""Ray's own limit for an environment, if the job's file names none."""
WORKER_LIMIT_S = 300.0
"""The time in which Ray starts an actor's process on a busy host."""

_PASSING = re.compile(
    r"timed out|\btimeout\b|connecttimeout|readtimeout|connectionerror"
    r"|connection (?:refused|reset|aborted|broken)"
    r"|name resolution|name or service not known|network is unreachable|no route to host"
    r"|max retries exceeded|remote end closed|proxyerror|temporar(?:y|ily)|too many requests"
    r"|\b(?:429|5\d\d) (?:client|server) error|no space left|cannot allocate memory",
    re.IGNORECASE,
)
_WRONG = re.compile(
    r"no matching distribution|could not find a version|resolutionimpossible|conflicting dependencies"
    r"|invalid requirement|does not exist|not a supported wheel|is not a valid|no such file"
    r"|requires a different python|requires-python|packagesnotfounderror|resolvepackagenotfound"
    r"|unsatisfiableerror|\b4(?:01|03|04) client error|not found",
    re.IGNORECASE,
)


def failure(command: Sequence[str], error: Exception) -> Ended:
    """Returns how an attempt ends because of this error: for good, or as a crash that may not come again."""
    if isinstance(error, ray.exceptions.RuntimeEnvSetupError):
        said = f"runtime_env can't be prepared: {reason(error)}"
        if is_passing(error):
            return Ended(exit_status=START_FAILED_STATUS, why=said)
        hint = "mend the job's runtime_env and submit the job again"
        return Ended(exit_status=START_FAILED_STATUS, cannot_start=f"{said}; {hint}")
    is_of_part = isinstance(error, ray.exceptions.RayTaskError)
    if is_of_part and not isinstance(getattr(error, "cause", None), ConfigError):
        return Ended(exit_status=-signal.SIGKILL, why=reason(error))
    return Ended(
        exit_status=START_FAILED_STATUS, cannot_start=f"can't start {list(command)}: {reason(error)}"
    )


def is_passing(error: Exception) -> bool:
    """Returns whether an environment that could not be prepared may be prepared later without a change."""
    if not isinstance(error, ray.exceptions.RuntimeEnvSetupError):
        return False
    text = str(error)
    return bool(_PASSING.search(text)) or not _WRONG.search(text)


def reason(error: Exception) -> str:
    """Returns the line of an error that says most."""
    cause = getattr(error, "cause", None)
    lines = [line.strip() for line in str(cause if cause is not None else error).strip().splitlines()]
    lines = [line for line in lines if line] or [type(error).__name__]
    if not isinstance(error, ray.exceptions.RuntimeEnvSetupError):
        return lines[0]
    for sign in (_PASSING, _WRONG):
        if found := [line for line in lines if sign.search(line)]:
            errors = [line for line in found if "error" in line.lower()]
            return (errors or found)[-1][:400]
    return lines[-1][:400]


def checked_env(runtime_env: dict[str, Any]) -> dict[str, Any]:
    """Returns the environment. Raises: ConfigError if Ray can't understand it, on whatever host."""
    try:
        RuntimeEnv(**runtime_env)
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(
            f"runtime_env: {reason(error)}; mend the job's runtime_env and submit the job again"
        ) from error
    return runtime_env


def env_limit_s(runtime_env: Mapping[str, Any]) -> float:
    """Returns the longest time in which Ray starts an actor in this environment, or says that it can't."""
    config = runtime_env.get("config")
    limit = config.get("setup_timeout_seconds") if isinstance(config, Mapping) else None
    if limit == -1:  # Ray's word for no limit
        return math.inf
    is_known = isinstance(limit, int | float) and limit > 0
    return WORKER_LIMIT_S + (float(limit) if is_known and limit is not None else ENV_LIMIT_S)
