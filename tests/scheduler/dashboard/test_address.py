"""Where the dashboard may listen."""

import pytest

from rose.errors import ConfigError
from rose.scheduler.dashboard.address import Address


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("8200", "127.0.0.1:8200"),
        ("localhost:80", "localhost:80"),
        ("[::1]:8200", "[::1]:8200"),
        ("0.0.0.0:8200", "0.0.0.0:8200"),
        ("node-3.cluster:65535", "node-3.cluster:65535"),
    ],
)
def test_an_address_is_read(text: str, shown: str) -> None:
    assert str(Address.parse(text)) == shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "port ''"),
        (":8200", "'' is no host"),
        ("localhost", "port 'localhost'"),
        ("localhost:0", "1 to 65535"),
        ("localhost:65536", "1 to 65535"),
        ("localhost:-1", "1 to 65535"),
        ("::1:8200", "'::1' is no host"),
        ("[nonsense]:80", "'[nonsense]' is no host"),
        ("http://localhost:80", "is no host"),
        ("a b:80", "is no host"),
    ],
)
def test_a_bad_address_is_refused_with_an_example(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="--http") as refused:
        Address.parse(text)
    assert said in str(refused.value) and "127.0.0.1:8200" in str(refused.value)
