"""The Ray cluster that the tests of this folder share."""

from collections.abc import Iterator

import pytest
from lib.cluster.ray_rig import RayRig

from rose.jobs.on_ray.cluster import LIMIT_SETTING
from tests.jobs.on_ray.ray_rig import HEADLESS_S


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayRig]:
    settings = {LIMIT_SETTING: HEADLESS_S}
    rig = RayRig(tmp_path_factory.mktemp("run"), num_workers=3, settings=settings)
    try:
        yield rig
    finally:
        rig.cluster.shutdown()
