"""Which vLLM is installed, what it offers to plugins, and whether an engine's processes have the same one.

At its top it imports the standard library and what needs no more.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import rose
from rose.errors import ConfigError

SUPPORTED = ((0, 30), (0, 33))
"""The first and last minor version of vLLM whose hook points were read. The tests run on 0.32."""

VERSIONS_KEY = "rose_versions"
"""In ``additional_config``: the versions of the process that configured the engine."""


def vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def is_supported(version: str) -> bool:
    major_minor = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return len(major_minor) == 2 and SUPPORTED[0] <= major_minor <= SUPPORTED[1]


def supported_range() -> str:
    low, high = SUPPORTED
    return f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"


def lacks(what: str) -> ConfigError:
    """Returns the error for a vLLM that lacks a class, method or argument that ROSE uses."""
    return ConfigError(f"vLLM has no {what}, which rose needs; install vllm {supported_range()}")


def has_sleep_backends() -> bool:
    """Returns whether this vLLM lets plugins free and restore the memory of an engine's weights."""
    return find_spec("vllm.device_allocator.sleep_mode_backend") is not None


def versions() -> str:
    """Returns the versions that all processes of an engine must have in common."""
    return f"vllm {vllm_version()} and rose {rose.__version__}"


def check_versions(additional_config: Mapping[str, Any], process: str) -> None:
    """Refuses a process of an engine that runs another vLLM or ROSE than the one that configured the engine.

    Raises: ConfigError.
    """
    configured = additional_config.get(VERSIONS_KEY, "another version of rose")
    if configured != versions():
        raise ConfigError(
            f"{process} runs {versions()}, and the engine was configured by a process with {configured}; "
            f"give all ranks of an engine one environment with one version of each, and start it again"
        )
