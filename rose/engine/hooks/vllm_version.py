"""Which vLLM is installed, and what it offers to plugins. At its top it imports the standard library
alone."""

from importlib.util import find_spec

SUPPORTED = ((0, 30), (0, 33))
"""The first and last minor version of vLLM whose hook points were read. The tests run on 0.32."""


def vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def is_supported(version: str) -> bool:
    major_minor = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return len(major_minor) == 2 and SUPPORTED[0] <= major_minor <= SUPPORTED[1]


def supported_range() -> str:
    low, high = SUPPORTED
    return f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"


def has_sleep_backends() -> bool:
    """Returns whether this vLLM lets plugins free and restore the memory of an engine's weights."""
    return find_spec("vllm.device_allocator.sleep_mode_backend") is not None
