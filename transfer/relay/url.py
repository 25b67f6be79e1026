"""Relay URLs: ``embedded://HOST:PORT``, ``embedded+tls://HOST:PORT?ca=FILE`` and
``mooncake://HOST:PORT?admin=PORT``."""

from urllib.parse import parse_qs, urlsplit

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
