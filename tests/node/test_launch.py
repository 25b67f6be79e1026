"""From an engine's configuration to command lines."""

import json
import os
import sys
import tempfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from rose.config import Settings
from rose.errors import ConfigError
from rose.node import launch
from rose.node.node_config import EngineConfig, NodeConfig, PoolConfig
from rose.ports import free_port
from rose.transfer.follow.shared_mirror import SharedMirror
from rose.types import Role

PATIENCE_S = 300.0
"""For what takes milliseconds, on a machine that is busy with something else."""


def engine(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"model": "m", "role": Role.ROLLOUT, "port": 8001, "pool": "g", **changes})


def additional_config(argv: list[str]) -> dict[str, Any]:
    assert argv.count("--additional-config") == 1
    config = json.loads(argv[argv.index("--additional-config") + 1])
    assert isinstance(config, dict)
    return config


def test_engine_gets_the_plugin_settings_and_its_own_flags() -> None:
    server = launch.engine_process(engine(vllm_args=("--max-model-len", "64"), lease_s=5), log_path=None)
    assert additional_config(server.argv) == {"rose": {"role": "rollout", "pool": "g", "lease_s": 5.0}}
    assert server.argv[-2:] == ["--max-model-len", "64"]


@pytest.mark.parametrize(
    "flags", [("--additional-config", '{"a": 1, "rose": {"stall_s": 3}}'), ('--additional-config={"a": 1}',)]
)
def test_the_users_additional_config_is_merged(flags: tuple[str, ...]) -> None:
    config = additional_config(launch.engine_process(engine(vllm_args=flags), log_path=None).argv)
    assert config["a"] == 1 and config["rose"]["role"] == "rollout"


@pytest.mark.parametrize("text", ["{", "[]", '{"rose": 1}'])
def test_a_bad_additional_config_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--additional-config"):
        launch.engine_process(engine(vllm_args=("--additional-config", text)), log_path=None)


def test_the_staging_folder_of_an_engine_stays_if_another_subscriber_has_it(tmp_path: Path) -> None:
    """As when the engine of a node was started again by hand, and the node ends."""
    settings = Settings.from_environment({"ROSE_RUNTIME_DIR": str(tmp_path)})
    one = engine(port=free_port())
    folder = launch.make_staging_dir(one, settings)
    mirror = SharedMirror(folder)
    launch.remove_staging_dir(one, settings)
    assert folder.is_dir()
    mirror.close()
    for _ in range(2):
        launch.remove_staging_dir(one, settings)
        assert not folder.exists()


def test_engines_that_take_weights_over_a_relay_get_a_subscriber(tmp_path: Path) -> None:
    settings = Settings.from_environment({"ROSE_RUNTIME_DIR": str(tmp_path)})
    assert launch.subscriber_processes([engine()], settings, None) == []
    relay = {"relay": "embedded://127.0.0.1:1", "staging": str(tmp_path / "staging")}
    for takes in ({}, {"role": Role.SERVING, "takes_weights": True}):
        (subscriber,) = launch.subscriber_processes([engine(run="r", **takes, **relay)], settings, None)
        assert subscriber.argv[-2:] == ["--run", "r"]
        argv = launch.engine_process(engine(run="r", **takes, **relay), log_path=None).argv
        assert additional_config(argv)["rose"]["has_subscriber"] is True
    with pytest.raises(ValueError, match="a serving engine follows one only with takes_weights true"):
        engine(role=Role.SERVING, **relay)
    assert (tmp_path / "staging").is_dir()


def test_engines_that_follow_the_same_adapters_share_a_subscriber_of_these_alone(tmp_path: Path) -> None:
    settings = Settings.from_environment({"ROSE_RUNTIME_DIR": str(tmp_path)})
    lora = {
        "relay": "embedded://127.0.0.1:1",
        "staging": str(tmp_path / "staging"),
        "adapters": ("math", "code"),
        "vllm_args": ("--enable-lora",),
    }
    engines = [engine(port=8001, **lora), engine(port=8002, **lora)]
    (subscriber,) = launch.subscriber_processes(engines, settings, tmp_path)
    assert subscriber.argv[2] == "rose.transfer.adapters.subscriber"
    assert subscriber.argv[-8:] == [
        *("--adapter", "math", "--adapter", "code"),
        *("--worker", "http://127.0.0.1:8001", "--worker", "http://127.0.0.1:8002"),
    ]
    both = launch.subscriber_processes([engine(run="r", **lora)], settings, tmp_path)
    assert [each.argv[2].split(".")[2] for each in both] == ["follow", "adapters"]
    with pytest.raises(ValueError, match="adapter math: vLLM holds adapters only with --enable-lora"):
        engine(**{**lora, "vllm_args": ()})
    with pytest.raises(ValueError, match="adapter math needs a relay that brings it"):
        engine(**{**lora, "relay": None})


def test_the_pools_daemon_is_told_the_models_and_the_sizes_that_were_given() -> None:
    chosen = launch.pool_process(PoolConfig(name="g"), ["chat", "policy"], None).argv[3:]
    assert chosen == ["g", "--num-shards", "1", "--model", "chat", "--model", "policy"]
    sizes = {"num_slabs": 8, "slab_bytes": 4096, "headroom_slabs": 0}
    given = PoolConfig.model_validate({"name": "g", **sizes, "backend": "cuda"})
    argv = launch.pool_process(given, [], None).argv
    assert argv[4:10] == ["--num-slabs", "8", "--slab-bytes", "4096", "--headroom-slabs", "0"]
    assert argv[-2:] == ["--backend", "cuda"]


def test_a_node_has_a_pool_for_each_data_parallel_rank_on_the_ranks_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    replicated = {"model": "m", "role": "serving", "port": 1, "vllm_args": ["-dp", "2"]}
    alone = {"model": "m", "role": "rollout", "port": 2}
    pool = {"name": "gpu", "num_shards": 2}
    node = NodeConfig.model_validate({"pool": pool, "engines": [alone, replicated]})
    first, second = launch.pool_processes(node, tmp_path)
    assert (first.name, second.name) == ("pool-gpu", "pool-gpu-1")
    assert "gpu-1" in second.argv and "gpu-1" not in first.argv
    assert [one._env["CUDA_VISIBLE_DEVICES"] for one in (first, second)] == ["4,5", "6,7"]
    assert node.engines[1].pools == ("gpu", "gpu-1") and node.engines[0].pools == ("gpu",)


def test_engines_of_a_host_that_follow_the_same_weights_share_a_subscriber(tmp_path: Path) -> None:
    settings = Settings.from_environment({"ROSE_RUNTIME_DIR": str(tmp_path)})
    relay = {"relay": "embedded://127.0.0.1:1", "staging": str(tmp_path / "staging")}
    engines = [
        engine(port=8001, run="r", **relay),
        engine(port=8002, run="s", **relay),
        engine(port=8003, run="r", **relay),
        engine(port=8004, role=Role.SERVING),
    ]
    first, second = launch.subscriber_processes(engines, settings, tmp_path)
    workers = [word for word in first.argv if word.startswith("http://")]
    assert workers == ["http://127.0.0.1:8001", "http://127.0.0.1:8003"]
    assert [word for word in second.argv if word.startswith("http://")] == ["http://127.0.0.1:8002"]
    assert first.log_path == tmp_path / "subscriber-8001.log"


def test_cpus_outside_this_process_are_refused() -> None:
    launch.check_cpus(engine(cpus=(min(os.sched_getaffinity(0)),)))
    with pytest.raises(ConfigError, match=r"rollout-8001: cpus: .* may not use \[4097\]; choose among"):
        launch.check_cpus(engine(cpus=(4097,)))


@pytest.mark.parametrize("num_bytes", [launch.MOST_TEMPORARY_BYTES, launch.MOST_TEMPORARY_BYTES + 1, 70])
def test_an_engines_sockets_have_room_in_a_deep_temporary_folder(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives them names of 36 bytes, and a socket's path has up to 107."""
    variable = "VLLM_RPC_BASE_PATH"
    binds = (
        "import os, socket, tempfile, uuid; "
        f"folder = os.environ.get('{variable}', tempfile.gettempdir()); "
        "socket.socket(socket.AF_UNIX).bind(f'{folder}/{uuid.uuid4()}')"
    )
    with TemporaryDirectory(dir="/tmp") as folder:
        deep = Path(folder) / ("d" * (num_bytes - len(folder) - 1))
        deep.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(deep))
        monkeypatch.setenv("TMPDIR", str(deep))
        monkeypatch.delenv(variable, raising=False)
        server = launch.engine_process(engine(), log_path=None)
        server.argv = [sys.executable, "-c", binds]
        with server:
            assert server.wait(PATIENCE_S) == 0
