"""Draws random raw bits of every width, before and after a change."""

from typing import Any

import numpy as np

from rose.transfer.format.codec import Bits

Width = type[np.unsignedinteger[Any]]
WIDTHS: list[Width] = [np.uint8, np.uint16, np.uint32]


def random_bits(rng: np.random.Generator, width: Width, size: int) -> Bits:
    """Returns a vector in which every bit pattern is equally likely."""
    return rng.integers(0, np.iinfo(width).max, size, np.uint32, endpoint=True).astype(width)


def changed_bits(rng: np.random.Generator, width: Width, size: int, density: float) -> tuple[Bits, Bits]:
    """Returns two vectors; about this share of the second one's elements was drawn anew."""
    old = random_bits(rng, width, size)
    return old, np.where(rng.random(size) < density, random_bits(rng, width, size), old)
