"""TLS of routers and relays: the certificate that a server shows, and those that a client trusts, from PEM
files."""

import ssl
from pathlib import Path

from rose.errors import ConfigError


def server_context(certificate: Path, private_key: Path) -> ssl.SSLContext:
    """Returns a server's context. Raises: ConfigError if the files are not a certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password here, OpenSSL would ask the terminal for that of an encrypted key.
        context.load_cert_chain(certificate, private_key, password="")
    except OSError as error:
        raise ConfigError(
            f"--tls-certificate {certificate} and --tls-key {private_key}: {error.strerror or error}; "
            "they must be a certificate and its unencrypted key, in PEM"
        ) from error
    return context


def client_context(trusted: Path | str | None) -> ssl.SSLContext:
    """Returns a client's context. ``trusted``: a file of certificates; None trusts the system's.

    Raises: ConfigError if the file holds no certificate.
    """
    try:
        return ssl.create_default_context(cafile=trusted)
    except OSError as error:
        raise ConfigError(f"certificates {trusted}: {error.strerror or error}; need a file in PEM") from error
