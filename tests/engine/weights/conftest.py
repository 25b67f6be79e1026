"""The mirror that an engine's weights follow."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from mirrored import Mirrored


@pytest.fixture
def mirrored(tmp_path: Path) -> Iterator[Mirrored]:
    made = Mirrored(tmp_path / "mirror")
    yield made
    made.close()
