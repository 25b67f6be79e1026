"""Engines whose data-parallel ranks compute every step together: those with a mixture of experts.

In vLLM a *wave* is the time from the first request of any rank until no rank has one. Owns what follows for
the gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose.types import GateMode

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def in_lockstep(config: VllmConfig) -> bool:
    """Returns whether the engine's ranks compute every step together, each in a pool of its own."""
    return config.parallel_config.data_parallel_size > 1 and bool(config.model_config.is_moe)


def lockstep_problem(config: VllmConfig, mode: GateMode) -> str | None:
    """Returns why such an engine can't have a gate mode, or None if it can."""
    if not in_lockstep(config) or mode in (GateMode.IDLE, GateMode.OFF):
        return None
    return (
        f"gate {mode} lends rollouts the time between two steps, and the other ranks would wait in theirs; "
        f"use gate idle"
    )
