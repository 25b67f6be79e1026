"""The Ray cluster that the tests of this folder share."""

from collections.abc import Iterator

import pytest
from lib.cluster.ray_rig import RayRig


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayRig]:
    rig = RayRig(tmp_path_factory.mktemp("run"), num_workers=3)
    try:
        yield rig
    finally:
        rig.cluster.shutdown()
