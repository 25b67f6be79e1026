"""Ports of this machine: one that is free, whether a given one is, and whether others may reach it.

It loads the standard library alone: commands import it that must start fast.
"""

import ipaddress
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from rose.errors import ConfigError

_FIRST_PORT = 20_000
"""Well-known services use lower ports."""
_given_ports: set[int] = set()


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach what listens on ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def url_host(host: str) -> str:
    """Returns how URLs write the address at which this machine reaches what listens on ``host``."""
    reached = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host.strip("[]"), host.strip("[]"))
    return f"[{reached}]" if ":" in reached else reached


def check_exposure(given: str, host: str, keys: Mapping[str, str | None], *, is_insecure: bool) -> None:
    """Checks that other machines need a key for what listens on ``host``.

    given: the flag or setting that names the host. keys: the keys that protect the address, by the names of
    their variables; empty if it knows no keys. An empty key protects nothing. Raises: ConfigError if a key is
    missing, unless the user insists.
    """
    missing = [name for name, key in keys.items() if not key]
    if is_insecure or is_loopback(host) or (keys and not missing):
        return
    what = "use it without a key" if keys else "use it, because it knows no keys"
    fix = f"set {' and '.join(missing)}, " if missing else ""
    raise ConfigError(
        f"{given} {host}: whoever reaches this address could {what}; {fix}listen on 127.0.0.1, or give "
        "--insecure"
    )


def check_port_free(host: str, port: int) -> None:
    """Raises: ConfigError if nothing can listen on ``host:port``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} can't be used ({error.strerror}); choose another port"
            ) from error


def free_port() -> int:
    """Returns a port of loopback on which no process listens now, a different one in each call.

    It is below the ports that the kernel gives to outgoing connections: it takes vLLM seconds to listen, and
    meanwhile the kernel could give away one of those.
    """
    while True:
        port = _FIRST_PORT + secrets.randbelow(_first_outgoing_port() - _FIRST_PORT)
        if port in _given_ports:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # it is in use
                continue
        _given_ports.add(port)
        return port


def _first_outgoing_port() -> int:
    """Returns the first port that the kernel gives to outgoing connections; its default if it can't be
    read."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first = 32_768
    # Some hosts give nearly all ports to outgoing connections; then the lowest are as good as any.
    return max(first, _FIRST_PORT + 4_096)
