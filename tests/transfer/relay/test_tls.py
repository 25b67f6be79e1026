"""An embedded relay with a certificate is reached over TLS alone, by those who trust it."""

from pathlib import Path

import pytest
from relay_process import CAPACITY_BYTES, RelayProcess, StartRelay

from rose.arguments import run_command
from rose.errors import ConfigError, RelayError, RelayFull
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.server import main
from tests.certificates import make_certificate


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return make_certificate(tmp_path)


def start_tls(start_relay: StartRelay, certificate: tuple[Path, Path]) -> RelayProcess:
    shown, key = certificate
    options = ("--tls-certificate", str(shown), "--tls-key", str(key), "--tls-ca", str(shown))
    return start_relay("embedded", *options)


@pytest.mark.slow
def test_who_trusts_the_certificate_reads_and_writes(
    start_relay: StartRelay, certificate: tuple[Path, Path]
) -> None:
    first, second = (start_tls(start_relay, certificate) for _ in range(2))
    assert first.url.startswith("embedded+tls://127.0.0.1:")
    trusted = [f"{each.url}?ca={certificate[0]}" for each in (first, second)]
    relay, beside = (open_relay(url) for url in trusted)
    data = bytes(3 << 20)
    relay.put("rose/run/1-0/0", data)
    assert relay.get("rose/run/1-0/0") == data
    taken = relay.put_with_copies("rose/run/HEAD", b"head", is_replacing=True, copy_to=[trusted[1]])
    assert list(taken) == [trusted[1]] and beside.get("rose/run/HEAD") == b"head"
    with pytest.raises(RelayFull, match="507"):
        relay.put("rose/run/1-0/1", bytes(CAPACITY_BYTES + 1))
    for each in (relay, beside):
        each.close()
    copies = open_relay(",".join(trusted))
    copies.upsert("rose/run/HEAD", b"later")
    assert copies.get("rose/run/HEAD") == b"later"
    copies.close()


@pytest.mark.slow
def test_a_client_that_does_not_trust_it_or_speaks_plain_http_is_refused(
    start_relay: StartRelay, certificate: tuple[Path, Path]
) -> None:
    url = start_tls(start_relay, certificate).url
    with pytest.raises(RelayError, match=r"CERTIFICATE_VERIFY_FAILED.*; name the file .*\?ca=FILE"):
        open_relay(url)
    with pytest.raises(RelayError, match=r"Hostname mismatch.*and the host as the relay's certificate names"):
        open_relay(f"{url.replace('127.0.0.1', 'localhost')}?ca={certificate[0]}")
    with pytest.raises(RelayError, match=r"http://127.*its URL is embedded\+tls://HOST"):
        open_relay(url.replace("+tls", ""))
    with pytest.raises(RelayError, match=r"https://127.*its URL is embedded://HOST"):
        open_relay(start_relay("embedded").url.replace("embedded:", "embedded+tls:"))
    with pytest.raises(ConfigError, match=r"certificates /none.pem: No such file"):
        open_relay(f"{url}?ca=/none.pem")
    with pytest.raises(ValueError, match=r"for TLS it must be embedded\+tls://"):
        open_relay(f"embedded://127.0.0.1:1?ca={certificate[0]}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tls-certificate", "CERT"], "go together"),
        (["--kind", "mooncake", "--tls-certificate", "CERT", "--tls-key", "KEY"], "for --kind embedded"),
        (["--tls-certificate", "CERT", "--tls-key", "/none.key"], "No such file or directory; they must be"),
        (["--tls-certificate", "KEY", "--tls-key", "KEY"], "in PEM"),
        (["--tls-ca", "KEY"], "need a file in PEM"),
    ],
)
def test_flags_that_do_not_fit_are_one_line_and_status_2(
    certificate: tuple[Path, Path], capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    given = [{"CERT": str(certificate[0]), "KEY": str(certificate[1])}.get(each, each) for each in options]
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(run_command("relay", main, given))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
