"""Waiting for a condition instead of for a time."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], at_most_s: float = 300.0) -> None:
    async with asyncio.timeout(at_most_s):
        while not condition():
            await asyncio.sleep(0.01)
