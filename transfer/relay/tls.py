"""The advice for an embedded relay that does not answer because of TLS."""

import ssl
from http.client import RemoteDisconnected


def advice(error: BaseException | None) -> str:
    """Returns what to do if a relay did not answer because of TLS; "" if another reason is likely."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            "; name the file of certificates to trust in the URL, embedded+tls://HOST:PORT?ca=FILE, and the "
            "host as the relay's certificate names it"
        )
    if isinstance(error, ssl.SSLError):
        return "; if the relay serves no TLS, its URL is embedded://HOST:PORT"
    if isinstance(error, RemoteDisconnected):
        return "; if the relay serves TLS, its URL is embedded+tls://HOST:PORT"
    return ""
