"""ROLL's and verl's real classes have the methods that the working sets call, as they call them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rose.scheduler.runtime.job.cache import HostCache
from rose.trainers.engine_state import RollState, VerlRolloutState, VerlTrainState


@pytest.fixture
def cache(tmp_path: Path) -> HostCache:
    return HostCache(tmp_path, 0, "train of job a")


def test_rolls_clusters_take_the_calls(cache: HostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "roll.distributed.executor.worker", reason="ROLL is on no package index (CONTRIBUTING.md)"
    )
    import ray
    from roll.distributed.executor.worker import Worker
    from roll.distributed.scheduler.decorator import (
        BIND_WORKER_METHOD_FLAG,
        func_generator,
        get_predefined_dispatch_fn,
    )

    calls: list[str] = []
    monkeypatch.setattr(ray, "get", lambda results, timeout=None: results)  # no actors: no Ray is started

    class Strategy:
        """Where ROLL's own worker hands the calls on to."""

        def load_states(self) -> None:
            calls.append("load")

        def offload_states(self) -> None:
            calls.append("offload")

    worker = Worker.__new__(Worker)
    worker.strategy = Strategy()

    class Cluster:
        """With its methods made by ROLL, as its own cluster of Ray actors has them."""

        world_size = 1

        def __init__(self) -> None:
            for name in ("load_states", "offload_states"):
                mode = getattr(getattr(Worker, name), BIND_WORKER_METHOD_FLAG)["dispatch_mode"]
                found = get_predefined_dispatch_fn(dispatch_mode=mode)
                made = func_generator(self, name, found["dispatch_fn"], found["collect_fn"], self.execute)
                setattr(self, name, made)

        def execute(self, name: str, *args: Any, **kwargs: Any) -> Any:
            return [getattr(worker, name)()]

    cluster: Any = Cluster()  # makes its methods as it is made
    state = RollState(cluster)
    state.load(cache)
    state.offload(cache)
    assert calls == ["load", "offload"]


def test_verls_training_workers_take_the_calls(cache: HostCache) -> None:
    pytest.importorskip("verl.workers.engine_workers", reason="verl is not installed (CONTRIBUTING.md)")
    from verl.workers.engine_workers import TrainingWorker

    calls: list[tuple[str, Any]] = []

    class Engine:
        """Where verl's own worker hands the call on to."""

        def to(self, **asked: Any) -> None:
            calls.append(("to", asked))

    worker = TrainingWorker.__new__(TrainingWorker)
    worker.engine = Engine()
    state = VerlTrainState(worker)
    state.load(cache)
    state.offload(cache)
    assert [asked["device"] for _, asked in calls][1] == "cpu"
    assert all(asked["model"] and asked["optimizer"] and asked["grad"] for _, asked in calls)


def test_verls_replicas_wake_and_sleep_their_servers(cache: HostCache) -> None:
    pytest.importorskip("verl.workers.rollout.replica", reason="verl is not installed (CONTRIBUTING.md)")
    from verl.workers.rollout.replica import RolloutReplica

    calls: list[str] = []

    class Method:
        """A server's, as Ray hands it out."""

        def __init__(self, name: str) -> None:
            self.name = name

        def remote(self) -> Any:
            async def call() -> None:
                await asyncio.sleep(0)
                calls.append(self.name)

            return call()

    class Server:
        wake_up, sleep = Method("wake_up"), Method("sleep")

    class Replica(RolloutReplica):
        def __init__(self) -> None:
            self.servers = [Server(), Server()]

        def get_ray_class_with_init_args(self) -> Any: ...

        async def launch_servers(self) -> None: ...

    state = VerlRolloutState([Replica(), Replica()])
    state.load(cache)
    state.offload(cache)
    assert calls == ["wake_up"] * 4 + ["sleep"] * 4
