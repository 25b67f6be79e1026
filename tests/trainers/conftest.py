"""A router for these tests as well."""

from tests.scheduler.rollout.conftest import start_router

__all__ = ["start_router"]
