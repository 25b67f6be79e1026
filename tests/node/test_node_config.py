"""NODE.yaml: what engines inherit, and which nodes make no sense."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rose.config import load_yaml, parse_config
from rose.errors import ConfigError
from rose.node.node_config import NODE_EXAMPLE, EngineConfig, NodeConfig
from rose.node.processes import answers_ok
from rose.ports import free_port
from rose.types import Role


def node(**changes: Any) -> dict[str, Any]:
    return {**yaml.safe_load(NODE_EXAMPLE), **changes}


def test_the_example_in_the_help_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "NODE.yaml"
    path.write_text(NODE_EXAMPLE)
    config = load_yaml(path, NodeConfig)
    assert [engine.role for engine in config.engines] == [Role.SERVING, Role.ROLLOUT]


def test_engines_take_the_pool_and_rollouts_the_relay_of_their_node() -> None:
    serving, rollout = parse_config(node(), NodeConfig, "NODE.yaml").engines
    assert (serving.pool, serving.relay) == ("gpu0", None)
    assert (rollout.pool, rollout.relay, rollout.run) == ("gpu0", "embedded://127.0.0.1:8400", "frozenlake")


def test_plugin_settings_hold_only_what_the_user_set() -> None:
    serving, rollout = parse_config(node(), NodeConfig, "NODE.yaml").engines
    assert serving.plugin_settings() == {
        "role": "serving",
        "pool": "gpu0",
        "slo_ttft_ms": 500.0,
        "slo_tpot_ms": 100.0,
    }
    assert rollout.plugin_settings() == {"role": "rollout", "pool": "gpu0"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pool": {"name": "g", "num_slabs": 8, "headroom_slabs": 8}}, "leaves nothing of 8 slabs"),
        ({"pool": {"name": "g/x", "num_slabs": 8, "headroom_slabs": 1}}, "pool.name"),
        ({"pool": {"name": "g", "num_slabs": 8, "headroom_slabs": 1, "num_shards": 0}}, "pool.num_shards"),
        ({"pool": {"name": "g", "num_slabs": 8, "headroom_slabs": 1, "backend": "gpu"}}, "'host' or 'cuda'"),
        ({"engines": []}, "engines"),
        ({"relay": None}, "run frozenlake needs a relay"),
        ({"engines": [{"model": "m", "role": "serving", "port": 1}] * 2}, "share port 1"),
        ({"engines": [{"model": "m", "role": "serving", "port": 70000}]}, r"engines\[0\]\.port"),
    ],
)
def test_nodes_that_make_no_sense_are_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_config(node(**changes), NodeConfig, "NODE.yaml")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("gpu1", "http://gpu1:8000"),
    ],
)
def test_url_of_an_engine_is_where_this_host_reaches_it(host: str, url: str) -> None:
    engine = EngineConfig(model="m", role=Role.SERVING, port=8000, host=host)
    assert (engine.url, engine.name) == (url, "serving-8000")
    assert host == "gpu1" or not answers_ok(engine.url.replace("8000", str(free_port())))
