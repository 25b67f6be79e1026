"""Mooncake over RDMA: the protocol and the cards go along the whole way, and a host without them says so."""

from pathlib import Path
from typing import Any

import pytest
from relay_process import StartRelay

from rose.arguments import run_command
from rose.errors import ConfigError, RelayError
from rose.node.checks import check_relay
from rose.node.node_config import EngineConfig
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.relay import url as relay_url
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.server import main
from rose.transfer.relay.url import data_path, parse_relay_url
from rose.types import Role

STORE = "mooncake://127.0.0.1:1?admin=2&protocol=rdma"
NO_CARD = "this host has no RDMA card"


@pytest.fixture
def no_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_url, "RDMA_CARDS", tmp_path / "none")


@pytest.fixture
def two_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder as the kernel makes it for two cards."""
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(relay_url, "RDMA_CARDS", tmp_path)


def path_of(url: str) -> Any:
    return data_path(parse_relay_url(url)[3], url)


@pytest.mark.usefixtures("two_cards")
def test_a_url_names_protocol_and_cards() -> None:
    assert path_of("mooncake://a:1?admin=2") == ("tcp", ())
    assert path_of(STORE) == ("rdma", ("mlx5_0", "mlx5_1"))
    assert path_of(f"{STORE}&devices=mlx5_1:mlx5_0") == ("rdma", ("mlx5_1", "mlx5_0"))
    with pytest.raises(ConfigError, match="devices mlx5_7: no RDMA card of this host, which has mlx5_0, mlx"):
        path_of(f"{STORE}&devices=mlx5_0:mlx5_7")
    for options in ("protocol=roce", "devices=mlx5_0"):
        with pytest.raises(ValueError, match="tcp or rdma, and devices= needs protocol=rdma"):
            path_of(f"mooncake://a:1?{options}")


@pytest.mark.usefixtures("no_cards")
def test_trainers_followers_and_engines_without_a_card_are_refused_before_anything_starts() -> None:
    import torch

    with pytest.raises(ConfigError, match=NO_CARD):
        open_relay(STORE)
    with pytest.raises(ConfigError, match=NO_CARD):
        WeightPublisher({"w": torch.zeros(4)}, STORE)
    engine = EngineConfig(model="m", port=8001, role=Role.ROLLOUT, relay=STORE, run="policy")
    with pytest.raises(ConfigError, match=f"relay: protocol rdma: {NO_CARD}.*use tcp"):
        check_relay(engine)


@pytest.mark.usefixtures("no_cards")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kind", "mooncake", "--protocol", "rdma"], NO_CARD),
        (["--kind", "mooncake", "--devices", "mlx5_0"], "--devices mlx5_0: needs --protocol rdma"),
        (["--protocol", "rdma"], "are for --kind mooncake"),
    ],
)
def test_a_relay_without_a_card_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(run_command("relay", main, flags))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.mooncake
@pytest.mark.slow
@pytest.mark.usefixtures("two_cards")
def test_mooncake_is_asked_for_rdma_over_the_cards(start_relay: StartRelay) -> None:
    """It has no such cards here, so it can't be set up: were it asked for TCP, it could."""
    url = f"{start_relay('mooncake').url}&protocol=rdma&devices=mlx5_0"
    with pytest.raises(RelayError, match="the client's set-up over rdma mlx5_0 failed with code"):
        open_relay(url)
