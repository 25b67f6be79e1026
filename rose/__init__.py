"""ROSE: RL rollouts in the slack of GPUs that already serve traffic.

Importing this package loads neither torch nor vllm: heavy modules are imported where they are used.
`rose.phase` and `rose.runtime_hook`, the decorators for the functions of an RL loop, are loaded when they are
first named.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rose.scheduler.runtime.job.phase import Progress, phase, runtime_hook

__all__ = ["Progress", "phase", "runtime_hook"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rose' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("rose.scheduler.runtime.job.phase"), name)
