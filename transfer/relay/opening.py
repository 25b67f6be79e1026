"""Opens the relay, or the several copies of one, that a URL names."""

from functools import partial

from rose.tls import client_context
from rose.transfer.relay.protocol import Relay
from rose.transfer.relay.url import data_path, parse_relay_url


def open_relay(url: str, key: str | None = None) -> Relay:
    """Connects to a running relay, or to several copies of one, whose URLs are separated by commas.

    key: sent to embedded relays. Raises: RelayError when nothing answers there; ValueError on a bad URL;
    ConfigError on a bad file of certificates, or where an RDMA card is missing.
    """
    urls = url.split(",")
    if len(urls) == 1:
        return _open_one(url, key)
    if len(set(urls)) != len(urls):
        raise ValueError(f"relay URL {url!r} names a relay twice: copies must be independent")
    for each in urls:
        parse_relay_url(each)
    from rose.transfer.relay.replicated import ReplicatedRelay

    return ReplicatedRelay((each, partial(_open_one, each, key)) for each in urls)


def _open_one(url: str, key: str | None) -> Relay:
    kind, host, port, options = parse_relay_url(url)
    if kind == "embedded":
        from rose.transfer.relay.embedded import EmbeddedRelay

        tls = client_context(options.get("ca")) if "tls" in options else None
        return EmbeddedRelay(host, port, key, tls)
    admin = options.get("admin")
    if admin is not None and not admin.isdigit():
        raise ValueError(f"relay URL {url!r}: admin must be a port number")
    protocol, cards = data_path(options, url)
    from rose.transfer.relay.mooncake import MooncakeRelay

    return MooncakeRelay(host, port, int(admin) if admin is not None else port + 1, protocol, cards)
