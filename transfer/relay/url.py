"""Relay URLs: ``embedded://HOST:PORT``, ``embedded+tls://HOST:PORT?ca=FILE`` and
``mooncake://HOST:PORT?admin=PORT``, the latter over RDMA cards with ``&protocol=rdma`` and, for some of them,
``&devices=mlx5_0:mlx5_1``."""

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from rose.errors import ConfigError

RDMA_CARDS = Path("/sys/class/infiniband")
"""Where the kernel lists RDMA cards by their names."""
PROTOCOLS = ("tcp", "rdma")
_TLS = "+tls"


def parse_relay_url(url: str) -> tuple[str, str, int, dict[str, str]]:
    """Returns (kind, host, port, options) of "embedded://host:port" or "mooncake://host:port?admin=PORT".

    The option "tls" stands for embedded+tls. Raises: ValueError on anything else.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"relay URL {url!r}: {error}") from error
    is_known = parts.scheme in ("embedded", "embedded" + _TLS, "mooncake")
    if not is_known or not parts.hostname or port is None or parts.path:
        raise ValueError(
            f"relay URL {url!r} must be embedded://HOST:PORT, embedded+tls://HOST:PORT?ca=FILE or "
            "mooncake://HOST:PORT"
        )
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    kind = parts.scheme.removesuffix(_TLS)
    if kind != parts.scheme:
        options["tls"] = "1"
    elif "ca" in options or "tls" in options:
        raise ValueError(f"relay URL {url!r}: for TLS it must be embedded+tls://HOST:PORT?ca=FILE")
    return kind, parts.hostname, port, options


def data_path(options: dict[str, str], url: str) -> tuple[str, tuple[str, ...]]:
    """Returns over which protocol a Mooncake store's frames go, and over which RDMA cards of this host.

    Without ``devices`` they are all cards of the host. Raises: ValueError on another protocol; ConfigError
    where a card is missing here.
    """
    protocol = options.get("protocol", PROTOCOLS[0])
    devices = tuple(options["devices"].split(":")) if "devices" in options else ()
    if protocol not in PROTOCOLS or (devices and protocol != "rdma"):
        raise ValueError(f"relay URL {url!r}: protocol must be tcp or rdma, and devices= needs protocol=rdma")
    return protocol, rdma_cards(devices) if protocol == "rdma" else ()


def rdma_cards(wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the wanted RDMA cards of this host, or all if none is named. Raises: ConfigError."""
    there = tuple(sorted(each.name for each in RDMA_CARDS.iterdir())) if RDMA_CARDS.is_dir() else ()
    if not there:
        raise ConfigError(f"protocol rdma: this host has no RDMA card ({RDMA_CARDS} is empty); use tcp")
    missing = [name for name in wanted if name not in there]
    if missing:
        raise ConfigError(
            f"devices {', '.join(missing)}: no RDMA card of this host, which has {', '.join(there)}"
        )
    return wanted if wanted else there


def require_reachable(url: str) -> None:
    """Looks at the URL of a relay, or of several copies, without a call. Raises: ConfigError where this host
    can't go there."""
    for each in url.split(","):
        try:
            kind, _, _, options = parse_relay_url(each)
            if kind == "mooncake":
                data_path(options, each)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def require_mooncake(url: str) -> None:
    """Raises: ValueError unless the URL names one Mooncake store."""
    if parse_relay_url(url)[0] != "mooncake":
        raise ValueError(f"relay URL {url!r} is not of the form mooncake://HOST:PORT")


def address_of(url: str) -> str:
    """Returns the host:port of a relay."""
    _, host, port, _ = parse_relay_url(url)
    return f"{host}:{port}"


def copy_address(url: str) -> str | None:
    """Returns where another embedded relay hands copies of objects to; None for a Mooncake store."""
    kind, host, port, options = parse_relay_url(url)
    scheme = "https://" if "tls" in options else ""
    return f"{scheme}{host}:{port}" if kind == "embedded" else None


def add_beside(url: str, other: str) -> str:
    """Returns the URL of a Mooncake store, with the address of the other store whose frames it copies
    added.
    """
    return f"{url}{'&' if '?' in url else '?'}beside={address_of(other)}"


def beside_of(url: str) -> str | None:
    """Returns the host:port of the store whose frames this one copies; None if it copies from none."""
    kind, _, _, options = parse_relay_url(url)
    return options.get("beside") if kind == "mooncake" else None
