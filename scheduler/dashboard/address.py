"""Where the dashboard listens.

Reads ``[HOST:]PORT``, and refuses an invalid address with an example.
"""

import ipaddress
import re
from dataclasses import dataclass
from typing import Self

from rose.errors import ConfigError
from rose.ports import check_exposure

DEFAULT = "127.0.0.1:8200"
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host without brackets, and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """``PORT`` is on loopback; IPv6 hosts stand in brackets. Raises: ConfigError."""
        host, separator, port = text.rpartition(":")
        host = host if separator else "127.0.0.1"
        is_bracketed = host.startswith("[") and host.endswith("]")
        bare = host[1:-1] if is_bracketed else host
        if not (_is_v6(bare) if is_bracketed else _HOST_NAME.fullmatch(bare)):
            raise ConfigError(f"--http {text!r}: {host!r} is no host; write it like {DEFAULT} or [::1]:8200")
        if not port.isascii() or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ConfigError(f"--http {text!r}: port {port!r}, expected 1 to 65535; write it like {DEFAULT}")
        return cls(host=bare, port=int(port))

    def check_exposure(self, key: str | None, *, is_insecure: bool) -> None:
        """Raises: ConfigError if others than this machine would reach the dashboard without a key."""
        check_exposure("--http", self.host, {"ROSE_DASHBOARD_KEY": key}, is_insecure=is_insecure)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _is_v6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
