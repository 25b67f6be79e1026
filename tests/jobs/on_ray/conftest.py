"""The Ray cluster that the tests of this folder share."""

import os
import sys
from collections.abc import Iterator

import pytest

from tests.jobs.on_ray.ray_rig import RayRig


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayRig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROSE_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))  # Ray's workers inherit it
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        rig = RayRig()
        try:
            yield rig
        finally:
            rig.cluster.shutdown()
